"""Ollama's client for JavaScript gets what OpenAI's client gets."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.serving.clients.agents import OLLAMA
from tests.serving.conftest import MODEL, PATIENCE, Server

ROOT = Path(os.environ.get("RIDGELINE_AGENTS", "build/agents")).resolve()
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        not (ROOT / OLLAMA.folder / ".installed").exists(),
        reason="ollama of npm is not installed (python -m tests.serving.clients.agents build/agents)",
    ),
]


def test_answers_are_openais(server: Server) -> None:
    words = [word.replace("{bin}", str(OLLAMA.commands(ROOT))).replace("{url}", server.url) for word in OLLAMA.command]
    done = subprocess.run([*words, MODEL], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    messages: Any = [{"role": "user", "content": "def add(a, b):"}]
    want = server.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
    assert told["whole"]["message"]["content"] == want.choices[0].message.content
    assert told["whole"]["eval_count"] == 12
    assert told["streamed"] == told["generated"] == want.choices[0].message.content
    assert told["listed"] == told["running"] == [MODEL, "alias"]
    assert told["capabilities"] == ["completion"]
    assert told["version"]
    assert (told["pulled"]["name"], told["pulled"]["status"]) == ("ResponseError", 404)
    assert "models that it was started with" in told["pulled"]["message"]
    assert "does not exist" in told["unknown"]["message"]

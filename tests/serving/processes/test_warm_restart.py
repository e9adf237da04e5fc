"""A server that was killed and starts again finds its cache on the disk."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ridgeline_bench.scripts.served import PATIENCE, Served, children
from tests.serving.conftest import MODEL

pytestmark = pytest.mark.dealt

PROMPTS = [[(k * k + 7 * n * k) % 900 + 1 for k in range(200)] for n in range(2)]


def asked(server: Served) -> list[tuple[str, int]]:
    """Return the text of each prompt, and how many of its tokens were found in the cache."""
    found = []
    for prompt in PROMPTS:
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            told = json.load(answer)
        found.append((told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]))
    return found


def until_written(server: Served) -> None:
    """Return once the disk has all blocks that the host's memory got: the server has nothing else to do."""
    began = time.monotonic()
    while (
        not 0
        < server.metric("vllm:kv_offload_store_bytes_total")
        <= server.metric("vllm:kv_offload_tiering_write_bytes_total")
    ):
        assert time.monotonic() - began < PATIENCE, "blocks do not reach the disk"
        time.sleep(0.1)


def test_a_server_that_was_killed_starts_again_with_a_warm_cache(tmp_path: Path) -> None:
    settings = [
        *("--device", "cpu", "--max-model-len", "256", "--kv-cache-memory", str(1 << 24)),
        *("--kv-offloading-size", "0.03", "--kv-disk", str(tmp_path / "kv"), "--kv-disk-size", "0.1"),
    ]
    with Served(*settings) as server:
        before = asked(server)
        assert [cached for _, cached in before] == [0, 0]
        until_written(server)
        [disk] = [tier for tier in json.loads(server.get("/kv")[1])["caches"][0]["tiers"] if tier["name"] == "disk"]
        assert disk["used"] > 0
        for process in (server.process.pid, *children(server.process.pid)):
            os.kill(process, signal.SIGKILL)
    with Served(*settings) as server:
        after = asked(server)
        assert server.metric("ridgeline:disk_cache_hits_total") >= 2 * 190
    assert [text for text, _ in after] == [text for text, _ in before]
    assert all(cached >= 190 for _, cached in after)

"""`ridgeline serve --speculative-config` as users start it: over HTTP the same texts as without drafts."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from ridgeline_bench.scripts.served import Served
from tests.serving.conftest import PATIENCE, Server

pytestmark = pytest.mark.dealt

METHODS: dict[str, dict[str, Any]] = {
    "a draft model": {"method": "draft_model", "model": "embedded-draft", "num_speculative_tokens": 4},
    "lookup": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
}
SMALL = ("--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "512")
PROMPT = "    self.width = width\n    self.height = height\n    self."
ASKED: list[dict[str, Any]] = [
    {"prompt": PROMPT, "temperature": 0, "max_tokens": 48},
    {"prompt": PROMPT, "temperature": 0, "max_tokens": 48, "stop": ["\n\n", "return"]},
    {"prompt": PROMPT, "temperature": 0.8, "seed": 7, "n": 3, "max_tokens": 32, "logprobs": 1},
    {"prompt": "def add(a, b):\n    return a", "temperature": 1.0, "top_p": 0.8, "top_k": 40, "seed": 5, "n": 2,
     "max_tokens": 32, "stop": ["def"]},
    {"prompt": "import os\nimport sys\nimport", "temperature": 0, "repetition_penalty": 1.2, "max_tokens": 32},
]  # fmt: skip
Choice = tuple[str, str, list[str]]  # text, reason of its end, tokens of its logprobs


def streamed(url: str, body: dict[str, Any]) -> dict[int, Choice]:
    """Return the choices of a request from the events of its stream."""
    texts, ends, tokens = dict[int, str](), dict[int, str](), dict[int, list[str]]()
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=PATIENCE) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            for choice in json.loads(line[6:])["choices"]:
                index = choice["index"]
                texts[index] = texts.get(index, "") + choice["text"]
                tokens.setdefault(index, []).extend((choice.get("logprobs") or {}).get("tokens", ()))
                if choice["finish_reason"]:
                    ends[index] = choice["finish_reason"]
    return {index: (text, ends[index], tokens[index]) for index, text in texts.items()}


def at_once(url: str) -> list[dict[int, Choice]]:
    """Return the choices that all requests get if they are sent at the same time."""
    found: list[dict[int, Choice]] = [{} for _ in ASKED]

    def send(place: int) -> None:
        found[place] = streamed(url, ASKED[place])

    threads = [threading.Thread(target=send, args=(place,)) for place in range(len(ASKED))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return found


def counted(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and "_created" not in line)


@pytest.fixture(scope="module")
def plain(server: Server) -> list[dict[int, Choice]]:
    return [streamed(server.url, body) for body in ASKED]


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
def test_streams_of_a_server_with_drafts_are_those_of_one_without(method: str, plain: list[dict[int, Choice]]) -> None:
    assert [len(choices) for choices in plain] == [body.get("n", 1) for body in ASKED]
    assert len({text for text, _, _ in plain[2].values()}) == 3
    assert "stop" in {end for _, end, _ in plain[1].values()}
    with Served(*SMALL, "--speculative-config", json.dumps(METHODS[method])) as drafting:
        assert [streamed(drafting.url, body) for body in ASKED] == plain
        assert at_once(drafting.url) == plain
        # How often drafts pay depends on the machine
        assert counted(drafting.url, "vllm:spec_decode_num_accepted_tokens_total") > 0

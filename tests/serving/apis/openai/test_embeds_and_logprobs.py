"""Prompts as vectors, logprobs beyond the likeliest twenty, and outputs that repeat themselves, over HTTP."""

from __future__ import annotations

import base64
import json
import pickle
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from safetensors.torch import save

from ridgeline import LLM
from ridgeline.core.plan.embeds import Embeds
from ridgeline.core.plan.request import Request, SamplingParams
from ridgeline.serving.errors import RequestFailed
from ridgeline.serving.generation import admission
from ridgeline.serving.requests import embeds as reading
from ridgeline.text.requests import RequestLimits
from tests.serving.conftest import DTYPE, MODEL, Server

WIDE: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "temperature": 0}


def post(server: Server, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=WIDE | fields, timeout=120)


def encoded(tensor: torch.Tensor, name: str = "prompt_embeds") -> str:
    return base64.b64encode(save({name: tensor})).decode()


@pytest.fixture(scope="module")
def table_VM() -> torch.Tensor:
    with LLM(dtype=DTYPE) as llm:
        worker: Any = llm.engine._worker
        return worker.decoder.embed.weight.detach().clone() if hasattr(worker, "decoder") else _table(llm)


def _table(llm: LLM) -> torch.Tensor:
    from safetensors import safe_open

    for path in sorted(llm.assembly.folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if "embed_tokens" in name or name.endswith("embed.weight"):
                    return file.get_tensor(name).float()
    raise AssertionError("no table of embeddings")


def test_a_prompt_of_vectors_is_answered_like_its_tokens(server: Server, table_VM: torch.Tensor) -> None:
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "Once upon a time"}).json()["tokens"]
    plain = post(server, prompt=ids).json()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    for tensor in (table_VM[ids], table_VM[ids][None]):
        given = client.completions.create(
            model=MODEL, prompt="", max_tokens=5, temperature=0, extra_body={"prompt_embeds": encoded(tensor)}
        )
        assert given.choices[0].text == plain["choices"][0]["text"]
        assert given.usage is not None
        assert given.usage.prompt_tokens == len(ids)
    both = post(server, prompt=["Once upon a time"], prompt_embeds=[encoded(table_VM[ids])] * 2, return_token_ids=True)
    choices = both.json()["choices"]
    assert [choice["text"] for choice in choices] == [plain["choices"][0]["text"]] * 3
    assert [choice["prompt_token_ids"] for choice in choices] == [None, None, ids]
    stream = post(server, prompt_embeds=encoded(table_VM[ids]), stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in stream if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == plain["choices"][0]["text"]


def test_prompts_that_are_never_there_at_once_are_refused_for_good(server: Server, table_VM: torch.Tensor) -> None:
    """Each fits the memory of media, and all together never would: to try again later would not help."""
    room, one = server.api.media._decoders.room, table_VM[:4]
    room.most, before = 4 * one.nbytes, room.most
    try:
        assert post(server, prompt_embeds=encoded(one)).status_code == 200
        answer = post(server, prompt_embeds=[encoded(one)] * 3)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_embeds")
    finally:
        room.most = before


def broken(edit: str) -> bytes:
    tensor = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]} | json.loads(edit)
    header = json.dumps({"x": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(32)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (b"", "not the bytes"),
        (b"\x07", "not the bytes"),
        (b"\xff" * 8, "not the bytes"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "not the bytes"),
        ((2).to_bytes(8, "little") + b"{}", "one tensor"),
        ((2).to_bytes(8, "little") + b"[]", "one tensor"),
        ((4).to_bytes(8, "little") + b"\xff\xfe{}", "not the bytes"),
        (pickle.dumps([1]), "never loaded"),
        (b"PK\x03\x04" + bytes(64), "never loaded"),
        (broken('{"dtype": "I64"}'), "type"),
        (broken('{"dtype": null}'), "type"),
        (broken('{"shape": [2, -4]}'), "shape"),
        (broken('{"shape": [8]}'), "shape"),
        (broken('{"shape": [2, 2, 2]}'), "shape"),
        (broken('{"shape": "24"}'), "shape"),
        (broken('{"shape": [99999999999999999999, 4]}'), "bytes"),
        (broken('{"shape": [3, 4]}'), "bytes"),
        (broken('{"data_offsets": [0, 16]}'), "bytes"),
        (broken('{"data_offsets": null}'), "bytes"),
        (broken('{"shape": [4, 2]}'), "vectors of 2"),
        (save({"a": torch.zeros(2, 4), "b": torch.zeros(2, 4)}), "one tensor"),
        (save({"a": torch.full((2, 4), torch.inf)}), "finite"),
        (save({"a": torch.full((2, 4), torch.nan, dtype=torch.bfloat16)}), "finite"),
        (save({"a": torch.full((2, 4), -torch.inf, dtype=torch.float16)}), "finite"),
    ],
)
def test_files_that_are_wrong_are_refused_in_a_sentence(file: bytes, words: str) -> None:
    limits = RequestLimits(max_model_len=8, vocab_size=10, eos_ids=frozenset(), embeds_width=4)
    with pytest.raises((RequestFailed, ValueError), match=words):
        reading.read_embeds(base64.b64encode(file).decode(), limits)


def test_vectors_are_read_as_they_were_written() -> None:
    limits = RequestLimits(max_model_len=8, vocab_size=10, eos_ids=frozenset(), embeds_width=4)
    x_TM = torch.randn(3, 4)
    found = reading.read_embeds(encoded(x_TM), limits)
    assert len(found) == 3
    assert np.array_equal(np.frombuffer(found.data, "<f4").reshape(3, 4), x_TM.numpy())
    assert found[1:3].data == x_TM[1:].numpy().tobytes()
    with pytest.raises(RequestFailed, match="characters"):
        reading.read_embeds("A" * (reading.most_characters(limits) + 1), limits)
    with pytest.raises(RequestFailed, match="base64"):
        reading.read_embeds("ä", limits)


def test_what_cannot_be_with_vectors_is_refused(server: Server, table_VM: torch.Tensor) -> None:
    vectors = encoded(table_VM[:3])
    for name, value in {"echo": True, "prompt_logprobs": 1, "suffix": "x", "truncate_prompt_tokens": 2}.items():
        answer = post(server, prompt_embeds=vectors, **{name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text
    assert post(server).json()["error"]["param"] == "prompt"
    assert post(server, prompt_embeds="?").json()["error"]["param"] == "prompt_embeds"
    assert post(server, prompt_embeds=encoded(torch.zeros(2, 3))).json()["error"]["param"] == "prompt_embeds"
    assert post(server, prompt_embeds=encoded(table_VM[:1].repeat(5000, 1))).status_code == 400
    assert (
        post(server, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], prompt_embeds=vectors).json()[
            "error"
        ]["param"]
        == "prompt_embeds"
    )


def test_open_vectors_are_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = Embeds("float32", 4, bytes(16))
    request = Request(
        id="a", prompt_token_ids=(0,), params=SamplingParams(), seed=0, max_total_tokens=2, embeds=vectors
    )
    monkeypatch.setattr(admission, "MOST_EMBEDDED", 40)
    bounds, facts = admission.Admission(), server.api.service.facts()
    bounds.admit([request, request], facts)
    with pytest.raises(RequestFailed, match="bytes of vectors"):
        bounds.admit([request], facts)
    bounds.leave(2, 4, 32)
    bounds.admit([request], facts)


def test_logprobs_of_named_tokens_and_of_all(server: Server) -> None:
    named = post(server, prompt="Once upon", logprobs=1, logprob_token_ids=[7, 300], return_tokens_as_token_ids=True)
    told = named.json()["choices"][0]["logprobs"]
    for chosen, top in zip(told["tokens"], told["top_logprobs"], strict=True):
        assert set(top) == {"token_id:7", "token_id:300", chosen}
    size = httpx.get(f"{server.url}/tokenizer_info").json().get("vocab_size")
    every = post(server, prompt="Once upon", max_tokens=1, logprobs=-1, return_tokens_as_token_ids=True).json()
    (top,) = every["choices"][0]["logprobs"]["top_logprobs"]
    assert sum(np.exp(list(top.values()))) == pytest.approx(1, abs=1e-3)
    assert size is None or len(top) >= size
    for token, logprob in told["top_logprobs"][0].items():
        assert logprob == pytest.approx(top[token], abs=1e-3)
    messages = [{"role": "user", "content": "Hi"}]
    chat = post(server, "/v1/chat/completions", messages=messages, logprobs=True, logprob_token_ids=[7, 300]).json()
    for entry in chat["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) in (2, 3)
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    for path, wrong in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": messages})):
        answer = post(server, path, logprob_token_ids=[7], **wrong)
        assert answer.json()["error"]["param"] == "logprob_token_ids"
    answer = post(server, "/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=-1, max_tokens=4000)
    assert answer.status_code == 400, answer.text[:200]


def test_an_output_that_repeats_itself_says_so(server: Server) -> None:
    asked = {"allowed_token_ids": [300], "repetition_detection": {"max_pattern_size": 2, "min_count": 3}}
    messages = [{"role": "user", "content": "Hi"}]
    for path, given in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": messages})):
        answer = post(server, path, ignore_eos=True, max_tokens=20, **asked, **given).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "repetition"
        assert choice["stop_reason"] == "repetition_detected"
        assert answer["usage"]["completion_tokens"] == 3
    for wrong in ({"max_pattern_size": 2}, {"max_pattern": 2}, {"max_pattern_size": 1 << 30, "min_count": 2}):
        answer = post(server, prompt="a", repetition_detection=wrong)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("repetition_detection")

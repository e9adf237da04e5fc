"""What a model recommends in its generation_config.json reaches requests that leave fields out, and no others."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig, ModelLoadError
from ridgeline.core.settings.serving import NamedModel, ServeConfig
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.generation_defaults import GenerationDefaults
from ridgeline.serving.processes.supervisor import Supervisor
from ridgeline.serving.requests.bodies import ChatBody, CompletionBody
from ridgeline.serving.requests.validation import chat_request, completion_requests, parse
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.conftest import StartServer, open_api_server

RECOMMENDED = {
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.125,
    "typical_p": 0.75,
    "repetition_penalty": 1.5,
}
USER = [{"role": "user", "content": "x"}]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(**values: Any) -> Path:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        return tmp_path

    return write


def params_of(engine_socket: Path, setting: str, **body: Any) -> list[SamplingParams]:
    """Of a completion and of a chat."""

    async def work() -> list[SamplingParams]:
        async with open_api_server(engine_socket, ServeConfig(generation_config=setting)) as api:
            return await ask(api)

    async def ask(api: ApiServer) -> list[SamplingParams]:
        [completion] = await completion_requests(api, parse(CompletionBody, {"prompt": "x", **body}), "r")
        chat = await chat_request(api, parse(ChatBody, {"messages": USER, **body}), "r")
        return [completion.params, chat.params]

    return asyncio.run(work())


def test_fields_that_are_left_out_are_the_models(engine_socket: Path, write: Callable[..., Path]) -> None:
    folder = write(**RECOMMENDED, max_new_tokens=33, do_sample=True, eos_token_id=[3, 5])
    for params, most in zip(params_of(engine_socket, str(folder)), (16, 33), strict=True):
        assert {name: getattr(params, name) for name in RECOMMENDED} == RECOMMENDED
        assert params.max_tokens == most


def test_fields_that_are_given_win(engine_socket: Path, write: Callable[..., Path]) -> None:
    """Also where they are what would be the plain default."""
    plain = {name: getattr(SamplingParams(), name) for name in RECOMMENDED}
    folder = write(**RECOMMENDED, max_new_tokens=33)
    for params in params_of(engine_socket, str(folder), max_tokens=9, **plain):
        assert {name: getattr(params, name) for name in RECOMMENDED} == plain
        assert params.max_tokens == 9


@pytest.mark.parametrize("setting", ["none", "vllm"])
def test_none_is_none(engine_socket: Path, setting: str) -> None:
    completion, chat = params_of(engine_socket, setting)
    assert completion == SamplingParams()
    assert chat == SamplingParams(max_tokens=None)


def test_the_models_own_are_what_the_offline_api_takes(engine_socket: Path) -> None:
    recommended = json.loads((EMBEDDED_MODEL / "generation_config.json").read_text())
    assert params_of(engine_socket, "auto")[0] == SamplingParams(
        temperature=recommended["temperature"],
        top_p=recommended["top_p"],
        repetition_penalty=recommended["repetition_penalty"],
    )


def test_text_by_http_equals_the_offline_text(start_server: StartServer) -> None:
    with LLM(max_model_len=256) as llm:
        prompt = {"prompt_token_ids": [5, 6, 7]}
        default = llm._default_params.replace(max_tokens=24, seed=11)
        [ours] = llm.generate([prompt], default)
        [plain] = llm.generate([prompt], SamplingParams(max_tokens=24, seed=11))
    with start_server(generation_config="auto") as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 24, "seed": 11, "return_token_ids": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()
    assert answer["choices"][0]["token_ids"] == ours.outputs[0].token_ids
    assert answer["choices"][0]["token_ids"] != plain.outputs[0].token_ids


def test_end_of_sequence_ids_of_the_file_end_requests(engine_socket: Path, write: Callable[..., Path]) -> None:
    folder = write(eos_token_id=[3, 5])

    async def work() -> frozenset[int]:
        async with open_api_server(engine_socket, ServeConfig(generation_config=str(folder))) as api:
            return api.service.limits().eos_ids

    assert asyncio.run(work()) >= {0, 3, 5}


def test_a_model_without_the_file_and_a_gguf_file_have_none(tmp_path: Path) -> None:
    assert GenerationDefaults.of("auto", tmp_path) == GenerationDefaults()
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert GenerationDefaults.of("auto", file) == GenerationDefaults()


@pytest.mark.parametrize(
    ("values", "said"),
    [({"top_p": 7}, "top_p"), ({"temperature": "hot"}, "temperature"), ({"max_new_tokens": 0}, "max_new_tokens")],
)
def test_a_wrong_file_is_told_before_anything_starts(
    write: Callable[..., Path], tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=said):
        Supervisor(ServeConfig(port=0), [NamedModel(str(tmp_path / "model"), ("m",))])


def test_a_folder_without_such_a_file_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"use auto, none, or such a folder\.$"):
        Supervisor(ServeConfig(port=0, generation_config=str(tmp_path)), [NamedModel(str(EMBEDDED_MODEL), ("m",))])

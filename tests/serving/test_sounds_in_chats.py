"""Sounds in chats over HTTP: a model hears what a client sends."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.hearing import folders, tiny
from tests.serving.conftest import PATIENCE, Server, StartServer, engine_in_a_thread


@pytest.fixture(scope="module")
def hearing(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = folders.complete(tiny.save(folders.NAME, tmp_path_factory.mktemp("model")))
    socket = tmp_path_factory.mktemp("hearing") / "socket"
    with (
        engine_in_a_thread(socket, model=str(folder), kv_cache_memory=8 << 20, max_model_len=1024),
        start_server(folder, socket, limit_mm_per_prompt={"audio": 2}, batch_dir=None) as running,
    ):
        yield running


def test_a_server_hears_input_audio(hearing: Server) -> None:
    samples = tiny.sounds()[1]
    data = base64.b64encode(folders.spoken(samples)).decode()
    text = {"type": "text", "text": "What is <|AUDIO|>?"}  # which is text here
    forms: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
    ]
    for form in forms:
        body = {"messages": [{"role": "user", "content": [form, text]}], "max_tokens": 6, "temperature": 0}
        body |= {"return_token_ids": True, "ignore_eos": True}
        answer = httpx.post(hearing.url + "/v1/chat/completions", json=body, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        ids = answer.json()["prompt_token_ids"]
        assert ids.count(tiny.AUDIO) == tiny.vectors(folders.NAME, samples)
        assert answer.json()["choices"][0]["token_ids"] == folders.written(ids, folders.heard(samples))
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"messages": [{"role": "user", "content": [picture]}]}
    refused = httpx.post(hearing.url + "/v1/chat/completions", json=body, timeout=PATIENCE)
    assert refused.status_code == 400
    assert "reads text and sound alone" in refused.json()["error"]["message"]

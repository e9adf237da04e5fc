"""Vectors by the APIs of Ollama, as its client for Python asks for them, against /v1/embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import pooled_models
from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer, engine_in_a_thread

if find_spec("ollama"):
    import ollama
by_ollama = pytest.mark.skipif(not find_spec("ollama"), reason="ollama is not installed (pip install ollama)")

TEXTS = ["the quick brown fox", "paris", "what is the capital of france and then again"]
NEAR = 1e-5


@pytest.fixture(scope="module")
def embeds(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place: Path = tmp_path_factory.mktemp("embeds")
    prompts = {"query": "what is "}
    folder = pooled_models.sentence_folder("bert", place / "model", "mean_tokens", prompts=prompts)
    socket = place / "socket"
    with engine_in_a_thread(socket, model=str(folder), max_num_seqs=8), start_server(folder, socket) as server:
        yield server


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=PATIENCE)


def vectors(server: Server, texts: list[str], **more: Any) -> list[list[float]]:
    answer = post(server, "/v1/embeddings", input=texts, **more)
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


@by_ollama
def test_ollamas_client_gets_the_same_vectors(embeds: Server) -> None:
    asking = ollama.Client(host=embeds.url, timeout=PATIENCE)
    answer = asking.embed(model=MODEL, input=TEXTS)
    for found, want in zip(answer.embeddings, vectors(embeds, TEXTS), strict=True):
        assert found == pytest.approx(want, abs=NEAR)
    assert answer.prompt_eval_count == sum(len(text.split()) + 2 for text in TEXTS)
    assert answer.total_duration > 0
    [short] = asking.embed(model=f"{MODEL}:latest", input=TEXTS[0], dimensions=8).embeddings
    assert short == pytest.approx(vectors(embeds, TEXTS[:1], dimensions=8)[0], abs=NEAR)
    assert asking.embeddings(model=MODEL, prompt=TEXTS[0]).embedding == pytest.approx(
        vectors(embeds, TEXTS[:1])[0], abs=NEAR
    )
    assert asking.show(MODEL).capabilities == ["embedding"]


@by_ollama
def test_ollamas_client_says_whether_a_long_text_is_cut(embeds: Server) -> None:
    asking = ollama.Client(host=embeds.url, timeout=PATIENCE)
    context = embeds.api.service.facts().max_model_len
    long = "paris " * (2 * context)
    answer = asking.embed(model=MODEL, input=long)
    assert answer.prompt_eval_count == context
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        asking.embed(model=MODEL, input=long, truncate=False)
    with pytest.raises(ollama.ResponseError, match="this model"):
        asking.generate(model=MODEL, prompt="x")

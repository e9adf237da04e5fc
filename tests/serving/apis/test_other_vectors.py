"""Vectors by the APIs of Ollama, Cohere and llama.cpp, as clients for Python ask for them, against /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests import pooled_models
from tests.serving.clients.asked import needing
from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer, engine_in_a_thread

if find_spec("ollama"):
    import ollama
if find_spec("cohere"):
    import cohere
by_cohere = needing("cohere")
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


def embed(server: Server, **body: Any) -> httpx.Response:
    return post(server, "/v2/embed", model=MODEL, **body)


def test_coheres_route_has_the_same_vectors_in_every_form(embeds: Server) -> None:
    want = np.array(vectors(embeds, TEXTS), np.float32)
    answer = embed(embeds, texts=TEXTS, embedding_types=["float", "ubinary", "binary", "base64"])
    assert answer.status_code == 200, answer.text
    found = answer.json()["embeddings"]
    assert np.array(found["float"]) == pytest.approx(want, abs=NEAR)
    assert np.array([np.frombuffer(base64.b64decode(each), "<f4") for each in found["base64"]]) == pytest.approx(
        want, abs=NEAR
    )
    for vector, unsigned, signed in zip(found["float"], found["ubinary"], found["binary"], strict=True):
        bits = "".join("1" if number > 0 else "0" for number in vector)
        assert "".join(f"{byte:08b}" for byte in unsigned)[: len(bits)] == bits
        assert [byte - 128 for byte in unsigned] == signed
    assert answer.json()["texts"] == TEXTS
    tokens = sum(len(text.split()) + 2 for text in TEXTS)
    assert answer.json()["meta"]["billed_units"] == {"input_tokens": tokens}
    short = embed(embeds, texts=TEXTS[:1], output_dimension=8).json()["embeddings"]["float"][0]
    assert short == pytest.approx(vectors(embeds, TEXTS[:1], dimensions=8)[0], abs=NEAR)
    parts = [{"content": [{"type": "text", "text": TEXTS[0]}]}]
    assert embed(embeds, inputs=parts).json()["embeddings"]["float"][0] == pytest.approx(want[0], abs=NEAR)


def test_coheres_input_type_is_the_models_prompt(embeds: Server) -> None:
    asked = embed(embeds, texts=["paris"], input_type="search_query").json()["embeddings"]["float"][0]
    assert asked == pytest.approx(vectors(embeds, ["what is paris"])[0], abs=NEAR)
    kept = embed(embeds, texts=["paris"], input_type="search_document").json()["embeddings"]["float"][0]
    assert kept == pytest.approx(vectors(embeds, ["paris"])[0], abs=NEAR)


def test_cohere_cuts_a_text_where_it_is_told_to(embeds: Server) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    for side, ours in (("START", "left"), ("END", "right")):
        [found] = embed(embeds, texts=[text], truncate=side, max_tokens=5).json()["embeddings"]["float"]
        want = vectors(embeds, [text], truncate_prompt_tokens=5, truncation_side=ours)[0]
        assert found == pytest.approx(want, abs=NEAR)
    long = "paris " * (2 * embeds.api.service.facts().max_model_len)
    assert embed(embeds, texts=[long]).status_code == 200
    assert embed(embeds, texts=[long], truncate="NONE").json()["error"]["code"] == "context_length_exceeded"


def test_what_cohere_has_and_the_model_has_not_is_one_sentence(embeds: Server, server: Server) -> None:
    for body, word in (
        ({"texts": ["x"], "embedding_types": ["int8"]}, "calibrated"),
        ({"images": ["data:"], "texts": ["x"]}, "either texts, images or inputs"),
        ({"images": ["data:"]}, "reads text alone"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "reads text alone"),
        ({"inputs": [{"content": [{"type": "audio_url", "audio_url": {"url": "x"}}]}]}, "text and image_url alone"),
        ({}, "either texts, images or inputs"),
        ({"texts": ["x"], "inputs": [{"content": []}]}, "either texts, images or inputs"),
        ({"texts": []}, "texts"),
        ({"texts": ["x"], "embeding_types": ["float"]}, "did you mean embedding_types?"),
    ):
        answer = embed(embeds, **body)
        assert answer.status_code == 400, body
        assert word in answer.json()["error"]["message"]
    assert "this model generates" in embed(server, texts=["x"]).json()["error"]["message"]


@by_cohere
def test_coheres_client_gets_the_same_vectors_and_ranks(embeds: Server) -> None:
    client = cohere.ClientV2(api_key="none", base_url=embeds.url)
    answer = client.embed(model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=["float", "ubinary"])
    assert np.array(answer.embeddings.float_) == pytest.approx(np.array(vectors(embeds, TEXTS)), abs=NEAR)
    assert len(answer.embeddings.ubinary) == len(TEXTS)
    ranked = client.rerank(model=MODEL, query="what is paris", documents=TEXTS, top_n=2)
    same = post(embeds, "/v1/rerank", model=MODEL, query="what is paris", documents=TEXTS).json()["results"]
    assert [each.index for each in ranked.results] == [each["index"] for each in same][:2]
    assert [each.relevance_score for each in ranked.results] == pytest.approx(
        [each["relevance_score"] for each in same][:2], abs=NEAR
    )
    with pytest.raises(cohere.errors.BadRequestError, match="calibrated"):
        client.embed(model=MODEL, texts=["x"], input_type="search_query", embedding_types=["int8"])
    with pytest.raises(cohere.errors.NotFoundError, match="does not exist"):
        client.rerank(model="other", query="x", documents=TEXTS)


def test_llama_cpps_route_has_the_same_vectors(embeds: Server) -> None:
    want = vectors(embeds, TEXTS)
    for path, name in (("/embedding", "content"), ("/embeddings", "input")):
        found = post(embeds, path, **{name: TEXTS}).json()
        assert [each["index"] for each in found] == [0, 1, 2]
        for each, vector in zip(found, want, strict=True):
            assert each["embedding"] == [pytest.approx(vector, abs=NEAR)]
    [one] = post(embeds, "/embedding", content=TEXTS[0], brand_new=1).json()
    assert one["embedding"][0] == pytest.approx(want[0], abs=NEAR)
    assert post(embeds, "/embedding").json()["error"]["param"] == "content"

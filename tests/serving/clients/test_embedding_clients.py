"""Clients that embed and rank, against servers of tiny models: they are told what the offline API says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ridgeline import LLM
from tests import pooled_models
from tests.serving.apis.openai.test_pooling import DOCUMENTS, NEAR, QUERY, TEXTS
from tests.serving.clients.asked import needs
from tests.serving.conftest import DTYPE, MODEL, Server, StartServer, engine_in_a_thread


@contextmanager
def serving(folder: Path, start_server: StartServer) -> Iterator[Server]:
    socket = folder.parent / "socket"
    with engine_in_a_thread(socket, model=str(folder)), start_server(folder, socket) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pooled_models.sentence_folder("bert", tmp_path_factory.mktemp("embeds") / "model", "mean_tokens")


@pytest.fixture(scope="module")
def embeds(folder: Path, start_server: StartServer) -> Iterator[Server]:
    with serving(folder, start_server) as server:
        yield server


@pytest.fixture(scope="module")
def vectors(folder: Path) -> list[list[float]]:
    with LLM(folder, dtype=DTYPE, device="cpu") as llm:
        return [result.outputs.embedding for result in llm.embed(TEXTS, use_tqdm=False)]


class TestLangchain:
    pytestmark = needs("langchain_openai")

    def test_embeddings_are_the_offline_ones(self, embeds: Server, vectors: list[list[float]]) -> None:
        from langchain_openai import OpenAIEmbeddings

        # With its check of lengths it would fetch a tokenizer of OpenAI's and send ids that no other model knows.
        model = OpenAIEmbeddings(
            base_url=f"{embeds.url}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False
        )
        for found, expected in zip(model.embed_documents(TEXTS), vectors, strict=True):
            assert found == pytest.approx(expected, abs=NEAR)
        assert model.embed_query(TEXTS[0]) == pytest.approx(vectors[0], abs=NEAR)


class TestLitellm:
    pytestmark = needs("litellm")

    @pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
    def test_embeddings_are_the_offline_ones(
        self, embeds: Server, vectors: list[list[float]], provider: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

        answer = litellm.embedding(
            f"{provider}/{MODEL}", input=TEXTS, api_base=f"{embeds.url}/v1", api_key="none", encoding_format="float"
        )
        for found, expected in zip(answer.data, vectors, strict=True):
            assert found["embedding"] == pytest.approx(expected, abs=NEAR)

    def test_ranks_are_the_offline_ones(
        self, start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

        folder = pooled_models.save("bert_reranker", tmp_path / "ranks")
        with LLM(folder, dtype=DTYPE, device="cpu") as llm:
            ranked = llm.rerank(QUERY, DOCUMENTS, use_tqdm=False)
        with serving(folder, start_server) as server:
            about = {"api_base": f"{server.url}/v1", "api_key": "none"}
            answer = litellm.rerank(f"hosted_vllm/{MODEL}", query=QUERY, documents=DOCUMENTS, **about)
        assert [each["index"] for each in answer.results] == [each.index for each in ranked]
        scores = [each.relevance_score for each in ranked]
        assert [each["relevance_score"] for each in answer.results] == pytest.approx(scores, abs=NEAR)

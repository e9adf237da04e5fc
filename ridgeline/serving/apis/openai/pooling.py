"""The routes of models that embed, classify and compare: POST /v1/embeddings, /pooling, /classify, /score and
/rerank, each of which answers under the names that vLLM, Jina and Cohere give it."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.generation import pooling
from ridgeline.serving.generation.pooling import PooledAnswer, PoolingAsked, pooling_facts
from ridgeline.serving.http import answers
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import is_chat, read_body, request_id, together, while_connected
from ridgeline.serving.http.pieces import json_response
from ridgeline.serving.requests.pooling import (
    ClassifyBody,
    ClassifyChatBody,
    EmbeddingBody,
    EmbeddingChatBody,
    Encoding,
    PoolingBody,
    PoolingChatBody,
    RerankBody,
    ScoreBody,
    compared,
    inputs,
    pooling_params,
    sides,
)
from ridgeline.serving.requests.validation import check_model
from ridgeline.text.pooled import similarity

WORDS = 64  # numbers of an answer that count as one entry: they are written fast


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["pooling"])

    async def answer(request: Request, asked: Sequence[PoolingAsked]) -> list[PooledAnswer]:
        works = [pooling.run(api.service, each, index) for index, each in enumerate(asked)]
        return await while_connected(request.receive, together(works))

    @routes.post(
        "/v1/embeddings", **described(EmbeddingBody | EmbeddingChatBody, "Inputs as vectors", answers.Embeddings)
    )
    async def embeddings(request: Request) -> Response:
        body: EmbeddingBody | EmbeddingChatBody
        body = await read_body(request, EmbeddingBody, EmbeddingChatBody, choose=is_chat)
        name = request_id(request, body.request_id)
        params = pooling_params(body, "embed", dimensions=body.dimensions)
        found = await answer(request, await inputs(api, body, params, name))
        write, name = _encoder(body), f"embd-{name}"

        def content() -> answers.Embeddings:
            told = enumerate(found)
            data = [answers.Embedding(index=index, embedding=write(each.vector)) for index, each in told]
            return answers.Embeddings(**_common(api, body.model, name, found), data=data)

        return await json_response(_numbers(found), content)

    @routes.post(
        "/pooling", **described(PoolingBody | PoolingChatBody, "Inputs as the model pools them", answers.Pooled)
    )
    async def pool(request: Request) -> Response:
        body: PoolingBody | PoolingChatBody
        body = await read_body(request, PoolingBody, PoolingChatBody, choose=is_chat)
        name = request_id(request, body.request_id)
        params = pooling_params(body, body.task, dimensions=body.dimensions)
        found = await answer(request, await inputs(api, body, params, name))
        write, name = _encoder(body), f"pool-{name}"

        def content() -> answers.Pooled:
            data = [answers.PooledInput(index=index, data=write(each.vector)) for index, each in enumerate(found)]
            return answers.Pooled(**_common(api, body.model, name, found), data=data)

        return await json_response(_numbers(found), content)

    @routes.post(
        "/classify", **described(ClassifyBody | ClassifyChatBody, "The labels of inputs", answers.Classifications)
    )
    async def classify(request: Request) -> Response:
        body: ClassifyBody | ClassifyChatBody
        body = await read_body(request, ClassifyBody, ClassifyChatBody, choose=is_chat)
        name = request_id(request, body.request_id)
        found = await answer(request, await inputs(api, body, pooling_params(body, "classify"), name))
        labels = pooling_facts(api.service).labels

        def told(index: int, vector: np.ndarray) -> answers.Classified:
            label = labels[int(vector.argmax())]
            return answers.Classified(index=index, label=label, probs=vector.tolist(), num_classes=len(vector))

        def content() -> answers.Classifications:
            data = [told(index, each.vector) for index, each in enumerate(found)]
            return answers.Classifications(**_common(api, body.model, f"classify-{name}", found), data=data)

        return await json_response(len(found), content)

    async def score(request: Request) -> Response:
        body = await read_body(request, ScoreBody)
        name = request_id(request, body.request_id)
        firsts, seconds = sides(body)
        asked = await compared(api, body, firsts, seconds, name)
        found = await answer(request, asked)
        scores = _scores(api, asked, found, len(firsts))
        data = [answers.Scored(index=index, score=value) for index, value in enumerate(scores)]
        whole = answers.ScoreList(**_common(api, body.model, f"score-{name}", found), data=data)
        return await json_response(len(data), lambda: whole)

    async def rerank(request: Request) -> Response:
        body = await read_body(request, RerankBody)
        name = request_id(request, body.request_id)
        documents = [body.documents] if isinstance(body.documents, str) else body.documents
        asked = await compared(api, body, [body.query], documents, name)
        found = await answer(request, asked)
        scores = _scores(api, asked, found, 1)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        hidden = body.return_documents is False

        def told(index: int) -> answers.RerankedDocument:
            document = UNSET if hidden else answers.RerankedText(text=documents[index])
            return answers.RerankedDocument(index=index, relevance_score=scores[index], document=document)

        model, results = check_model(api, body.model), list(map(told, order))
        whole = answers.Reranked(id=f"rerank-{name}", model=model, usage=_usage(found), results=results)
        return await json_response(len(results), lambda: whole)

    for path in ("/score", "/v1/score"):
        routes.post(path, **described(ScoreBody, "How well pairs of texts go together", answers.ScoreList))(score)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        routes.post(path, **described(RerankBody, "Documents by their relevance", answers.Reranked))(rerank)
    return routes


def _scores(api: ApiServer, asked: Sequence[PoolingAsked], found: Sequence[PooledAnswer], firsts: int) -> list[float]:
    """Return the scores of pairs. Embeddings come with those of the first texts first."""
    task = pooling_facts(api.service).task
    if task == "classify":
        return [float(each.vector[0]) for each in found]
    left, right = found[:firsts], found[firsts:]
    if firsts == 1:
        left = [*left] * len(right)
    if task == "embed":
        return [similarity(a.vector, b.vector) for a, b in zip(left, right, strict=True)]
    ids = (each.prompt.ids for each in asked[firsts:])
    compare = api.encoder.late_similarity
    return [compare(a.vector, b.vector, tokens) for a, b, tokens in zip(left, right, ids, strict=True)]


def _encoder(body: Encoding) -> Callable[[np.ndarray], Any]:
    """Return the function that writes a vector in the client's format."""
    if body.encoding_format != "base64":
        return lambda vector: vector.tolist()
    order = {"little": "<", "big": ">", "native": "=", None: "<"}[body.endianness]
    kind = np.dtype(body.embed_dtype or "float32").newbyteorder(order)  # type: ignore[arg-type]
    return lambda vector: base64.b64encode(vector.astype(kind).tobytes()).decode()


def _numbers(found: Sequence[PooledAnswer]) -> int:
    """Return the size of an answer that holds these vectors, in entries."""
    return sum(each.vector.size for each in found) // WORDS


def _common(api: ApiServer, model: str | None, name: str, found: Sequence[PooledAnswer]) -> dict[str, Any]:
    """Return the fields that all of these lists have."""
    return {"id": name, "created": int(time.time()), "model": check_model(api, model), "usage": _usage(found)}


def _usage(found: Sequence[PooledAnswer]) -> answers.PooledUsage:
    tokens = sum(each.prompt_tokens for each in found)
    cached = answers.PromptTokensDetails(cached_tokens=sum(each.cached_tokens for each in found))
    return answers.PooledUsage(prompt_tokens=tokens, total_tokens=tokens, prompt_tokens_details=cached)

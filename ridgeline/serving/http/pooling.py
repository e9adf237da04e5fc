"""The routes of models that embed, classify and compare: POST /v1/embeddings, /pooling, /classify, /score and
/rerank, each of which answers under the names that vLLM, Jina and Cohere give it."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.generation import pooling
from ridgeline.serving.generation.pooling import PooledAnswer, PoolingAsked, pooling_facts
from ridgeline.serving.http import answers
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import read_body, request_id, together, while_connected
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
        body = await read_body(request, EmbeddingBody, EmbeddingChatBody, choose=_is_chat)
        name = request_id(request, body.request_id)
        params = pooling_params(body, "embed", dimensions=body.dimensions)
        found = await answer(request, await inputs(api, body, params, name))
        return await _listed(api, body.model, f"embd-{name}", "embedding", "embedding", found, _encoder(body))

    @routes.post(
        "/pooling", **described(PoolingBody | PoolingChatBody, "Inputs as the model pools them", answers.Pooled)
    )
    async def pool(request: Request) -> Response:
        body: PoolingBody | PoolingChatBody
        body = await read_body(request, PoolingBody, PoolingChatBody, choose=_is_chat)
        name = request_id(request, body.request_id)
        params = pooling_params(body, body.task, dimensions=body.dimensions)
        found = await answer(request, await inputs(api, body, params, name))
        return await _listed(api, body.model, f"pool-{name}", "pooling", "data", found, _encoder(body))

    @routes.post(
        "/classify", **described(ClassifyBody | ClassifyChatBody, "The labels of inputs", answers.Classifications)
    )
    async def classify(request: Request) -> Response:
        body: ClassifyBody | ClassifyChatBody
        body = await read_body(request, ClassifyBody, ClassifyChatBody, choose=_is_chat)
        name = request_id(request, body.request_id)
        found = await answer(request, await inputs(api, body, pooling_params(body, "classify"), name))
        labels = pooling_facts(api.service).labels

        def content() -> dict[str, Any]:
            data = [
                {
                    "index": index,
                    "label": labels[int(each.vector.argmax())],
                    "probs": each.vector.tolist(),
                    "num_classes": len(each.vector),
                }
                for index, each in enumerate(found)
            ]
            return _envelope(api, body.model, f"classify-{name}") | {"data": data, "usage": _usage(found)}

        return await json_response(len(found), content)

    async def score(request: Request) -> Response:
        body = await read_body(request, ScoreBody)
        name = request_id(request, body.request_id)
        firsts, seconds = sides(body)
        found = await answer(request, await compared(api, body, firsts, seconds, name))
        data = [
            {"index": index, "object": "score", "score": value}
            for index, value in enumerate(_scores(api, found, len(firsts)))
        ]
        whole = _envelope(api, body.model, f"score-{name}") | {"data": data, "usage": _usage(found)}
        return await json_response(len(data), lambda: whole)

    async def rerank(request: Request) -> Response:
        body = await read_body(request, RerankBody)
        name = request_id(request, body.request_id)
        documents = [body.documents] if isinstance(body.documents, str) else body.documents
        found = await answer(request, await compared(api, body, [body.query], documents, name))
        scores = _scores(api, found, 1)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        shown = body.return_documents is not False
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": documents[index]}} if shown else {})
            for index in order
        ]
        whole = {
            "id": f"rerank-{name}",
            "model": check_model(api, body.model),
            "usage": _usage(found),
            "results": results,
        }
        return await json_response(len(results), lambda: whole)

    for path in ("/score", "/v1/score"):
        routes.post(path, **described(ScoreBody, "How well pairs of texts go together", answers.ScoreList))(score)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        routes.post(path, **described(RerankBody, "Documents by their relevance", answers.Reranked))(rerank)
    return routes


def _is_chat(data: Any) -> bool:
    return isinstance(data, dict) and "messages" in data


def _scores(api: ApiServer, found: Sequence[PooledAnswer], firsts: int) -> list[float]:
    """Return the scores of pairs. Embeddings come with those of the first texts first."""
    if pooling_facts(api.service).task == "classify":
        return [float(each.vector[0]) for each in found]
    left, right = found[:firsts], found[firsts:]
    pairs = zip([*left] * len(right) if firsts == 1 else left, right, strict=True)
    return [similarity(a.vector, b.vector) for a, b in pairs]


def _encoder(body: Encoding) -> Callable[[np.ndarray], Any]:
    """Return the function that writes a vector in the client's format."""
    if body.encoding_format != "base64":
        return lambda vector: vector.tolist()
    order = {"little": "<", "big": ">", "native": "=", None: "<"}[body.endianness]
    kind = np.dtype(body.embed_dtype or "float32").newbyteorder(order)  # type: ignore[arg-type]
    return lambda vector: base64.b64encode(vector.astype(kind).tobytes()).decode()


async def _listed(
    api: ApiServer,
    model: str | None,
    name: str,
    kind: str,
    field: str,
    found: Sequence[PooledAnswer],
    written: Callable[[np.ndarray], Any],
) -> Response:
    """Return the answer with a vector, or several, for each input."""

    def content() -> dict[str, Any]:
        data = [{"index": index, "object": kind, field: written(each.vector)} for index, each in enumerate(found)]
        return _envelope(api, model, name) | {"data": data, "usage": _usage(found)}

    return await json_response(sum(each.vector.size for each in found) // WORDS, content)


def _envelope(api: ApiServer, model: str | None, name: str) -> dict[str, Any]:
    return {"id": name, "object": "list", "created": int(time.time()), "model": check_model(api, model)}


def _usage(found: Sequence[PooledAnswer]) -> dict[str, Any]:
    tokens = sum(each.prompt_tokens for each in found)
    cached = sum(each.cached_tokens for each in found)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": cached},
    }

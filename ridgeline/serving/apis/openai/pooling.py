"""The routes of models that embed, classify and compare: POST /v1/embeddings, /pooling, /classify, /score and
/rerank, each of which answers under the names that vLLM, Jina and Cohere give it."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.core.specs.pooling import Task
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.generation.pooling import PooledAnswer, PoolingAsked, pooling_facts
from ridgeline.serving.http import answers
from ridgeline.serving.http.describe import BYTES, described, or_bytes
from ridgeline.serving.http.exchange import is_chat, read_body, request_id
from ridgeline.serving.http.pieces import gathered, json_response, response_in_pieces
from ridgeline.serving.http.vectors import ORDERS, SIZES, entries, vector_bytes, vectors_of
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

MOST_TOLD = 400  # vectors in one header, which is below 64 KiB, as many clients take


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["pooling"])

    @routes.post(
        "/v1/embeddings",
        **or_bytes(described(EmbeddingBody | EmbeddingChatBody, "Inputs as vectors", answers.Embeddings)),
    )
    async def embeddings(request: Request) -> Response:
        body: EmbeddingBody | EmbeddingChatBody
        body = await read_body(request, EmbeddingBody, EmbeddingChatBody, choose=is_chat)
        return await answer_embeddings(api, request, body)

    @routes.post(
        "/pooling",
        **or_bytes(described(PoolingBody | PoolingChatBody, "Inputs as the model pools them", answers.Pooled)),
    )
    async def pool(request: Request) -> Response:
        body: PoolingBody | PoolingChatBody
        body = await read_body(request, PoolingBody, PoolingChatBody, choose=is_chat)
        return await answer_pooling(api, request, body)

    @routes.post(
        "/classify", **described(ClassifyBody | ClassifyChatBody, "The labels of inputs", answers.Classifications)
    )
    async def classify(request: Request) -> Response:
        body: ClassifyBody | ClassifyChatBody
        body = await read_body(request, ClassifyBody, ClassifyChatBody, choose=is_chat)
        return await answer_classes(api, request, body)

    async def score(request: Request) -> Response:
        return await answer_score(api, request, await read_body(request, ScoreBody))

    async def rerank(request: Request) -> Response:
        return await answer_rerank(api, request, await read_body(request, RerankBody))

    for path in ("/score", "/v1/score"):
        routes.post(path, **described(ScoreBody, "How well pairs of texts go together", answers.ScoreList))(score)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        routes.post(path, **described(RerankBody, "Documents by their relevance", answers.Reranked))(rerank)
    return routes


async def answer_embeddings(api: ApiServer, request: Request, body: EmbeddingBody | EmbeddingChatBody) -> Response:
    """Return a vector for each input. Raise RequestFailed or InvalidRequest, as the other answers here do."""

    def content(common: dict[str, Any], vectors: list[Any]) -> answers.Embeddings:
        data = [answers.Embedding(index=index, embedding=each) for index, each in enumerate(vectors)]
        return answers.Embeddings(**common, data=data)

    return await _answer_vectors(api, request, body, "embed", content)


async def answer_pooling(api: ApiServer, request: Request, body: PoolingBody | PoolingChatBody) -> Response:
    """Return the results of the task, which is the model's own unless the body names one."""

    def content(common: dict[str, Any], vectors: list[Any]) -> answers.Pooled:
        data = [answers.PooledInput(index=index, data=each) for index, each in enumerate(vectors)]
        return answers.Pooled(**common, data=data)

    return await _answer_vectors(api, request, body, body.task, content)


async def _answer_vectors(
    api: ApiServer,
    request: Request,
    body: EmbeddingBody | EmbeddingChatBody | PoolingBody | PoolingChatBody,
    task: Task | None,
    content: Callable[[dict[str, Any], list[Any]], Any],
) -> Response:
    """Return the vectors of inputs in the client's format. `content` makes the JSON of the fields that all have, and of
    the vectors as they are written."""
    name = request_id(request, body.request_id)
    params = pooling_params(body, task, dimensions=body.dimensions)
    asked = await inputs(api, body, params, name)
    if body.encoding_format == "bytes" and len(asked) > MOST_TOLD:
        raise BadRequest(
            f"encoding_format bytes tells of each vector in a header, and so takes at most {MOST_TOLD} inputs, not "
            f"{len(asked)}; send fewer, or ask for bytes_only.",
            param="encoding_format",
        )
    found = await vectors_of(api, request, asked)
    common = _common(api, body.model, f"{'embd' if task == 'embed' else 'pool'}-{name}", found)
    write = partial(vector_bytes, dtype=body.embed_dtype or "float32", order=ORDERS[body.endianness])
    if body.encoding_format in ("bytes", "bytes_only"):
        headers = _metadata(body, common, found) if body.encoding_format == "bytes" else None
        pieces = gathered(write(each.vector) for each in found)
        return await response_in_pieces(entries(found), pieces, BYTES, headers)
    if body.encoding_format == "base64":
        return await json_response(
            entries(found), lambda: content(common, [base64.b64encode(write(each.vector)).decode() for each in found])
        )
    return await json_response(entries(found), lambda: content(common, [each.vector.tolist() for each in found]))


def _metadata(body: Encoding, common: dict[str, Any], found: Sequence[PooledAnswer]) -> dict[str, str]:
    """Return the header that tells where each vector lies in the answer's bytes."""
    dtype, data, end = body.embed_dtype or "float32", [], 0
    for index, each in enumerate(found):
        start, end = end, end + each.vector.size * SIZES[dtype]
        place = {"index": index, "start": start, "end": end, "shape": each.vector.shape}
        data.append({**place, "embed_dtype": dtype, "endianness": body.endianness or "native"})
    return {"metadata": msgspec.json.encode({**common, "data": data}).decode()}


async def answer_classes(api: ApiServer, request: Request, body: ClassifyBody | ClassifyChatBody) -> Response:
    """Return the likeliest label of each input, and how likely each is."""
    name = request_id(request, body.request_id)
    found = await vectors_of(api, request, await inputs(api, body, pooling_params(body, "classify"), name))
    labels = pooling_facts(api.service).labels

    def told(index: int, vector: np.ndarray) -> answers.Classified:
        label = labels[int(vector.argmax())]
        return answers.Classified(index=index, label=label, probs=vector.tolist(), num_classes=len(vector))

    def content() -> answers.Classifications:
        data = [told(index, each.vector) for index, each in enumerate(found)]
        return answers.Classifications(**_common(api, body.model, f"classify-{name}", found), data=data)

    return await json_response(len(found), content)


async def answer_score(api: ApiServer, request: Request, body: ScoreBody) -> Response:
    """Return the scores of pairs of texts."""
    name = request_id(request, body.request_id)
    firsts, seconds = sides(body)
    asked = await compared(api, body, firsts, seconds, name)
    found = await vectors_of(api, request, asked)
    scores = _scores(api, asked, found, len(firsts))
    data = [answers.Scored(index=index, score=value) for index, value in enumerate(scores)]
    whole = answers.ScoreList(**_common(api, body.model, f"score-{name}", found), data=data)
    return await json_response(len(data), lambda: whole)


async def answer_rerank(api: ApiServer, request: Request, body: RerankBody) -> Response:
    """Return the documents in the order of their relevance."""
    name = request_id(request, body.request_id)
    documents = [body.documents] if isinstance(body.documents, str) else body.documents
    asked = await compared(api, body, [body.query], documents, name)
    found = await vectors_of(api, request, asked)
    scores = _scores(api, asked, found, 1)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    hidden = body.return_documents is False

    def told(index: int) -> answers.RerankedDocument:
        document = UNSET if hidden else answers.RerankedText(text=documents[index])
        return answers.RerankedDocument(index=index, relevance_score=scores[index], document=document)

    model, results = check_model(api, body.model), list(map(told, order))
    whole = answers.Reranked(id=f"rerank-{name}", model=model, usage=_usage(found), results=results)
    return await json_response(len(results), lambda: whole)


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


def _common(api: ApiServer, model: str | None, name: str, found: Sequence[PooledAnswer]) -> dict[str, Any]:
    """Return the fields that all of these lists have."""
    return {"id": name, "created": int(time.time()), "model": check_model(api, model), "usage": _usage(found)}


def _usage(found: Sequence[PooledAnswer]) -> answers.PooledUsage:
    tokens = sum(each.prompt_tokens for each in found)
    cached = answers.PromptTokensDetails(cached_tokens=sum(each.cached_tokens for each in found))
    return answers.PooledUsage(prompt_tokens=tokens, total_tokens=tokens, prompt_tokens_details=cached)

"""The route POST /invocations, which SageMaker calls in a container for every request to its endpoint.

The contract also has GET /ping (`serving/http/health.py`), port 8080 and the argument `serve`: deploy/sagemaker/.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.core.specs.pooling import PoolingSpec, Task
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.openai.chat import answer_chat
from ridgeline.serving.apis.openai.completions import answer_completion
from ridgeline.serving.apis.openai.pooling import (
    answer_classes,
    answer_embeddings,
    answer_pooling,
    answer_rerank,
    answer_score,
)
from ridgeline.serving.http import answers
from ridgeline.serving.http.describe import described, or_bytes
from ridgeline.serving.http.exchange import is_chat, read_body
from ridgeline.serving.requests.bodies import Body, ChatBody, CompletionBody
from ridgeline.serving.requests.pooling import (
    ClassifyBody,
    ClassifyChatBody,
    EmbeddingBody,
    EmbeddingChatBody,
    PoolingBody,
    PoolingChatBody,
    RerankBody,
    ScoreBody,
)

AnyBody = (
    CompletionBody
    | ChatBody
    | EmbeddingBody
    | EmbeddingChatBody
    | ClassifyBody
    | ClassifyChatBody
    | PoolingBody
    | PoolingChatBody
    | RerankBody
    | ScoreBody
)
ANSWER: Mapping[type[Body], Callable[[ApiServer, Request, Any], Awaitable[Response]]] = {
    CompletionBody: answer_completion,
    ChatBody: answer_chat,
    EmbeddingBody: answer_embeddings,
    EmbeddingChatBody: answer_embeddings,
    ClassifyBody: answer_classes,
    ClassifyChatBody: answer_classes,
    PoolingBody: answer_pooling,
    PoolingChatBody: answer_pooling,
    RerankBody: answer_rerank,
    ScoreBody: answer_score,
}
BODIES = tuple(ANSWER)
ANSWERS = (
    answers.Completion,
    answers.Chat,
    answers.Embeddings,
    answers.Classifications,
    answers.Pooled,
    answers.Reranked,
    answers.ScoreList,
)
# The bodies of inputs and of conversations
BY_TASK: Mapping[Task, tuple[type[Body], type[Body]]] = {
    "embed": (EmbeddingBody, EmbeddingChatBody),
    "classify": (ClassifyBody, ClassifyChatBody),
}
SIDES = ScoreBody.model_fields.keys() - RerankBody.model_fields.keys()  # each names one side of a score


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    @routes.post(
        "/invocations",
        **or_bytes(
            described(
                AnyBody,
                "What the model does with the body's fields: it generates, embeds, classifies or compares",
                ANSWERS,
                chunk=answers.ChatChunk,
            )
        ),
    )
    async def invocations(request: Request) -> Response:
        spec = api.service.facts().pooling
        body: Body = await read_body(request, *BODIES, choose=lambda data: BODIES.index(_shape(data, spec)))
        return await ANSWER[type(body)](api, request, body)

    return routes


def _shape(data: Any, spec: PoolingSpec | None) -> type[Body]:
    """Return the model of a body that is sent to a model of this kind. A task that is named is one of POST /pooling."""
    named = data if isinstance(data, dict) else {}
    if spec is None:
        return (CompletionBody, ChatBody)[is_chat(data)]
    if "query" in named:
        return RerankBody
    if not SIDES.isdisjoint(named):
        return ScoreBody
    shapes = None if "task" in named else BY_TASK.get(spec.task)
    return (shapes or (PoolingBody, PoolingChatBody))[is_chat(data)]

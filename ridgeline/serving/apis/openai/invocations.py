"""The route POST /invocations, which SageMaker calls in a container for every request to its endpoint.

The contract also has GET /ping (`serving/http/health.py`), port 8080 and the argument `serve`: deploy/sagemaker/.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.openai.chat import answer_chat
from ridgeline.serving.apis.openai.completions import answer_completion
from ridgeline.serving.http import answers
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import is_chat, read_body
from ridgeline.serving.requests.bodies import ChatBody, CompletionBody


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    @routes.post(
        "/invocations",
        **described(
            CompletionBody | ChatBody,
            "A chat's next message, or what follows a prompt, by the body's fields",
            (answers.Completion, answers.Chat),
            chunk=answers.ChatChunk,
        ),
    )
    async def invocations(request: Request) -> Response:
        body: CompletionBody | ChatBody = await read_body(request, CompletionBody, ChatBody, choose=is_chat)
        if isinstance(body, ChatBody):
            return await answer_chat(api, request, body)
        return await answer_completion(api, request, body)

    return routes

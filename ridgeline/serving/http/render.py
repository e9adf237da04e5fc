"""The routes that show a request as the engine would get it: POST /v1/chat/completions/render and
/v1/completions/render. Nothing is run. Those of /v1/responses and /v1/messages stand with the routes that run."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.generation.service import GenerationRequest
from ridgeline.serving.http.answers import Rendered
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import read_body, request_id
from ridgeline.serving.http.pieces import json_response
from ridgeline.serving.requests.bodies import ChatBody, CompletionBody, SampledBody
from ridgeline.serving.requests.validation import chat_request, check_model, completion_requests


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["tokens"])

    @routes.post("/v1/chat/completions/render", **described(ChatBody, "A chat as a prompt", Rendered))
    async def render_chat(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        asked = await chat_request(api, body, request_id(request, body.request_id))
        return await json_response(len(asked.prompt_token_ids), lambda: shown(api, body, asked))

    @routes.post("/v1/completions/render", **described(CompletionBody, "Prompts as tokens", Rendered, listed=True))
    async def render_completions(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        asked = await completion_requests(api, body, request_id(request, body.request_id))
        size = sum(len(each.prompt_token_ids) for each in asked)
        return await json_response(size, lambda: [shown(api, body, each) for each in asked])

    return routes


def shown(api: ApiServer, body: SampledBody, asked: GenerationRequest) -> Rendered:
    """Return a request with the names that vLLM gives its parts."""
    params = asdict(asked.params)
    return Rendered(
        request_id=asked.id,
        model=check_model(api, body.model),
        prompt=asked.prompt,
        token_ids=asked.prompt_token_ids,
        sampling_params={name: value for name, value in params.items() if value is not None},
        stream=bool(body.stream),
        cache_salt=asked.cache_salt or None,
        priority=asked.priority,
    )

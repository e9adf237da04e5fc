"""The application that an API server serves over HTTP."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.anthropic import messages
from ridgeline.serving.apis.kserve import http as kserve
from ridgeline.serving.apis.llamacpp import completion
from ridgeline.serving.apis.llamacpp import server as llamacpp
from ridgeline.serving.apis.ollama import embed, generate
from ridgeline.serving.apis.ollama import models as ollamas_models
from ridgeline.serving.apis.openai import (
    audio,
    batches,
    chat,
    cohere,
    completions,
    invocations,
    models,
    pooling,
    responses,
    tokenize,
)
from ridgeline.serving.errors import BadRequest, RequestFailed
from ridgeline.serving.http import render
from ridgeline.serving.http.absent import absence
from ridgeline.serving.http.describe import describe
from ridgeline.serving.http.errors import response_for
from ridgeline.serving.http.exchange import ClientGone
from ridgeline.serving.http.pages import add_pages
from ridgeline.serving.http.paths import route_path
from ridgeline.version import __version__

OPTIONAL = (
    "ridgeline.serving.http.operator",
    "ridgeline.serving.http.rest",
    "ridgeline.serving.http.adapters",
    "ridgeline.serving.http.transfer",
    "ridgeline.serving.http.health",
)


def create_app(api: ApiServer) -> FastAPI:
    app = FastAPI(
        title="Ridgeline",
        version=__version__,
        description="An LLM inference server with OpenAI's API.",
        openapi_url=None,  # FastAPI would make the document in the event loop, see pages.py
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
    )
    app.state.unknown_fields = api.config.unknown_fields
    for module in (
        chat,
        completions,
        invocations,
        responses,
        messages,
        models,
        pooling,
        audio,
        cohere,
        render,
        tokenize,
        batches,
        kserve,
        generate,
        embed,
        ollamas_models,
        completion,
        llamacpp,
    ):
        app.include_router(module.router(api))
    for name in OPTIONAL:
        if find_spec(name) is not None:
            app.include_router(import_module(name).router(api))
    add_pages(app, api)
    for kind in (RequestFailed, InvalidRequest, HTTPException, RequestValidationError, ClientGone, OSError, Exception):
        app.add_exception_handler(kind, _answer)
    app.openapi = partial(describe, app, with_keys=bool(api.config.api_key))  # type: ignore[method-assign]
    return app


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=499)  # the client is gone, but the access log shows this answer
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        error = BadRequest(f"{first['msg']}.", param=".".join(map(str, first["loc"][1:])) or None)
    if isinstance(error, HTTPException) and error.status_code == 404:
        why = absence(route_path(request.scope))
        error = HTTPException(404, why) if why is not None else error
    return response_for(error, request.scope)

"""The routes POST /api/embed and /api/embeddings, of models that embed."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.apis.ollama.answers import OllamasVector, OllamasVectors
from ridgeline.serving.apis.ollama.bodies import EmbedBody, OldEmbedBody, known_name
from ridgeline.serving.apis.ollama.generate import nanoseconds
from ridgeline.serving.generation.pooling import PooledAnswer
from ridgeline.serving.http.answers import OllamasError
from ridgeline.serving.http.describe import described
from ridgeline.serving.http.exchange import read_body, request_id
from ridgeline.serving.http.pieces import json_response
from ridgeline.serving.http.vectors import entries, vectors_of
from ridgeline.serving.requests.pooling import EmbeddingBody, inputs, pooling_params
from ridgeline.serving.requests.validation import parse


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["ollama"])

    async def vectors(request: Request, **fields: object) -> list[PooledAnswer]:
        body = parse(EmbeddingBody, {name: value for name, value in fields.items() if value is not None})
        params = pooling_params(body, "embed", dimensions=body.dimensions)
        return await vectors_of(api, request, await inputs(api, body, params, request_id(request)))

    @routes.post("/api/embed", **described(EmbedBody, "Texts as vectors", OllamasVectors, error=OllamasError))
    async def embed(request: Request) -> Response:
        began = time.monotonic()
        body = await read_body(request, EmbedBody)
        most = None if body.truncate is False else -1
        name = known_name(api, body.model)
        found = await vectors(
            request, model=name, input=body.input, dimensions=body.dimensions, truncate_prompt_tokens=most
        )

        def content() -> OllamasVectors:
            return OllamasVectors(
                model=body.model or api.names[0],
                embeddings=[each.vector.tolist() for each in found],
                total_duration=nanoseconds(time.monotonic() - began),
                load_duration=0,
                prompt_eval_count=sum(each.prompt_tokens for each in found),
            )

        return await json_response(entries(found), content)

    @routes.post("/api/embeddings", **described(OldEmbedBody, "A text as a vector", OllamasVector, error=OllamasError))
    async def embeddings(request: Request) -> Response:
        body = await read_body(request, OldEmbedBody)
        name = known_name(api, body.model)
        found = await vectors(request, model=name, input=body.prompt, truncate_prompt_tokens=-1)
        return await json_response(entries(found), lambda: OllamasVector(embedding=found[0].vector.tolist()))

    return routes

"""The route GET /v1/models, and what is running here."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import ModelNotFound
from ridgeline.serving.http.answers import Model, ModelList, Version
from ridgeline.serving.http.describe import answers
from ridgeline.version import __version__


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["models"])

    def card(api: ApiServer, name: str) -> dict[str, Any]:
        facts = api.service.facts()
        return {
            "id": name,
            "object": "model",
            "created": int(api.started),
            "owned_by": "ridgeline",
            "root": facts.model,
            "parent": None,
            "max_model_len": facts.max_model_len,
        }

    @routes.get("/v1/models", summary="The models, under each of their names", responses=answers(ModelList))
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [card(each, name) for each in api.beside for name in each.names]}

    @routes.get("/v1/models/{name:path}", summary="One of them", responses=answers(Model, 404))
    async def retrieve_model(name: str) -> dict[str, Any]:
        for each in api.beside:
            if name in each.names:
                return card(each, name)
        raise ModelNotFound(f"the model {name[:80]!r} does not exist.", param="model")

    @routes.get("/version", summary="The server's version", responses=answers(Version))
    async def version() -> dict[str, str]:
        return {"version": __version__}

    return routes

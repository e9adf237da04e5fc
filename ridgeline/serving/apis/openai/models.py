"""The route GET /v1/models, and what is running here."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import ModelNotFound, Unavailable
from ridgeline.serving.http.answers import Model, ModelList, Version
from ridgeline.serving.http.describe import answers
from ridgeline.serving.http.pieces import json_of
from ridgeline.version import __version__


def router(api: ApiServer) -> APIRouter:
    routes = APIRouter(tags=["models"])

    def card(api: ApiServer, name: str) -> Model:
        facts, started = api.service.facts(), int(api.started)
        return Model(
            id=name, created=started, owned_by="ridgeline", root=facts.model, max_model_len=facts.max_model_len
        )

    def adapted(api: ApiServer, name: str) -> Model:
        found = next((each for each in api.service.facts().adapters if each.name == name), None)
        if found is None:
            raise Unavailable(f"the adapter {name} is not loaded; try again soon.", retry_after=5)
        return msgspec.structs.replace(card(api, name), root=found.folder, parent=found.parent)

    @routes.get("/v1/models", summary="The models, under each of their names", responses=answers(ModelList))
    async def list_models() -> Response:
        models = [card(each, name) for each in api.beside for name in each.names]
        models += [adapted(each, name) for each in api.beside for name in each.adapters]
        return json_of(ModelList(data=models))

    @routes.get("/v1/models/{name:path}", summary="One of them", responses=answers(Model, 404))
    async def retrieve_model(name: str) -> Response:
        for each in api.beside:
            if name in each.names:
                return json_of(card(each, name))
            if name in each.adapters:
                return json_of(adapted(each, name))
        raise ModelNotFound(f"the model {name[:80]!r} does not exist.", param="model")

    @routes.get("/version", summary="The server's version", responses=answers(Version))
    async def version() -> Response:
        return json_of(Version(version=__version__))

    return routes

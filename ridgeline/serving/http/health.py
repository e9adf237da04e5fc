"""The server's health, for probes, which need no key for these routes."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from ridgeline.serving.api_server import ApiServer

RETRY_AFTER = "5"  # seconds


def router(api: ApiServer) -> APIRouter:
    """Return the routes /health/live (the process answers), /health/ready (requests may come) and /health (the engine
    is there and works; a paused one does, and is not ready). Of several engines one is enough, and the answer names
    those that do not work. Of several models one is enough too, and it may sleep, because requests wake it up. /ping is
    /health by the name that SageMaker asks for, and /load says how many requests are open here."""
    routes = APIRouter(tags=["health"])

    def down() -> list[str]:
        if len(api.beside) > 1:
            return [f"{each.names[0]}: {each.illness}" for each in api.beside if each.illness is not None]
        return api.client.illnesses() if len(api.client.engines) > 1 else []

    def illness() -> str | None:
        ill = [f"{each.names[0]}: {each.illness}" for each in api.beside if each.illness is not None]
        if len(api.beside) == 1:
            return api.illness
        return "; ".join(ill) if len(ill) == len(api.beside) else None

    @routes.get("/health/live")
    async def live() -> JSONResponse:
        return _answer(None)

    @routes.get("/health/ready")
    async def ready() -> JSONResponse:
        return _answer(api.unready_at_all, down())

    @routes.get("/health")
    @routes.get("/ping")
    @routes.post("/ping")
    async def health() -> JSONResponse:
        return _answer(illness(), down(), paused=all(each.client.paused for each in api.beside))

    @routes.get("/load")
    async def load() -> JSONResponse:
        return JSONResponse({"server_load": api.service.admission.open_requests})

    return routes


def _answer(illness: str | None, down: list[str] | None = None, *, paused: bool = False) -> JSONResponse:
    if illness is None:
        return JSONResponse({"status": "ok"} | ({"down": down} if down else {}) | ({"paused": True} if paused else {}))
    return JSONResponse({"status": "unavailable", "reason": illness}, 503, {"Retry-After": RETRY_AFTER})

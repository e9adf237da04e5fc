"""Whether the server works: for probes, which need no key for these routes."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from ridgeline.serving.face import Face

RETRY_AFTER = "5"  # seconds


def router(face: Face) -> APIRouter:
    """/health/live: the process answers. /health/ready: send it requests. /health: the engine is there, and works."""
    routes = APIRouter(tags=["health"])

    @routes.get("/health/live")
    async def live() -> JSONResponse:
        return _answer(None)

    @routes.get("/health/ready")
    async def ready() -> JSONResponse:
        return _answer("the server is shutting down" if face.service.admission.draining else _illness(face))

    @routes.get("/health")
    async def health() -> JSONResponse:
        return _answer(_illness(face))

    return routes


def _illness(face: Face) -> str | None:
    if face.client.facts is None:
        return "the engine is not running"
    return None if face.healthy else f"requests run, and no step ended for {face.config.step_timeout:g} s"


def _answer(illness: str | None) -> JSONResponse:
    if illness is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable", "reason": illness}, 503, {"Retry-After": RETRY_AFTER})

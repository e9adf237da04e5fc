"""Routes that let the engine stand still, sleep, wake up, and read its weights again. The names are vLLM's.

The engine obeys one order after the other. All of these routes ask for the admin key. Without one the orders are closed
(middleware.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, get_args

from fastapi import APIRouter, Request

from ridgeline.core.plan.sleep import KINDS
from ridgeline.serving.api_server import ApiServer
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.http.describe import ERROR
from ridgeline.transport.messages import Mode, Order, Pause, Reload, Resume, Sleep, Standing, Wake

TIMEOUT = 60.0  # seconds that an order to the engine is waited for
LOADING_TIMEOUT = 900.0  # seconds for an order by which a model is loaded
MOST_PATH = 4096
REFUSED: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is wrong"} | ERROR,
    403: {"description": "The admin key is needed"} | ERROR,
    409: {"description": "The engine cannot obey as it stands now"} | ERROR,
}


class NotObeyed(BadRequest):
    status, code = 409, "order_not_obeyed"


class NotAllowed(BadRequest):
    status, code = 403, "admin_key_needed"


def router(api: ApiServer) -> APIRouter:
    """Return the routes POST /pause, /resume, /sleep, /wake_up and /reload_weights, and GET /is_paused and
    /is_sleeping."""
    routes = APIRouter(tags=["operator"])
    whose = set[str]({"model"} if len(api.beside) > 1 else ())  # by_model.py has read it

    async def order(message: Order, timeout: float = TIMEOUT) -> Standing:
        if len(api.beside) > 1 and not isinstance(message, Reload):
            raise NotObeyed(
                "the models of this server take turns, by which they sleep and wake; stop the server instead."
            )
        standing = await api.client.order(message, timeout)
        if standing.error:
            raise NotObeyed(standing.error)
        return standing

    @routes.post("/pause", summary="Begin no further step; requests wait", responses=REFUSED)
    async def pause(request: Request) -> dict[str, Any]:
        standing = await order(Pause(mode=_mode(request, whose | {"mode"})))
        return {"status": "paused", "is_paused": standing.paused}

    @routes.post("/resume", summary="Go on after a pause", responses=REFUSED)
    async def resume(request: Request) -> dict[str, Any]:
        _check(request, whose)
        return {"status": "resumed", "is_paused": (await order(Resume())).paused}

    @routes.get("/is_paused", summary="Whether the engine is paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": api.client.paused}

    @routes.post("/sleep", summary="Pause, and give the device's memory back", responses=REFUSED)
    async def sleep(request: Request) -> dict[str, Any]:
        mode, level = _mode(request, whose | {"mode", "level"}), request.query_params.get("level", "1")
        if level not in ("1", "2"):
            raise BadRequest(
                f"level must be 1 (keep the weights) or 2 (keep nothing), got {level[:32]!r}.", param="level"
            )
        standing = await order(Sleep(mode=mode, level=1 if level == "1" else 2))
        return {"status": "asleep", "level": standing.asleep, "is_sleeping": standing.asleep > 0}

    @routes.post("/wake_up", summary="Bring the device's memory back, and go on", responses=REFUSED)
    async def wake_up(request: Request) -> dict[str, Any]:
        _check(request, whose | {"tags"})
        tags = request.query_params.getlist("tags") or KINDS
        if unknown := [tag for tag in tags if tag not in KINDS]:
            raise BadRequest(f"there is no tag {unknown[0][:32]!r}; known: {', '.join(KINDS)}.", param="tags")
        kinds = [kind for kind in KINDS if kind in tags]
        standing = await order(Wake(kinds=kinds), LOADING_TIMEOUT)
        return {"status": "asleep" if standing.asleep else "awake", "is_sleeping": standing.asleep > 0}

    @routes.get("/is_sleeping", summary="Whether the engine sleeps")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": api.client.asleep > 0}

    @routes.post(
        "/reload_weights", summary="Read the weights again, from a folder of the same model", responses=REFUSED
    )
    async def reload_weights(request: Request) -> dict[str, Any]:
        mode, path = _mode(request, whose | {"mode", "path"}), request.query_params.get("path", "")
        if path and not api.config.admin_key:
            raise NotAllowed("path names a folder of the server, which needs the operator's key; set --admin-key.")
        if len(path) > MOST_PATH:
            raise BadRequest(f"path has {len(path)} characters; at most {MOST_PATH} will do.", param="path")
        standing = await order(Reload(mode=mode, path=path), LOADING_TIMEOUT)
        return {"status": "reloaded", "is_paused": standing.paused}

    return routes


def _check(request: Request, known: Collection[str]) -> None:
    for name in request.query_params.keys() - set(known):
        takes = f"takes {' and '.join(sorted(known))}" if known else "takes no parameters"
        raise BadRequest(f"{request.url.path} {takes}, not {name[:32]!r}; leave it out.", param=name[:32])


def _mode(request: Request, known: Collection[str]) -> Mode:
    """Return the mode, which decides what becomes of the present requests."""
    _check(request, known)
    given = request.query_params.get("mode", "abort")
    for mode in get_args(Mode):
        if given == mode:
            return mode
    raise BadRequest(f"mode must be abort, wait or keep, got {given[:32]!r}.", param="mode")

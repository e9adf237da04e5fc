"""Helpers that every route uses on its request and answer: read the body, know the id, notice that the client left."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.bodies import GenerationBody
from ridgeline.serving.requests.bounded_json import INLINE_BYTES, decode_body
from ridgeline.serving.requests.unenforced import unenforced
from ridgeline.serving.requests.validation import parse, read_names
from ridgeline.serving.shares import off_loop
from ridgeline.serving.trace_parent import SANE_ID, name_of

_Body = TypeVar("_Body", bound=BaseModel)
_Result = TypeVar("_Result")

STARTED_AT_ONCE = 16
STALLED = 60.0  # seconds that one write may wait for a client that reads nothing
SHOWN = re.compile(r"[A-Za-z0-9_.-]{1,128}")  # likewise, a field's name
MOST_SHOWN = 32  # fields in one header
MOST_TOLD = 1024  # in the log

logger = logging.getLogger(__name__)
_told: set[str] = set()


class ClientGone(Exception):
    """Raised when the client no longer waits for the answer."""


async def read_body(request: Request, *models: type[_Body], choose: Callable[[Any], int] = lambda data: 0) -> _Body:
    """Return the request's body, checked against its model. Raise BadRequest that names the field at fault.

    Where there are several models, `choose` returns the position of the right one.
    """
    data = await whole_body(request)
    names = set[str]().union(*map(read_names, models))
    lenient = getattr(request.app.state, "unknown_fields", "refuse") == "ignore"
    ignored: list[str] = []

    def read() -> _Body:
        found = decode_body(data, names)
        body = parse(models[choose(found)], found, lenient=lenient, ignored=ignored)
        ignored.extend(unenforced(body) if isinstance(body, GenerationBody) else ())
        return body

    body = await off_loop(len(data), INLINE_BYTES, read)
    tell_ignored(request, ignored)
    return body


async def whole_body(request: Request) -> bytes:
    """Return the body, which comes in one piece (`middleware.with_whole_body`). Starlette's own method copies it, which
    would keep other clients waiting. Raise ClientDisconnect."""
    if not hasattr(request, "_body"):
        pieces, more = list[bytes](), True
        while more:  # once, unless an operator's middleware hands on pieces
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
        request._body = pieces[0] if len(pieces) == 1 else b"".join(pieces)  # where Starlette's own method finds it
    return request._body


def is_chat(data: Any) -> bool:
    """Return True for a body with a conversation. It is the second of those that `read_body` chooses from."""
    return isinstance(data, dict) and "messages" in data


def tell_ignored(request: Request, ignored: list[str]) -> None:
    """Name the fields without effect in the answer's header, beside those named before, and each once in the log."""
    shown = [name for name in ignored if SHOWN.fullmatch(name)][:MOST_SHOWN]
    if not shown:
        return
    state = request.scope.setdefault("state", {})
    state["ignored"] = ", ".join(filter(None, [state.get("ignored"), *shown]))
    new = [name for name in shown if name not in _told]
    if new and len(_told) < MOST_TOLD:
        _told.update(new)
        logger.info("requests have fields without effect here: %s (told once)", ", ".join(new))


def request_id(request: Request, chosen: str | None = None) -> str:
    """Return the request's id: that of its header, else the one that its body chose, else the one that the middleware
    gave, or a new one without it. Raise BadRequest for a body's that could not stand in a header."""
    state = request.scope.setdefault("state", {})
    if chosen is not None and not SANE_ID.fullmatch(chosen):
        raise BadRequest("request_id has 1 to 128 letters, digits and any of ._:-", param="request_id")
    if chosen is not None and not SANE_ID.fullmatch(request.headers.get("x-request-id", "")):
        state["request_id"] = chosen
    return state.get("request_id") or name_of(None)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the work's result. If the client disconnects, cancel the work and raise ClientGone at once."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def together(works: list[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Return all results. The first failure ends the other works and is raised as it is."""
    if len(works) == 1:
        return [await works[0]]
    tasks: list[asyncio.Task[_Result]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                tasks.append(group.create_task(work))
                if len(tasks) % STARTED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # give others a turn
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        for work in works[len(tasks) :]:
            work.close()
    return [task.result() for task in tasks]


def replayed(first: Message, receive: Receive) -> Receive:
    """Return a `receive` that begins with a message that was taken already."""
    left = [first]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

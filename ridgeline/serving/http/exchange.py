"""Helpers that every route uses on its request and answer: read the body, know the id, notice that the client left."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from ridgeline.serving.requests.bounded_json import INLINE_BYTES, decode_body, off_loop
from ridgeline.serving.requests.validation import known_names, parse

_Body = TypeVar("_Body", bound=BaseModel)
_Result = TypeVar("_Result")

# entries (tokens, each with its likeliest others) of the longest answer that is made within the event loop
INLINE_ENTRIES = 2048
STARTED_AT_ONCE = 16


class ClientGone(Exception):
    """Raised when nobody waits for the answer any more."""


async def read_body(request: Request, *models: type[_Body], choose: Callable[[Any], int] = lambda data: 0) -> _Body:
    """Return the request's body, checked against its model. Raise BadRequest that names the field at fault.

    Where there are several models, `choose` returns the position of the right one.
    """
    data = await request.body()
    names = set[str]().union(*map(known_names, models))

    def read() -> _Body:
        found = decode_body(data, names)
        return parse(models[choose(found)], found)

    return await off_loop(len(data), INLINE_BYTES, read)


def request_id(request: Request) -> str:
    """Return the id that the middleware gave to the request, or a new one without it."""
    return request.scope.get("state", {}).get("request_id") or f"req-{uuid.uuid4().hex}"


async def json_response(size: int, content: Callable[[], Any]) -> Response:
    """Return the answer that `content` makes, in a thread if `size`, about its number of entries, is large."""
    encoded = await off_loop(size, INLINE_ENTRIES, lambda: msgspec.json.encode(content()))
    return Response(encoded, media_type="application/json")


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


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

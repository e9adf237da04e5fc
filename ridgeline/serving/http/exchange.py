"""What every route does with a request and its answer: read the body, know the id, notice that the client left."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.validation import parse

_Body = TypeVar("_Body", bound=BaseModel)
_Result = TypeVar("_Result")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def read_body(request: Request, model: type[_Body]) -> _Body:
    """Raises BadRequest, with the field that is wrong."""
    return parse(model, await read_json(request))


async def read_json(request: Request) -> Any:
    data = await request.body()
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}.") from None


def request_id(request: Request) -> str:
    """The middleware's; one of our own where there is none."""
    return request.scope.get("state", {}).get("request_id") or f"req-{uuid.uuid4().hex}"


def json_response(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The work's result. Raises ClientGone, with the work cancelled, as soon as the client disconnects."""
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
    """All results; the first failure ends the others and is raised as it is."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

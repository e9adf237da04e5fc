"""JSON made piece by piece, so that neither all of a long answer is in memory at once nor one call makes it.

    value = {"text": "…", "logprobs": (told(each) for each in tokens), "more": lambda: made()}
    for piece in json_pieces(lambda: value):
        ...

An iterator in the value becomes a list, of which BLOCK elements are encoded at a time. A function is called when its
place is reached, and its result stands there.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.serving.http.exchange import STALLED, ClientGone, while_connected
from ridgeline.serving.shares import BODIES, INLINE_ENTRIES

BLOCK = 16  # elements of a list that are encoded at a time: few, so that they are gone before garbage is looked for
JSON = "application/json"
PIECE = 256 << 10  # bytes, at least, of all pieces but the last

_Part = TypeVar("_Part")


def later(parts: Iterator[_Part]) -> list[_Part]:
    """Return an iterator as the list that it becomes when it is sent."""
    return cast("list[_Part]", parts)


def json_pieces(content: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the JSON of what `content` makes."""
    yield from gathered(_parts(content()))


def gathered(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts, joined to pieces."""
    waiting = bytearray()
    for part in parts:
        waiting += part
        if len(waiting) >= PIECE:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)


def encoded(value: Any) -> Any:
    """Return a value's JSON, which stands for the value in what is encoded later."""
    return msgspec.Raw(b"".join(_parts(value)))


async def json_response(size: int, content: Callable[[], Any]) -> Response:
    """Return the answer that `content` makes. It is made in a thread if `size`, about its number of entries, is large,
    and sent piece by piece if it is long. Whatever `content` raises is raised here."""
    pieces = json_pieces(content)
    del content  # what it holds is let go piece by piece
    return await response_in_pieces(size, pieces, JSON)


async def response_in_pieces(
    size: int, pieces: Iterator[bytes], media_type: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the answer that these pieces make, as `json_response` does."""
    if size <= INLINE_ENTRIES:
        return Response(b"".join(pieces), media_type=media_type, headers=headers)
    first = await BODIES.run(lambda: list(islice(pieces, 2)))
    if len(first) < 2:
        return Response(b"".join(first), media_type=media_type, headers=headers)
    return InPieces(first, pieces, media_type, headers)


def json_of(answer: msgspec.Struct) -> Response:
    """Return a short answer, which is made at once."""
    return Response(msgspec.json.encode(answer), media_type=JSON)


class InPieces(Response):
    """An answer of many pieces, of which one is made while the client takes the one before. A client that takes none
    for STALLED seconds is taken for gone."""

    def __init__(
        self, first: list[bytes], rest: Iterator[bytes], media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self._waiting, self._rest = deque(first), rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except ClientGone:
            return

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            while self._waiting:
                async with asyncio.timeout(STALLED):
                    await send({"type": "http.response.body", "body": self._waiting.popleft(), "more_body": True})
                if not self._waiting and (piece := await BODIES.run(partial(next, self._rest, b""))):
                    self._waiting.append(piece)
        except TimeoutError:
            raise ClientGone from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _parts(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value: what is there already, in one call, around what is made when its turn comes."""
    later, mark = deque[Any](), secrets.token_hex(16)

    def postponed(part: Any) -> str:
        if not (callable(part) or isinstance(part, Iterator)):
            raise TypeError(f"an answer holds a {type(part).__name__}, which JSON has no form for.")
        later.append(part)
        return mark

    head, *rest = msgspec.json.encode(value, enc_hook=postponed).split(f'"{mark}"'.encode())
    del value
    yield head
    for after in rest:
        part = later.popleft()
        yield from _list(part) if isinstance(part, Iterator) else _parts(part())
        yield after


def _list(elements: Iterator[Any]) -> Iterator[bytes]:
    """Yield the JSON of a list."""
    between = b"["
    while block := list(islice(elements, BLOCK)):
        yield between
        yield b"".join(_parts(block))[1:-1]
        between = b","
    yield b"[]" if between == b"[" else b"]"

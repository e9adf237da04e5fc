"""JSON from strangers: how much of it there is is counted before anything is built of it, and what is large is read off
the event loop, in pieces that never hold the interpreter for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from ridgeline.serving.errors import BadRequest

INLINE_BYTES = 64 << 10  # of JSON that is read within the event loop; at the worst that takes a few milliseconds
MOST_CONTAINERS = 1 << 16  # lists and objects
MOST_TEXTS = 1 << 17  # strings, names of fields among them
MOST_VALUES = (1 << 20) + (1 << 17)  # in lists and objects: a prompt may be a million token ids, and have company
SLICE = 256 << 10  # bytes that are counted in one go

# One thread: were there several, each would be a further one that the event loop waits for. What is waiting here is
# large, so it can wait; what is not never comes here.
_THREAD = ThreadPoolExecutor(1, "bodies")
_Result = TypeVar("_Result")
_Fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Size:
    """Count what JSON texts hold together. An upper bound is not enough: strings may be full of brackets."""

    def __init__(self) -> None:
        self.containers = self.values = self._quotes = 0

    def add(self, data: bytes) -> None:
        """Raises BadRequest as soon as it is too much. What is no JSON may count as anything: reading it ends at its
        first mistake, and up to there the count is right."""
        start, inside = 0, 0  # inside: of a string, 1 or 0
        while start < len(data):
            piece = data[start : start + SLICE]
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # not between a backslash and what it stands before
                piece = data[start : start + SLICE + 1]
            start += len(piece)
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
            quotes = piece.count(b'"')
            self._quotes += quotes
            if self._quotes > 2 * MOST_TEXTS:
                raise BadRequest(f"the body holds more than {MOST_TEXTS} strings; send less.")
            outside = b"".join(piece.split(b'"')[inside::2])
            inside ^= quotes & 1
            self.containers += outside.count(b"[") + outside.count(b"{")
            self.values += outside.count(b",")
            if self.containers > MOST_CONTAINERS:
                raise BadRequest(f"the body holds more than {MOST_CONTAINERS} lists and objects; send less.")
            if self.values > MOST_VALUES:
                raise BadRequest(f"the body holds more than {MOST_VALUES} values; send less.")


async def off_loop(size: int, most: int, work: Callable[[], _Result]) -> _Result:
    """The work's result: done here where its size is at most `most`, else in a thread."""
    if size <= most:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


def decode(data: bytes, size: Size | None = None) -> Any:
    """Return what the JSON says. size: also counts others that belong to it. Raises BadRequest."""
    (size or Size()).add(data)
    return _checked(msgspec.json.decode, data)


def decode_body(data: bytes, names: Collection[str]) -> Any:
    """The same for a request's body. Of a large one only the fields of these names are read, one by one."""
    if len(data) <= INLINE_BYTES:
        return _checked(msgspec.json.decode, data)
    Size().add(data)
    fields = _checked(_raw_fields, data)
    return {name: _checked(msgspec.json.decode, raw) for name, raw in fields.items() if name in names}


def _raw_fields(data: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _Fields.decode(data)
    except msgspec.ValidationError:
        raise BadRequest("the body must be a JSON object.") from None


def _checked(read: Callable[[Any], Any], data: Any) -> Any:
    try:
        return read(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}.") from None

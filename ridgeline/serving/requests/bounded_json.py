"""JSON from strangers: its parts are counted before anything is built of it. Large JSON is read outside the event loop
(`serving/shares.py`), in pieces that never hold the interpreter for long."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from ridgeline.serving.errors import BadRequest

# JSON of at most this size is read within the event loop, which takes a few milliseconds at the worst
INLINE_BYTES = 64 << 10
MOST_CONTAINERS = 1 << 16  # lists and objects
MOST_TEXTS = 1 << 17  # strings, names of fields among them
# in lists and objects: a prompt may be a million token ids, and other fields come with it
MOST_VALUES = (1 << 20) + (1 << 17)
UNREAD = "…"  # stands for a value that nobody reads
SLICE = 256 << 10  # bytes counted at a time

_Fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Size:
    """Counts of what several JSON texts hold together. They are exact, because strings may be full of brackets."""

    def __init__(self) -> None:
        self.containers = self.values = self._quotes = 0

    def add(self, data: bytes) -> None:
        """Count the data. Raise BadRequest as soon as it is too much.

        Data that is no JSON may be counted in any way: reading it ends at its first mistake, and up to there the count
        is right.
        """
        start, inside = 0, 0  # inside is 1 within a string, else 0
        while start < len(data):
            piece = data[start : start + SLICE]
            # the cut must not separate a backslash from the character it escapes
            if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
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


def decode(data: bytes, size: Size | None = None) -> Any:
    """Return the decoded JSON. `size` also counts other JSON that belongs to it. Raise BadRequest if it is too much or
    not valid."""
    (size or Size()).add(data)
    return _checked(msgspec.json.decode, data)


def decode_body(data: bytes, names: Collection[str]) -> Any:
    """Return the decoded body of a request. Of a large body only the fields of these names are read, one by one. The
    others' values are UNREAD, or None for null."""
    if len(data) <= INLINE_BYTES:
        return _checked(msgspec.json.decode, data)
    Size().add(data)
    fields = _checked(_raw_fields, data)
    return {
        name: _checked(msgspec.json.decode, raw) if name in names else None if bytes(raw) == b"null" else UNREAD
        for name, raw in fields.items()
    }


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

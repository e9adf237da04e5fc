"""Untrusted JSON: its parts are counted before objects are made of it. Large JSON is read outside the event loop
(`serving/shares.py`), in pieces that never hold the interpreter's lock for long."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from secrets import token_hex
from typing import Any

import msgspec
from pydantic_core import from_json

from ridgeline.serving.errors import BadRequest

# JSON of at most this size is read within the event loop, which takes a few milliseconds at the worst
INLINE_BYTES = 64 << 10
MOST_CONTAINERS = 1 << 16  # lists and objects
MOST_TEXTS = 1 << 17  # strings, names of fields among them
# in lists and objects: a prompt may be a million token ids, and other fields come with it
MOST_VALUES = (1 << 20) + (1 << 17)
UNREAD = "…"  # stands for a value that is not read
SLICE = 256 << 10  # bytes counted at a time
LONG = 1 << 20  # bytes of a string that is decoded in pieces, because one call for all of it would keep others waiting

_Fields, _TEXT = msgspec.json.Decoder(dict[str, msgspec.Raw]), msgspec.json.Decoder(str)
_HIGH = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")


class NotJson(BadRequest):
    """The text is no JSON."""


class Size:
    """Counts of what several JSON texts hold together. They are exact, because strings may be full of brackets."""

    def __init__(self) -> None:
        self.containers = self.values = self._quotes = 0

    def add(self, data: bytes) -> list[slice]:
        """Count the data, and return the places of its LONG strings, without their quotes. Raise BadRequest as soon as
        it is too much.

        Data that is no JSON may be counted in any way: reading it ends at its first mistake, and up to there the count
        is right.
        """
        start, inside = 0, 0  # inside is 1 within a string, else 0
        begin, long = 0, list[slice]()
        while start < len(data):
            piece = data[start : start + SLICE]
            # the cut must not separate a backslash from the character it escapes
            if _ends_in_escape(piece):
                piece = data[start : start + SLICE + 1]
            if b"\\" in piece:  # as base64 has none
                piece = piece.replace(b"\\\\", b"..").replace(b'\\"', b"..")
            quotes = piece.count(b'"')
            if quotes and inside and start + piece.index(b'"') - begin >= LONG:
                long.append(slice(begin, start + piece.index(b'"')))
            begin = start + piece.rindex(b'"') + 1 if quotes else begin
            start += len(piece)
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
        return long


def decode(data: bytes, size: Size | None = None) -> Any:
    """Return the decoded JSON. `size` also counts other JSON that belongs to it. Raise BadRequest if it is too much or
    not valid."""
    long = (size or Size()).add(data)
    return _filled(data, long, lambda hollow: _checked(msgspec.json.decode, hollow))


def decode_body(data: bytes, names: Collection[str]) -> Any:
    """Return the decoded body of a request. Of a large body only the fields of these names are read, one by one. The
    others' values are UNREAD, or None for null."""
    if len(data) <= INLINE_BYTES:
        return _checked(msgspec.json.decode, data)
    return _filled(data, Size().add(data), lambda hollow: _read_fields(hollow, names))


def _read_fields(data: bytes, names: Collection[str]) -> dict[str, Any]:
    return {
        name: _checked(msgspec.json.decode, raw) if name in names else None if bytes(raw) == b"null" else UNREAD
        for name, raw in _checked(_raw_fields, data).items()
    }


def _raw_fields(data: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _Fields.decode(data)
    except msgspec.ValidationError:
        raise BadRequest("the body must be a JSON object.") from None


# ---- long strings ---------------------------------------------------------------------------------------------------


def _filled(data: bytes, long: list[slice], read: Callable[[bytes], Any]) -> Any:
    """Return the result of `read` for the data. It gets marks in the place of long strings, and the strings whose marks
    it returns are decoded by themselves."""
    if not long:
        return read(data)
    mark, begin, parts, places = token_hex(16), 0, list[bytes](), dict[str, slice]()
    for number, place in enumerate(long):
        name = f"{mark}{number}"
        places[name] = place
        parts += [data[begin : place.start], name.encode()]
        begin = place.stop
    whole = [read(b"".join([*parts, data[begin:]]))]
    waiting: list[Any] = [whole]
    while waiting:
        holder = waiting.pop()
        for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            if isinstance(value, (dict, list)):
                waiting.append(value)
            elif isinstance(value, str) and value in places:
                holder[key] = _text(data, places[value])
            if key in places:
                holder[_text(data, places[key])] = holder.pop(key)
    return whole[0]


def _text(data: bytes, place: slice) -> str:
    """Return the text of a string, decoded piece by piece."""
    pieces, start = list[str](), place.start
    while start < place.stop:
        end = place.stop if place.stop - start <= SLICE else _whole_end(data, start, start + SLICE)
        pieces.append(_checked(_TEXT.decode, b'"%b"' % data[start:end]))
        start = end
    return "".join(pieces)


def _whole_end(data: bytes, start: int, end: int) -> int:
    """Return the place at `end`, or a little before it, where no character and no escape is cut in two."""
    while data[end] & 0xC0 == 0x80:  # within a character
        end -= 1
    if _ends_in_escape(data[start:end]):
        end -= 1
    unit = data.rfind(b"\\u", max(start, end - 5), end)
    if unit >= 0 and not _ends_in_escape(data[start:unit]):
        end = unit
    if _HIGH.fullmatch(data[end - 6 : end]) and not _ends_in_escape(data[start : end - 6]):
        end -= 6  # the first half of a pair
    return end


def _ends_in_escape(data: bytes) -> bool:
    """Return True if the data ends with a backslash that escapes what follows."""
    return (len(data) - len(data.rstrip(b"\\"))) % 2 == 1


def _checked(read: Callable[[Any], Any], data: Any) -> Any:
    try:
        return read(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise NotJson(f"the body is not valid JSON: {error}.") from None


def begun_object(text: str) -> Any:
    """Return the object that broken JSON begins, or all of its text as `arguments`. Control characters within strings,
    which some models write, are taken as they are."""
    plain = _STRING.sub(lambda found: found[0].translate(_ESCAPES), text)
    try:
        found = from_json(plain, allow_partial="trailing-strings", cache_strings="none")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


def object_of(text: str) -> dict[str, Any]:
    """Return the object that a call's arguments spell. Of those that were cut off it is what is there, and what is no
    object is named."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        value = begun_object(text)
    return value if isinstance(value, dict) else {"arguments": value}


_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_ESCAPES = {code: f"\\u{code:04x}" for code in range(0x20)}

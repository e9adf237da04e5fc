"""Bounds on untrusted protobuf messages: the fields of a message are counted before objects are made of it.

A field takes a hundred times the memory of the two bytes that encode it, and decoding holds the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from ridgeline.serving.errors import BadRequest
from ridgeline.serving.requests.bodies import MOST_TOKENS

MOST_LEVELS = 100  # of messages within messages; the library itself reads no deeper
MOST_FIELDS = 1 << 15  # in a message and those within it; a list of numbers is one field
INLINE_BYTES = 16 << 10  # longest message that is decoded without being counted: it holds no more fields than bytes
LARGEST_LIST = 5 * MOST_TOKENS  # bytes in a list of numbers, each of which takes at most five
LARGEST_STRUCT = 256 << 10  # bytes in a free-form object, which is decoded value by value
STRUCT = "google.protobuf.Struct"


class _Malformed(Exception):
    """Raised for a message that is no protobuf. The library then reports the mistake in its own words."""


def check_message(data: bytes, read: Callable[[bytes], Any]) -> None:
    """Raise BadRequest if the message has too many fields or is too deep. `read` is the `FromString` of its class."""
    if len(data) > INLINE_BYTES:
        descriptor = getattr(getattr(read, "__self__", None), "DESCRIPTOR", None)
        if descriptor is None:
            raise BadRequest(f"the message has {len(data)} bytes, and this method takes at most {INLINE_BYTES}.")
        with suppress(_Malformed):
            _count(data, 0, len(data), descriptor, MOST_FIELDS, MOST_LEVELS)


def _count(data: bytes, at: int, end: int, descriptor: Descriptor, left: int, levels: int) -> int:
    """Return the number of fields that may still come after those from `at` to `end`. `levels` bounds the nesting that
    may follow."""
    if levels < 0:
        raise BadRequest(f"the message has more than {MOST_LEVELS} levels of messages in messages; send less.")
    while at < end:
        left -= 1
        if left < 0:
            raise BadRequest(f"the message has more than {MOST_FIELDS} fields; send less.")
        key, at = _varint(data, at, end)
        kind = key & 7
        if kind == 0:
            _, at = _varint(data, at, end)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind == 2:
            size, at = _varint(data, at, end)
            if size > end - at:
                raise _Malformed
            left = _within(data, at, at + size, descriptor.fields_by_number.get(key >> 3), left, levels)
            at += size
        else:  # a group, which no message here has
            raise BadRequest("the message has a group, and this method takes none.")
    return left


def _within(data: bytes, at: int, end: int, field: FieldDescriptor | None, left: int, levels: int) -> int:
    """Do the same as `_count` for one field that has a length: a text, a list of numbers, or a message."""
    if field is None or field.type in (field.TYPE_STRING, field.TYPE_BYTES):
        return left
    if field.message_type is None:
        if end - at > LARGEST_LIST:
            raise BadRequest(
                f"{field.name} has {end - at} bytes; at most {MOST_TOKENS} ids are taken.", param=field.name
            )
        return left
    if field.message_type.full_name == STRUCT and end - at > LARGEST_STRUCT:
        message = f"{field.name} has {end - at} bytes; at most {LARGEST_STRUCT} are taken."
        raise BadRequest(message, param=field.name)
    return _count(data, at, end, field.message_type, left, levels - 1)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128:
            return value, at
    raise _Malformed

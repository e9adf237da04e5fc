"""The reason why a body is refused, in one sentence, with its place in the body; and the helpers that errors need."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

from ridgeline.serving.errors import BadRequest

SHOWN = 80  # characters of a value that an error shows


def refusal(errors: list[ErrorDetails], data: Mapping[str, Any]) -> BadRequest:
    """Return the first error in one sentence. The errors of a union's members are merged."""
    path = _path(errors[0], data)
    same = [error for error in errors if _path(error, data) == path]
    words = " or ".join(dict.fromkeys(_words(error) for error in same))
    if errors[0]["type"] == "missing":
        return BadRequest(f"{path} is required.", param=path)
    return BadRequest(f"{path}: {words}, got {shortened(same[0]['input'])}.", param=path)


def _path(error: ErrorDetails, data: Any) -> str:
    """Return the error's place in the body: pydantic's path without the names of union members, which the body does not
    have."""
    parts: list[str] = []
    for part in error["loc"]:
        held = range(len(data)) if isinstance(data, list) else data if isinstance(data, Mapping) else ()
        if part in held:
            data = data[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        parts.append(str(part))
    return ".".join(parts)


def _words(error: ErrorDetails) -> str:
    text = error["msg"].removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


class _Short(reprlib.Repr):
    """A repr that looks at no more of a value than it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxdict = 8
        self.maxstring = self.maxlong = self.maxother = 100


def shortened(value: object) -> str:
    if isinstance(value, (dict, list)) and len(value) >= 100:
        return type(value).__name__
    if isinstance(value, str):
        value = value[:SHOWN]
    elif isinstance(value, int) and value.bit_length() > 1024:
        return "a number of more than 300 digits"
    text = _Short().repr(value) if isinstance(value, (dict, list)) else repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def depth_above(value: object, most: int) -> bool:
    """Return True if lists and objects nest deeper than `most`. It looks no deeper than it must."""
    level, depth = [value], 0
    while level and depth <= most:
        inside = [each for each in level if isinstance(each, (dict, list))]
        level = [item for each in inside for item in (each.values() if isinstance(each, dict) else each)]
        depth += bool(inside)
    return depth > most

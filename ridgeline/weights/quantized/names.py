"""The names by which a quantization config means modules of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from ridgeline.core.errors import ModelLoadError

MOST_REPEATS = 4  # of any length in a pattern: a name of 100 letters can be cut in four million ways
LONGEST = 500
REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)


def pattern(text: str) -> re.Pattern[str]:
    """Return a config's regular expression. Raise ModelLoadError if it is none, or one that may take without end to
    match a name."""
    try:
        found, repeats = re.compile(text), _repeats(_parser.parse(text))
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelLoadError(
            f"config.json has {text[:80]!r} in its quantization config, which is no regular expression ({error})."
        ) from error
    if repeats > MOST_REPEATS or len(text) > LONGEST:
        raise ModelLoadError(
            f"config.json has {text[:80]!r} in its quantization config, a regular expression with too many ways to "
            f"match a name; write it with at most {MOST_REPEATS} repeats, and none within another."
        )
    return found


def _repeats(part: Any, within: bool = False) -> int:
    """Return the number of repeats of no fixed length in a parsed expression. One that repeats a repeat or a choice
    counts as too many: the time for such may double with each letter."""
    found = 0
    for kind, value in part:
        if kind in REPEATS:
            least, most, body = value
            open_ended = most - least > 1
            found += _repeats(body, within or open_ended) + (open_ended and (1 + within * MOST_REPEATS))
        elif kind is _constants.BRANCH:
            found += within * (MOST_REPEATS + 1) + sum(_repeats(each, within) for each in value[1])
        elif isinstance(value, tuple):
            found += sum(_repeats(each, within) for each in value if isinstance(each, _parser.SubPattern))
        elif isinstance(value, _parser.SubPattern):
            found += _repeats(value, within)
    return found


def matches(name: str, target: str) -> bool:
    """Return True if a target of compressed-tensors means the module: "re:" and a regular expression from the name's
    beginning, or the name itself."""
    if target.startswith("re:"):
        return pattern(target[3:]).match(name) is not None
    return name == target


def among(name: str, skipped: Iterable[str]) -> bool:
    """Return True if a list of modules that are not converted means this one: its name, a part of it between dots (or
    the beginning of one), or a pattern with stars or as a regular expression."""
    return any(_means(each, name) for each in skipped)


def _means(skipped: str, name: str) -> bool:
    if skipped.startswith("re:"):
        return matches(name, skipped)
    if "*" in skipped:
        return any(_fits(skipped.split("*"), name[:end]) for end in (len(name), *_dots(name)))
    return re.search(rf"(^|\.){re.escape(skipped)}($|\.)", name) is not None


def _dots(name: str) -> Iterable[int]:
    return (place for place, letter in enumerate(name) if letter == ".")


def _fits(parts: list[str], name: str) -> bool:
    """Return True if a name has these parts in this order, the first at its beginning and the last at its end."""
    first, *inner, last = parts
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    place, end = len(first), len(name) - len(last)
    for part in inner:
        place = name.find(part, place, end)
        if place < 0:
            return False
        place += len(part)
    return True

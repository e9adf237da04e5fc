"""A group of settings: some fields, whose types and bounds are checked as they are declared."""

from __future__ import annotations

from functools import cache
from math import isfinite
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from ridgeline.core.errors import InvalidConfig


class Settings:
    """A group of settings, a frozen dataclass that is a part of `LLMConfig`."""

    def check(self) -> None:
        """Raise InvalidConfig for a value that the group refuses. Types and bounds are right by then."""


class AtLeast(NamedTuple):
    """The least value of a number."""

    value: int


class Named(NamedTuple):
    """The words for a value. A text must not be empty."""

    what: str


def check_fields(settings: Settings) -> None:
    """Raise InvalidConfig for a value of another type than its field has, or below the field's least one."""
    declared = _declared(type(settings))  # type: ignore[arg-type]  # mypy looks at the hash of instances, not of a class
    for name, (kind, notes) in declared.items():
        value = getattr(settings, name)
        if (wanted := _wanted(kind, notes, value)) is not None:
            raise InvalidConfig(f"{name} must be {wanted}, got {value!r}.")
        if get_origin(kind) is Literal and value not in (words := get_args(kind)):
            raise InvalidConfig(f"unknown {name} {value!r}; use {', '.join(words[:-1])} or {words[-1]}.")
        least = next((note.value for note in notes if isinstance(note, AtLeast)), None)
        if least is not None and isinstance(value, float) and not isfinite(value):
            raise InvalidConfig(f"{name} must be a finite number, got {value!r}.")
        if least is not None and value is not None and value < least:
            wanted = f"be at least {least}" if least else "not be negative"
            raise InvalidConfig(f"{name} must {wanted}, got {value!r}.")


@cache
def _declared(kind: type[Settings]) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the type of each field of a class, and what is noted beside it."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: (get_args(hint)[0], hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())
        for name, hint in hints.items()
    }


def _wanted(kind: Any, notes: tuple[Any, ...], value: object) -> str | None:
    """Return the words for what a field takes if the value is something else, or None."""
    types = [get_origin(each) or each for each in get_args(kind) or (kind,)]
    if value is None and NoneType in types:
        return None
    named = next((note.what for note in notes if isinstance(note, Named)), None)
    if bool in types:
        return None if isinstance(value, bool) else "True or False"
    if int in types:
        return None if isinstance(value, int) and not isinstance(value, bool) else named or "a whole number"
    if float in types:
        return None if isinstance(value, int | float) and not isinstance(value, bool) else named or "a number"
    return named if named is not None and (value == "" or not isinstance(value, tuple(types))) else None

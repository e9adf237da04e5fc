"""Schemas that no finite text fits: each object must hold another, without end. A model held to one would write until
its tokens are spent.

A part of a schema can end if it allows a text whose own parts can end. So no part is taken to end at first, and parts
that can by what is known of the others are added until nothing changes. A part is looked at again when one that it
waited for proves to end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from ridgeline.serving.errors import BadRequest

MOST_NAMED = 6  # references of a cycle that an error shows
LONGEST_NAME = 80  # characters of each
MOST_VISITS = 200_000  # parts looked at; a schema that needs more is let through


def check_finite(schema: Any, param: str) -> None:
    """Raise BadRequest that names the cycle if no finite text fits the schema."""
    if not isinstance(schema, Mapping):
        return
    ends = _Ends(schema)
    if ends.can(schema):
        return
    cycle = ends.cycle()
    named = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…" for name in cycle]
    if len(named) > MOST_NAMED:
        named[MOST_NAMED - 1 : -1] = ["…"]
    told = " needs ".join(named)
    raise BadRequest(
        f"no text that ends fits the JSON schema: {told}; let a part of this be null, empty or missing.", param=param
    )


class _Ends:
    """The parts of a schema that can end, of those to which references lead. Two references to one part are the same,
    however they spell it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._visits = root, 0
        self._parts: dict[int, Any] = {}  # by identity
        self._names: dict[int, str] = {}
        self._led_to: dict[str, int] = {}
        for reference in _references(root):
            if reference not in self._led_to and (found := self._referred(reference)) is not None:
                self._led_to[reference] = id(found)
                self._parts[id(found)] = found
                self._names.setdefault(id(found), reference)
        self._ended: set[int] = set()
        self._grow()

    def can(self, part: Any) -> bool:
        """Return True if a part can end."""
        return self._visits > MOST_VISITS or next(self._needs(part), None) is None

    def _grow(self) -> None:
        """Find all parts that can end: each is tried again when the part that it waited for proves to."""
        waiting: dict[int, list[int]] = {}
        trying = deque(self._parts)
        while trying and self._visits <= MOST_VISITS:
            part = trying.popleft()
            if part in self._ended:
                continue
            needed = set(self._needs(self._parts[part]))
            if not needed:
                self._ended.add(part)
                trying.extend(waiting.pop(part, ()))
            for each in needed:
                waiting.setdefault(each, []).append(part)

    def cycle(self) -> list[str]:
        """Return references of which each needs the next, from one to the same one again."""
        seen: dict[int, None] = {}
        part = next(self._needs(self._root))
        while part not in seen:
            seen[part] = None
            part = next(self._needs(self._parts[part]))
        names = [self._names[each] for each in seen]
        return [*names[list(seen).index(part) :], self._names[part]]

    def _needs(self, part: Any) -> Iterator[int]:
        """Yield parts that must end for this one to end, and are not known to."""
        self._visits += 1
        if not isinstance(part, Mapping) or "const" in part or "enum" in part or self._visits > MOST_VISITS:
            return
        reference = part.get("$ref")
        if isinstance(reference, str) and (led := self._led_to.get(reference)) is not None and led not in self._ended:
            yield led
        for name in ("anyOf", "oneOf"):
            choices = part.get(name)
            if isinstance(choices, list) and choices:
                yield from self._of_choice(choices)
        if isinstance(whole := part.get("allOf"), list):
            for each in whole:
                yield from self._needs(each)
        types = part.get("type")
        types = [types] if isinstance(types, str) else types
        if types == ["object"]:
            yield from self._of_object(part)
        elif types == ["array"]:
            yield from self._of_array(part)  # where there are several types, a text of another can do

    def _of_choice(self, choices: list[Any]) -> Iterator[int]:
        """Yield what all choices wait for, since any of it may help, unless one can end."""
        needed: dict[int, None] = {}
        for each in choices:
            found = dict.fromkeys(self._needs(each))
            if not found:
                return
            needed |= found
        yield from needed

    def _of_object(self, part: Mapping[str, Any]) -> Iterator[int]:
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            for name in required:
                if isinstance(name, str) and name in properties:
                    yield from self._needs(properties[name])

    def _of_array(self, part: Mapping[str, Any]) -> Iterator[int]:
        least, first = part.get("minItems"), part.get("prefixItems")
        if not isinstance(least, int) or least < 1:
            return
        first = first if isinstance(first, list) else []
        for each in first[:least]:
            yield from self._needs(each)
        if least > len(first):
            yield from self._needs(part.get("items"))

    def _referred(self, reference: str) -> Any:
        """Return the part of the schema that a reference leads to; None if it is none of this schema's."""
        if reference == "#":
            return self._root
        part: Any = self._root if reference.startswith("#/") else None
        for step in reference.removeprefix("#/").split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            part = part.get(name) if isinstance(part, Mapping) else None
        return part if isinstance(part, Mapping) else None


def _references(schema: Any) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part

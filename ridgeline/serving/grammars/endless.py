"""Schemas that no finite text fits: each object must hold another, without end. A model held to one would write until
its tokens are spent.

A part of a schema can end if it allows a text whose own parts can end. So no part is taken to end at first, and parts
that can by what is known of the others are added until nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ridgeline.serving.errors import BadRequest

MOST_ROUNDS = 32  # a chain of so many references that are each defined before what they need is let through


def check_finite(schema: Any, param: str) -> None:
    """Raise BadRequest that names the cycle if no finite text fits the schema."""
    if not isinstance(schema, Mapping):
        return
    ends = _Ends(schema)
    if not ends.known:
        return
    for _ in range(MOST_ROUNDS):
        if not ends.grow():
            break
    else:
        return
    if not ends.of(schema):
        cycle = " needs ".join(ends.cycle())
        raise BadRequest(
            f"no text that ends fits the JSON schema: {cycle}; let a part of this be null, empty or missing.",
            param=param,
        )


class _Ends:
    """The parts of a schema that can end. `known` has those that references lead to."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self.known: dict[str, bool] = {}
        self._parts: dict[str, Any] = {}
        for reference in _references(root):
            found = self._referred(reference)
            if found is not None:
                self.known[reference], self._parts[reference] = False, found

    def grow(self) -> bool:
        """Return True if another part proves to end."""
        found = [name for name, ended in self.known.items() if not ended and self.of(self._parts[name])]
        self.known.update(dict.fromkeys(found, True))
        return bool(found)

    def of(self, part: Any) -> bool:
        """Return True if a part can end by what is known."""
        return next(self._needs(part), None) is None

    def cycle(self) -> list[str]:
        """Return references of which each needs the next, from one to the same one again."""
        names, part = list[str](), self._root
        while True:
            name = next(self._needs(part))
            if name in names:
                return [*names[names.index(name) :], name]
            names.append(name)
            part = self._parts[name]

    def _needs(self, part: Any) -> Iterator[str]:
        """Yield references of a part that must end for it to end, and are not known to."""
        if not isinstance(part, Mapping) or "const" in part or "enum" in part:
            return
        reference = part.get("$ref")
        if isinstance(reference, str) and not self.known.get(reference, True):
            yield reference
        for name in ("anyOf", "oneOf"):
            choices = part.get(name)
            if isinstance(choices, list) and choices:
                needed = [next(self._needs(each), None) for each in choices]
                if None not in needed:
                    yield str(needed[0])
        if isinstance(whole := part.get("allOf"), list):
            for each in whole:
                yield from self._needs(each)
        types = part.get("type")
        types = [types] if isinstance(types, str) else types
        if types == ["object"]:
            yield from self._of_object(part)
        elif types == ["array"]:
            yield from self._of_array(part)  # where there are several types, a text of another can do

    def _of_object(self, part: Mapping[str, Any]) -> Iterator[str]:
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            for name in required:
                if isinstance(name, str) and name in properties:
                    yield from self._needs(properties[name])

    def _of_array(self, part: Mapping[str, Any]) -> Iterator[str]:
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
        return part


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

"""The properties and items that a JSON schema evaluates, for `unevaluatedProperties` and `unevaluatedItems`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Evaluated:
    """The properties and items that a schema evaluates: named keys, patterns of keys, the first items, or all."""

    keys: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    all_keys: bool = False
    items: int = 0
    all_items: bool = False

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> Evaluated:
        items = schema.get("items")
        return cls(
            keys=tuple(schema.get("properties", ())),
            patterns=tuple(schema.get("patternProperties", ())),
            all_keys=bool({"additionalProperties", "unevaluatedProperties"} & schema.keys()),
            items=len(items if isinstance(items, list) else schema.get("prefixItems", ())),
            all_items=isinstance(items, Mapping | bool)
            or bool({"additionalItems", "unevaluatedItems"} & schema.keys()),
        )

    def with_(self, other: Evaluated) -> Evaluated:
        return Evaluated(
            keys=tuple(dict.fromkeys(self.keys + other.keys)),
            patterns=tuple(dict.fromkeys(self.patterns + other.patterns)),
            all_keys=self.all_keys or other.all_keys,
            items=max(self.items, other.items),
            all_items=self.all_items or other.all_items,
        )

    def closed(self, name: str, rest: Any) -> Any:
        """Return a schema that asks something of what is left."""
        if name == "unevaluatedItems":
            return True if self.all_items else {"prefixItems": [True] * self.items, "items": rest}
        if self.all_keys:
            return True
        return {
            "properties": dict.fromkeys(self.keys, True),
            "patternProperties": dict.fromkeys(self.patterns, True),
            "additionalProperties": rest,
        }


Ways = list[tuple[list[Any], Evaluated]]  # to fit a schema: the conditions of each, and what it evaluates


def joined(ways: Sequence[Ways]) -> Ways:
    """Return the ways in which a value can fit several parts at once."""
    found: Ways = [([], Evaluated())]
    for each in ways:
        found = [(a + b, one.with_(other)) for a, one in found for b, other in each]
    return found

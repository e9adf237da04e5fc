"""Keywords of JSON Schema that llguidance lacks, in words that it has: `not`, `if`, `oneOf` of what may overlap,
`contains`, `unevaluatedProperties` and their like.

Two functions call each other. `said` gives a schema that takes nothing which the given one refuses, and `_denied` one
that takes nothing which the given one takes. So `not` of a schema is what denies it, `if` is one of two alternatives,
and `oneOf` is each choice beside denials of the others. Every keyword asks something of one type of values, so a
schema is denied where a value of that type breaks one keyword.

Both may take less than they could; what a model writes is valid nevertheless:

* `contains` is met by one of the first PLACES items, or, where items are counted, by the first ones.
* Where a schema of whole numbers is denied, numbers with a fraction are not written.
* Of more than three choices of an `anyOf` that evaluate properties, a value has those of one alone.

What has no such words raises Inexpressible, and stays as it was: patterns, `multipleOf` and formats are never denied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from math import prod
from typing import Any
from urllib.parse import unquote

from ridgeline.serving.grammars.complements import (
    TYPES,
    Inexpressible,
    all_of,
    any_of,
    item,
    kind,
    other_than,
    other_values,
    text_of,
    with_key,
)
from ridgeline.serving.grammars.evaluated import Evaluated, Ways, joined

PLACES = 8
MOST_PARTS = 4000  # parts of schemas that may be made
MOST_CHOICES = 100  # of a oneOf; each is compared with all others
MOST_COMPARED = 4000  # constants and properties, in all comparisons of choices
MOST_REFERENCES = 32  # followed one after another
MOST_LEVELS = 3  # of properties that tell choices apart
LACKING = {"not", "if", "then", "else", "oneOf", "contains", "minContains", "maxContains", "dependentSchemas"}
LACKING |= {"dependentRequired", "dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef"}
BOUNDS = {
    **{"minimum": ("number", "exclusiveMaximum", 0), "exclusiveMinimum": ("number", "maximum", 0)},
    **{"maximum": ("number", "exclusiveMinimum", 0), "exclusiveMaximum": ("number", "minimum", 0)},
    **{"minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1)},
    **{"minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1)},
    "minProperties": ("object", "maxProperties", -1),
}
# What asks nothing of a value, so that denying it takes no value.
SILENT = {"$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$schema", "contentEncoding", "contentMediaType"}
SILENT |= {"contentSchema", "default", "definitions", "deprecated", "description", "examples", "readOnly", "title"}
SILENT |= {"else", "maxContains", "minContains", "then", "writeOnly", "x-guidance"}  # or is read with another keyword


def expressed(schema: Any) -> Any:
    """Return the schema without the keywords that llguidance lacks, where there are words for them. One that is
    malformed stays as it is, and llguidance tells why."""
    if not isinstance(schema, Mapping):
        return schema
    try:
        return _Writer(schema).said(schema)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return schema


class _Writer:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._parts = root, 0
        self._denying: set[str] = set()
        self._compared = 0
        self._writing = False  # what is only copied does not count
        self._places = dict(_places(root))
        self._resources = sum(isinstance(part.get("$id"), str) for part in self._places.values())

    def said(self, schema: Any) -> Any:
        """Return words for a schema. A keyword without any is left as it is."""
        if not isinstance(schema, Mapping):
            return schema
        if self._writing:
            self._count()
        plain = {name: self._inner(name, value) for name, value in schema.items()}
        if not LACKING & schema.keys():
            return plain
        meant = []
        for names, words in self._words(schema):
            outer, self._writing = self._writing, True
            try:
                meant.append(words())
            except Inexpressible:
                continue
            finally:
                self._writing = outer
            for name in names:
                plain.pop(name, None)
        if any(part is False for part in meant):
            return False
        asked = [part for part in meant if part is not True]
        return plain | {"allOf": [*plain.get("allOf", []), *asked]} if asked else plain

    def _inner(self, name: str, value: Any) -> Any:
        """Return a keyword's value with the schemas in it said."""
        if name in ("additionalProperties", "items", "propertyNames") and isinstance(value, Mapping):
            return self.said(value)
        if name in ("allOf", "anyOf", "items", "prefixItems") and isinstance(value, list):
            return [self.said(part) for part in value]
        if name in ("$defs", "definitions", "patternProperties", "properties") and isinstance(value, Mapping):
            return {key: self.said(part) for key, part in value.items()}
        return value

    def _words(self, schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Callable[[], Any]]]:
        """Yield keywords that llguidance lacks, with what gives words for them."""
        if "not" in schema:
            yield ("not",), lambda: self._denied(schema["not"])
        if {"if", "then", "else"} & schema.keys():
            yield ("if", "then", "else"), lambda: self._choice(schema, self._said_wholly)
        if isinstance(schema.get("oneOf"), list):
            yield ("oneOf",), lambda: self._one_of(schema["oneOf"])
        if {"contains", "minContains", "maxContains"} & schema.keys():
            yield ("contains", "minContains", "maxContains"), lambda: self._contains(schema)
        for name in ("dependentSchemas", "dependentRequired", "dependencies"):
            if isinstance(schema.get(name), Mapping):
                yield (name,), lambda name=name: all_of([self._depends(*each) for each in schema[name].items()])  # type: ignore[misc]
        if "unevaluatedProperties" in schema:
            yield ("unevaluatedProperties",), lambda: self._closed(schema, "unevaluatedProperties")
        if "unevaluatedItems" in schema:
            yield ("unevaluatedItems",), lambda: self._closed(schema, "unevaluatedItems")
        if "$dynamicRef" in schema:
            yield ("$dynamicRef",), lambda: self._dynamic(schema["$dynamicRef"])

    def _said_wholly(self, schema: Any) -> Any:
        """Return words for a schema that is part of others' words. Raise Inexpressible if a keyword has none."""
        said = self.said(schema)
        if isinstance(said, Mapping) and (left := LACKING & said.keys()):
            raise Inexpressible(min(left))
        return said

    def _choice(self, schema: Mapping[str, Any], then: Callable[[Any], Any]) -> Any:
        """Return words for if, then and else, or denials of both ends."""
        if "if" not in schema:
            return then(True)
        met = [self._said_wholly(schema["if"]), then(schema.get("then", True))]
        return any_of([all_of(met), all_of([self._denied(schema["if"]), then(schema.get("else", True))])])

    def _one_of(self, choices: list[Any]) -> Any:
        if len(choices) > MOST_CHOICES:
            raise Inexpressible("oneOf")
        said = [self._said_wholly(choice) for choice in choices]
        found = []
        for k, choice in enumerate(choices):
            near = [other for n, other in enumerate(choices) if n != k and not self._disjoint(choice, other)]
            found.append(all_of([said[k], *map(self._denied, near)]))
        return any_of(found)

    def _contains(self, schema: Mapping[str, Any]) -> Any:
        """Return words for an array that contains some items."""
        asked, least, most = schema.get("contains"), schema.get("minContains", 1), schema.get("maxContains")
        if asked is None:
            return True
        if not isinstance(least, int | float) or not isinstance(most, int | float | None):
            raise Inexpressible("contains")
        said, least = self._said_wholly(asked), int(least)
        if most is None and least <= 1:
            arrays = [item(place, said) for place in range(PLACES)] if least else [{"type": "array"}]
        else:
            rest = {} if most is None else {"items": self._denied(asked)}
            counts = range(least, min(least if most is None else int(most), least + PLACES) + 1)
            self._count(sum(counts))
            arrays = [{"type": "array", "prefixItems": [said] * n, "minItems": n} | rest for n in counts]
        return any_of([other_than({"array"}), *arrays])

    def _depends(self, key: str, asked: Any) -> Any:
        """Return words for what a key asks of its object, if the key is there."""
        met = {"required": asked} if isinstance(asked, list) else self._said_wholly(asked)
        return any_of([{"properties": {key: False}}, all_of([with_key(key), met])])

    def _denied(self, schema: Any) -> Any:
        """Return words that take no value which the schema takes. Raise Inexpressible."""
        self._count()
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, Mapping):
            raise Inexpressible("not")
        return any_of([self._broken(name, value, schema) for name, value in schema.items() if name not in SILENT])

    def _broken(self, name: str, value: Any, schema: Mapping[str, Any]) -> Any:
        """Return words for values that one keyword refuses."""
        if name in BOUNDS and isinstance(value, int | float):
            kind, opposite, more = BOUNDS[name]
            return {"type": kind, opposite: value + more} if value > 0 or kind == "number" or more == 1 else False
        match name, value:
            case "type", str() | list():
                return other_than({value} if isinstance(value, str) else set(value))
            case ("const", _) | ("enum", list()):
                self._count(len(value) if name == "enum" else 1)
                return other_values([value] if name == "const" else value)
            case "not", _:
                return self._said_wholly(value)
            case "allOf", list():
                return any_of([self._denied(part) for part in value])
            case "anyOf", list():
                return all_of([self._denied(part) for part in value])
            case "oneOf", list():
                two = [all_of([self._said_wholly(part) for part in pair]) for pair in combinations(value, 2)]
                return any_of([all_of([self._denied(part) for part in value]), *two])
            case "if", _:
                return self._choice(schema, self._denied)
            case "required", list():
                return any_of([{"type": "object", "properties": {key: False}} for key in value])
            case "properties", Mapping():
                return any_of([self._broken_property(key, part) for key, part in value.items()])
            case "maxProperties", 0:
                return {"type": "object", "minProperties": 1}
            case "dependentRequired", Mapping():
                pairs = [(key, other) for key, others in value.items() for other in others]
                return any_of([with_key(key) | {"properties": {key: True, other: False}} for key, other in pairs])
            case "dependentSchemas", Mapping():
                return any_of([all_of([with_key(key), self._denied(part)]) for key, part in value.items()])
            case "prefixItems", list():
                return any_of([item(place, self._denied(part)) for place, part in enumerate(value)])
            case "items", Mapping() | bool():
                first, denied = len(schema.get("prefixItems", [])), self._denied(value)
                return any_of([item(place, denied) for place in range(first, first + PLACES)])
            case "contains", _ if not {"minContains", "maxContains"} & schema.keys():
                return {"type": "array", "items": self._denied(value)}
            case "$ref", str():
                return self._denied_part(value)
            case (("additionalProperties" | "unevaluatedProperties" | "unevaluatedItems" | "propertyNames"), True):
                return False
        raise Inexpressible(name)

    def _broken_property(self, key: str, schema: Any) -> Any:
        return with_key(key, self._denied(schema))

    def _denied_part(self, reference: str) -> Any:
        if reference in self._denying or len(self._denying) == MOST_REFERENCES:
            raise Inexpressible("$ref")
        self._denying.add(reference)
        try:
            return self._denied(self._referred(reference))
        finally:
            self._denying.discard(reference)

    def _disjoint(self, one: Any, other: Any, level: int = 0) -> bool:
        """Return True where it is plain that no value fits both schemas: by their types, or by a key's constant."""
        one, other = self._whole(one), self._whole(other)
        self._compared += 1
        if self._compared > MOST_COMPARED:
            return False  # it is not plain
        if one is False or other is False:
            return True
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        types = [_types(each) for each in (one, other)]
        if not types[0] & types[1]:
            return True
        values, others = _constants(one), _constants(other)
        if values is not None and others is not None:
            self._compared += len(values) + len(others)
            if self._compared > MOST_COMPARED:
                return False
            return not set(map(text_of, values)) & set(map(text_of, others))
        if types[0] & types[1] != {"object"}:
            return False
        self._compared += len(one.get("required", [])) + len(other.get("required", []))
        needed = set(one.get("required", [])) & set(other.get("required", []))
        shared = needed & one.get("properties", {}).keys() & other.get("properties", {}).keys()
        return level < MOST_LEVELS and any(
            self._disjoint(one["properties"][key], other["properties"][key], level + 1) for key in shared
        )

    def _whole(self, schema: Any) -> Any:
        """Return the schema that a bare reference stands for."""
        for _ in range(min(len(self._places), MOST_REFERENCES)):
            if not isinstance(schema, Mapping) or "$ref" not in schema or schema.keys() & {"type", "const", "enum"}:
                return schema
            try:
                schema = self._referred(schema["$ref"])
            except Inexpressible:
                return True
        return True

    def _closed(self, schema: Mapping[str, Any], name: str) -> Any:
        """Return words for what is asked of the properties or items that no other part of the schema evaluates."""
        asked = self._said_wholly(schema[name])
        own = {key: value for key, value in schema.items() if key != name}
        choices = []
        for conditions, evaluated in self._branches(own, ()):
            choices.append(all_of([*conditions, evaluated.closed(name, asked)]))
        return any_of(choices)

    def _branches(self, schema: Any, above: tuple[str, ...]) -> Ways:
        """Return the ways in which a value can fit a schema: what each asks beside it, and what it evaluates."""
        self._count()
        if not isinstance(schema, Mapping):
            return [([], Evaluated())]
        found: Ways = [([], Evaluated.of(schema))]
        for alternatives in self._alternatives(schema, above):
            self._count(len(found) * len(alternatives))
            found = joined((found, alternatives))
        return found

    def _alternatives(self, schema: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[Ways]:
        """Yield for every part that a schema puts in its own place the ways in which a value can fit it."""

        def of(condition: list[Any], part: Any) -> Ways:
            return [(condition + more, evaluated) for more, evaluated in self._branches(part, above)]

        if isinstance(reference := schema.get("$ref"), str):
            if reference in above or len(above) == MOST_REFERENCES:
                raise Inexpressible("$ref")
            yield self._branches(self._referred(reference), (*above, reference))
        if "$dynamicRef" in schema:
            raise Inexpressible("$dynamicRef")
        for part in schema.get("allOf", []):
            yield of([], part)
        for name in ("anyOf", "oneOf"):
            if choices := schema.get(name):
                ways = [of([self._said_wholly(part)], part) for part in choices]
                if name == "anyOf" and len(ways) <= 3:  # a value may fit several
                    several = [pair for size in (2, 3) for pair in combinations(ways, size)]
                    self._count(sum(prod(map(len, pair)) for pair in several))
                    ways += map(joined, several)
                yield [way for each in ways for way in each]
        if "if" in schema:
            then = schema.get("then", True)
            both = of([self._said_wholly(schema["if"])], schema["if"]), of([self._said_wholly(then)], then)
            self._count(len(both[0]) * len(both[1]))
            met = joined(both)
            other = [self._denied(schema["if"]), self._said_wholly(schema.get("else", True))]
            yield met + of(other, schema.get("else"))
        for key, part in (schema.get("dependentSchemas") or {}).items():
            yield [([{"properties": {key: False}}], Evaluated()), *of([with_key(key), self._said_wholly(part)], part)]

    def _dynamic(self, reference: Any) -> Any:
        """Return words for a dynamic reference in a schema that is one resource: nothing from outside changes it."""
        if self._resources > ("$id" in self._root) or not isinstance(reference, str) or reference[:1] != "#":
            raise Inexpressible("$dynamicRef")
        if reference == "#" or reference.startswith("#/"):
            return {"$ref": reference}
        anchors = [
            place
            for place, part in self._places.items()
            if reference[1:] in (part.get("$dynamicAnchor"), part.get("$anchor"))
        ]
        if len(anchors) != 1:
            raise Inexpressible("$dynamicRef")
        return {"$ref": f"#{anchors[0]}"}

    def _referred(self, reference: Any) -> Any:
        """Return the part of the schema that a reference leads to. Raise Inexpressible if it is none of this schema."""
        if self._resources > ("$id" in self._root) or not isinstance(reference, str) or reference[:1] != "#":
            raise Inexpressible("$ref")
        part = self._places.get(unquote(reference[1:]))
        if part is None:
            part = next((each for each in self._places.values() if each.get("$anchor") == reference[1:]), None)
        if part is None:
            raise Inexpressible("$ref")
        return part

    def _count(self, more: int = 1) -> None:
        self._parts += more
        if self._parts > MOST_PARTS:
            raise Inexpressible("too many parts")


def _places(schema: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every part of a schema by its JSON pointer."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, Mapping):
            yield place, part
            waiting += [(f"{place}/{name.replace('~', '~0').replace('/', '~1')}", each) for name, each in part.items()]
        elif isinstance(part, list):
            waiting += [(f"{place}/{number}", each) for number, each in enumerate(part)]


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema may take; whole numbers are numbers."""
    values = _constants(schema)
    if values is not None:
        return {kind(value) for value in values}
    types = schema.get("type", TYPES)
    return {"number" if name == "integer" else name for name in ([types] if isinstance(types, str) else types)}


def _constants(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the only values that a schema may take, or None if it does not list them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None

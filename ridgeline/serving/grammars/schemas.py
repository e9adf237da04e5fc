"""JSON schemas as llguidance takes them: what it does not know is put into words that it does.

* An unknown `format` is an annotation, as the standard says, and is left out.
* `uniqueItems` of an array whose items are from a short list becomes the list of all such arrays. With `uniqueItems:
  false` nothing is asked. Any other is left as it is, and llguidance refuses it by name.
* A number that may have any digits gets a bound on them (`bounded`): a model that repeats itself would otherwise write
  digits until its tokens run out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import permutations
from math import perm
from typing import Any

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
MOST_ARRAYS = 400  # all arrays without repetition of five values are 326
LARGEST = 10**15 - 1  # of a number that may be any; float64 tells such whole numbers apart
STEP = 1e-9  # between two numbers that may be any
ONE = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
# A number with one of these is not "any".
ASKED = {"allOf", "anyOf", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "if", "maximum", "minimum"}
ASKED |= {"multipleOf", "not", "oneOf", "$ref"}
# With one of these a schema asks more of the same value.
TWICE = {"$dynamicRef", "allOf", "dependencies", "dependentSchemas", "if", "not", "unevaluatedProperties"}

Change = Callable[[dict[str, Any]], dict[str, Any]]


def known(schema: Any) -> Any:
    """Return the schema without what llguidance does not know, where it means nothing or can be said otherwise."""
    return changed(schema, lambda one: _unique(_annotated(one)))


def bounded(schema: Any) -> Any:
    """Return the schema with numbers of at most 15 digits, and 9 behind the point, where it allows any number."""
    return changed(schema, _bounded)


def closed(schema: Any) -> Any:
    """Return the schema with objects that have the named properties alone, unless it says what others there may be."""

    def change(one: dict[str, Any]) -> dict[str, Any]:
        named = one.keys() & {"properties", "patternProperties"} and "additionalProperties" not in one
        return one | {"additionalProperties": False} if named else one

    return changed(schema, change)


def closed_where_plain(schema: Any) -> Any:
    """Return the schema with closed objects if it never asks two things of one object: what one part does not name,
    another may."""
    plain = True

    def look(one: dict[str, Any]) -> dict[str, Any]:
        nonlocal plain
        both = "properties" in one and one.keys() & {"$ref", "anyOf", "oneOf"}
        plain = plain and not both and not one.keys() & TWICE
        return one

    changed(schema, look)
    return closed(schema) if plain else schema


def changed(schema: Any, change: Change) -> Any:
    """Return the schema with every schema in it changed, the innermost first. What is no schema stays: values of
    `enum`, names of properties."""
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name in ONE:
        if isinstance(found.get(name), Mapping):
            found[name] = changed(found[name], change)
    for name in LISTS:
        if isinstance(found.get(name), list):
            found[name] = [changed(each, change) for each in found[name]]
    for name in MAPS:
        if isinstance(found.get(name), Mapping):
            found[name] = {key: changed(each, change) for key, each in found[name].items()}
    return change(found)


def _annotated(schema: dict[str, Any]) -> dict[str, Any]:
    if "format" in schema and schema["format"] not in FORMATS:
        return {name: value for name, value in schema.items() if name != "format"}
    return schema


def _unique(schema: dict[str, Any]) -> dict[str, Any]:
    if "uniqueItems" not in schema:
        return schema
    plain = {name: value for name, value in schema.items() if name != "uniqueItems"}
    if schema["uniqueItems"] is False:
        return plain
    items = schema.get("items")
    if not isinstance(items, Mapping) or schema.get("type") != "array" or plain.keys() - _ARRAY:
        return schema
    values = items["enum"] if isinstance(items.get("enum"), list) else [items["const"]] if "const" in items else None
    if values is None or items.keys() - {"enum", "const", "type", "title", "description"}:
        return schema
    values = [value for n, value in enumerate(values) if not any(_same(value, other) for other in values[:n])]
    least, most = schema.get("minItems", 0), min(schema.get("maxItems", len(values)), len(values))
    lengths = range(least, most + 1) if isinstance(least, int) and isinstance(most, int) else range(0)
    if not lengths or sum(perm(len(values), length) for length in lengths) > MOST_ARRAYS:
        return schema
    about = {name: plain[name] for name in ("title", "description", "default", "examples") if name in plain}
    arrays = [_array(chosen) for length in lengths for chosen in permutations(values, length)]
    return about | {"anyOf": arrays}


_ARRAY = {"type", "items", "minItems", "maxItems", "title", "description", "default", "examples"}


def _same(one: object, other: object) -> bool:
    """Return True for equal JSON values; true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _array(values: tuple[Any, ...]) -> dict[str, Any]:
    size = len(values)
    fixed = [{"const": value} for value in values]
    return {"type": "array", "prefixItems": fixed, "items": False, "minItems": size, "maxItems": size}


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not {"number", "integer"} & {t for t in types if isinstance(t, str)}:
        return schema
    if ASKED & schema.keys():
        return schema
    bounds: dict[str, Any] = {"minimum": -LARGEST, "maximum": LARGEST}
    return schema | bounds | ({"multipleOf": STEP} if "number" in types else {})

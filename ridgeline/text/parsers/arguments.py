"""Arguments that a form writes one by one, so that a grammar can hold each to its schema.

A schema that says more than the form can, such as a string of a pattern between two tags, has no such arguments. Calls
are then forced in a form that writes JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,63}")
ABOUT = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"})
ROOT = ABOUT | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "strict"}
DEFINED = ("$defs", "definitions")
MOST_ARGUMENTS = 128
MOST_REFERENCES = 8  # followed one after another
NO_TAG = r"^([^<]|<[^/])*<?$"  # of a string within JSON that stands between tags, which may not hold one
NUMBERS = frozenset({"integer", "number", "boolean", "null"})
FREE = frozenset({"string", "null", "boolean"})  # types of which every text is one, if a string is


@dataclass(frozen=True)
class Argument:
    """An argument of a function, as a grammar can hold a model to it. One of `text`, `choices` and `schema` says how.

    text: any text. choices: one of these texts. schema: JSON by this schema. truth: True or False, as Python has it.
    """

    name: str
    required: bool
    text: bool = False
    truth: bool = False
    choices: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None


def arguments_of(schema: Mapping[str, Any], end: str | None) -> list[Argument] | None:
    """Return the arguments that a function's schema names, or None if they cannot be held to it one by one.

    end: the tag that ends an argument's text; None: values are literals of Python, which may hold anything.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.keys() - ROOT or not isinstance(properties, Mapping) or len(properties) > MOST_ARGUMENTS:
        return None
    if not _is_named(required, properties):
        return None
    defined = {name: schema[name] for name in DEFINED if isinstance(schema.get(name), Mapping)}
    inner = defined
    if end is not None:
        inner = {name: {key: _untagged(each) for key, each in parts.items()} for name, parts in defined.items()}
    found = []
    for name, part in properties.items():
        argument = _argument(name, part, name in required, defined, inner, end)
        if argument is None:
            return None
        found.append(argument)
    return found


def _argument(
    name: str,
    part: Any,
    required: bool,
    defined: Mapping[str, Mapping[str, Any]],
    inner: Mapping[str, Mapping[str, Any]],
    end: str | None,
) -> Argument | None:
    """`inner` is what the schema defines, as it may stand within JSON."""
    if not NAME.fullmatch(name) or not isinstance(part, Mapping) or not _refers_inside(part):
        return None
    if end is None:
        if part.keys() - ABOUT == {"type"} and part["type"] == "boolean":
            return Argument(name, required, truth=True)
        return Argument(name, required, schema={**defined, **part})
    part = _meant(part, defined)
    if part is None:
        return None
    if _is_free(part):
        return Argument(name, required, text=True)
    values = [part["const"]] if "const" in part else part.get("enum")
    if isinstance(values, list) and part.keys() <= ABOUT | {"type", "enum", "const"} and part.get("type") != "integer":
        texts = [value for value in values if isinstance(value, str) and end not in value]
        if texts and len(texts) == len(values):
            return Argument(name, required, choices=tuple(texts)) if part.get("type", "string") == "string" else None
    narrow = _untagged(part)
    if narrow is None or "string" in (narrow.get("type"), *_listed(narrow.get("type"))) or _is_choice(narrow):
        return None
    if not _mentions(narrow):
        return Argument(name, required, schema=narrow)
    if any(each is None for parts in inner.values() for each in parts.values()):
        return None
    return Argument(name, required, schema={**inner, **narrow})


def _meant(part: Mapping[str, Any], defined: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the part that a reference leads to, or the part itself if it is none."""
    for _ in range(MOST_REFERENCES):
        if part.keys() - ABOUT != {"$ref"} or not isinstance(part["$ref"], str):
            return part
        _, where, name = part["$ref"].split("/", 2)
        found = defined.get(where, {}).get(name)
        if not isinstance(found, Mapping):
            return None
        part = found
    return None


def _is_choice(part: Mapping[str, Any]) -> bool:
    """Return True for what may be a string outside of JSON's quotes: an alternative, or a reference."""
    return bool(part.keys() & {"anyOf", "$ref", "enum", "const"}) and part.get("type") not in ("integer", "number")


def _is_free(part: Mapping[str, Any]) -> bool:
    """Return True if every text is a value, whatever the reader makes of it."""
    kinds = _listed(part.get("type"))
    if part.keys() - ABOUT == {"type"}:
        return "string" in kinds and all(isinstance(kind, str) and kind in FREE for kind in kinds)
    for word in ("anyOf", "oneOf"):
        if part.keys() - ABOUT == {word} and isinstance(part[word], list):
            plain = [
                each.get("type") for each in part[word] if isinstance(each, Mapping) and each.keys() - ABOUT == {"type"}
            ]
            return (
                len(plain) == len(part[word])
                and "string" in plain
                and all(isinstance(each, str) and each in FREE for each in plain)
            )
    return False


def _untagged(part: Any) -> dict[str, Any] | None:
    """Return a schema of JSON in which no string holds a tag; None if that cannot be said."""
    if not isinstance(part, Mapping):
        return None
    asked, kind = part.keys() - ABOUT, part.get("type")
    if isinstance(kind, str) and kind in NUMBERS and not asked & {"enum", "const", "anyOf", "oneOf", "allOf", "$ref"}:
        return dict(part)
    if asked == {"$ref"}:
        return dict(part) if _refers_inside(part) else None
    if asked == {"anyOf"} and isinstance(part["anyOf"], list):
        found = [_untagged(each) for each in part["anyOf"]]
        return None if None in found else {**part, "anyOf": found}
    if asked <= {"type", "enum", "const"} and asked & {"enum", "const"}:
        values = [part["const"]] if "const" in part else part["enum"]
        plain = isinstance(values, list) and all(isinstance(each, (str, int, float, type(None))) for each in values)
        return dict(part) if plain and not any("</" in each for each in values if isinstance(each, str)) else None
    if asked == {"type"} and kind == "string":
        return {**part, "pattern": NO_TAG}
    if kind == "array" and asked <= {"type", "items", "minItems", "maxItems"}:
        items = _untagged(part.get("items"))
        return None if items is None else {**part, "items": items}
    if kind == "object" and asked <= {"type", "properties", "required", "additionalProperties"}:
        return _untagged_object(part)
    return None


def _untagged_object(part: Mapping[str, Any]) -> dict[str, Any] | None:
    properties, required = part.get("properties"), part.get("required", [])
    if not isinstance(properties, Mapping) or not _is_named(required, properties):
        return None
    inner = {name: _untagged(each) for name, each in properties.items()}
    if None in inner.values() or any("</" in name for name in inner):
        return None
    return {**part, "properties": inner, "additionalProperties": False}


def _mentions(part: Any) -> bool:
    """Return True if there is a reference within."""
    values = part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
    return (isinstance(part, Mapping) and "$ref" in part) or any(map(_mentions, values))


def _is_named(required: Any, properties: Mapping[str, Any]) -> bool:
    return isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required)


def _refers_inside(part: Any) -> bool:
    """Return True if all references within lead to what the function's schema defines."""
    if isinstance(part, list):
        return all(map(_refers_inside, part))
    if not isinstance(part, Mapping):
        return True
    reference = part.get("$ref")
    inside = not isinstance(reference, str) or reference.startswith(tuple(f"#/{name}/" for name in DEFINED))
    return inside and all(map(_refers_inside, part.values()))


def _listed(kind: Any) -> list[Any]:
    return kind if isinstance(kind, list) else [kind]

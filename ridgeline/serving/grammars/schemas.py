"""JSON schemas as llguidance takes them: what it does not know is put into words that it does.

* A `format` that llguidance does not know becomes a pattern, if there is one for it (formats.py). Any other is an
  annotation, as the standard says, and is left out. `unenforced` names it, and unknown keywords.
* `uniqueItems` of an array whose items are from a short list becomes the list of all such arrays. With `uniqueItems:
  false` nothing is asked. Any other is left as it is, and llguidance refuses it by name.
* `propertyNames` becomes `patternProperties` of objects that have no other keys.
* Keywords that llguidance lacks are said by others, where there are words for them (expressed.py).
* A number that may have any digits gets a bound on them (`bounded`): a model that repeats itself would otherwise write
  digits until its tokens run out.

Two things are refused that llguidance would take, since what it writes would not be valid: `minProperties` that two
equal keys would meet, and constants with control characters beside keys that an escape could spell otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import accumulate, permutations
from math import perm
from typing import Any

from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.grammars.complements import text_of
from ridgeline.serving.grammars.expressed import expressed
from ridgeline.serving.grammars.formats import PATTERNS

FORMATS = ("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")  # that llguidance enforces
MOST_ARRAYS = 400  # all arrays without repetition of five values are 326
LARGEST = 10**15 - 1  # of a number that may be any; float64 tells such whole numbers apart
STEP = 1e-9  # between two numbers that may be any
ONE = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
# Without \u: `"\u0061"` would be another key than "a" to the grammar, and the same to a reader of JSON.
ESCAPES, ALL_ESCAPES = 'nrbtf\\"', 'nrbtf\\"u'
DETAILS = ("coerce_one_of", "whitespace_flexible", "whitespace_pattern")  # that a schema may tell llguidance itself
ANNOTATIONS = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"}
# What is enforced, refused or has nothing to enforce. Any other keyword is none of the standard's.
KEYWORDS = ANNOTATIONS | {*ONE, *LISTS, *MAPS}
KEYWORDS |= {"$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveRef", "$ref", "$schema", "const"}
KEYWORDS |= {"dependencies", "dependentRequired", "enum", "exclusiveMaximum", "exclusiveMinimum", "format"}
KEYWORDS |= {"maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains", "minItems", "minLength"}
KEYWORDS |= {"minProperties", "minimum", "multipleOf", "pattern", "required", "type", "uniqueItems", "x-guidance"}
COUNTS = {f"{end}{what}" for end in ("min", "max") for what in ("Contains", "Items", "Length", "Properties")}
# A number with one of these is not "any".
ASKED = {"allOf", "anyOf", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "if", "maximum", "minimum"}
ASKED |= {"multipleOf", "not", "oneOf", "$ref"}
# With one of these a schema asks more of the same value.
TWICE = {"$dynamicRef", "allOf", "dependencies", "dependentSchemas", "if", "not", "unevaluatedProperties"}

Change = Callable[[dict[str, Any]], dict[str, Any]]


def known(schema: Any) -> Any:
    """Return the schema without what llguidance does not know, where it means nothing or can be said otherwise. Raise
    InvalidRequest for one whose grammar would let something invalid through."""
    controls = confusable = False

    def change(one: dict[str, Any]) -> dict[str, Any]:
        nonlocal controls, confusable
        one = _unique(_annotated(_named(one, schema)))
        _check_least(one)
        fixed = {name: one[name] for name in ("const", "enum") if name in one}
        controls = controls or "\\u00" in json.dumps(fixed, ensure_ascii=False)
        names = one.get("properties") or one.get("patternProperties")
        confusable = confusable or bool(names and one.get("additionalProperties") is not False)
        return one

    asked, schema = schema, expressed(_whole(schema))
    if schema is False and asked is not False:
        raise InvalidRequest("the grammar cannot be used: no value fits the JSON schema.", param="structured_outputs")
    found = changed(schema, change)
    if not isinstance(found, dict):
        return found
    if controls and confusable:
        raise InvalidRequest(
            "the grammar cannot be used: it has constants with control characters, and objects that may have other "
            "keys than those it names; give these additionalProperties: false.",
            param="structured_outputs",
        )
    told = found.pop("x-guidance", None)
    details = {name: told[name] for name in DETAILS if name in told} if isinstance(told, Mapping) else {}
    if controls:
        details["json_allowed_escapes"] = ALL_ESCAPES
    return found | {"x-guidance": details} if details else found


def _whole(schema: Any) -> Any:
    """Return the schema with counts as whole numbers: 2.0 is 2."""

    def change(one: dict[str, Any]) -> dict[str, Any]:
        return {name: int(value) if _is_count(name, value) else value for name, value in one.items()}

    return changed(schema, change)


def _is_count(name: str, value: object) -> bool:
    return name in COUNTS and isinstance(value, float) and value.is_integer()


def without_notes(schema: Any) -> Any:
    """Return the schema without titles, descriptions, examples and other notes, which no grammar can hold a model
    to."""
    return changed(schema, lambda one: {name: value for name, value in one.items() if name not in ANNOTATIONS})


def with_details(schema: Mapping[str, Any], details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with these options for llguidance, except those that it sets itself."""
    return {**schema, "x-guidance": {**details, **schema.get("x-guidance", {})}}


def bounded(schema: Any) -> Any:
    """Return the schema with numbers of at most 15 digits, and 9 behind the point, where it allows any number."""
    return changed(schema, _bounded)


def closed(schema: Any) -> Any:
    """Return the schema with objects that have the named properties alone, unless it says what others there may be."""

    def change(one: dict[str, Any]) -> dict[str, Any]:
        named = one.keys() & {"properties", "patternProperties"} and "additionalProperties" not in one
        return one | {"additionalProperties": False} if named else one

    return changed(schema, change, leaving=("if", "not"))  # which would ask something else if they were closed


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


def changed(schema: Any, change: Change, leaving: tuple[str, ...] = ()) -> Any:
    """Return the schema with every schema in it changed, the innermost first. What is no schema stays: values of
    `enum`, names of properties. So does what stands under a keyword that is left."""
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name in ONE:
        if isinstance(found.get(name), Mapping) and name not in leaving:
            found[name] = changed(found[name], change, leaving)
    for name in LISTS:
        if isinstance(found.get(name), list):
            found[name] = [changed(each, change, leaving) for each in found[name]]
    for name in MAPS:
        if isinstance(found.get(name), Mapping):
            found[name] = {key: changed(each, change, leaving) for key, each in found[name].items()}
    return change(found)


def unenforced(schema: Any) -> list[str]:
    """Return the parts of a schema without effect on its grammar: `format.regex`, unknown keywords."""
    found: dict[str, None] = {}

    def look(one: dict[str, Any]) -> dict[str, Any]:
        found.update(dict.fromkeys(name for name in one if name not in KEYWORDS))
        if "format" in one and not _is_enforced(one):
            found[f"format.{one['format']}"] = None
        return one

    changed(schema, look)
    return list(found)


def _is_enforced(schema: Mapping[str, Any]) -> bool:
    """Return True for a schema whose format its grammar keeps to."""
    name = schema["format"]
    return isinstance(name, str) and (name in FORMATS or (name in PATTERNS and "pattern" not in schema))


def _annotated(schema: dict[str, Any]) -> dict[str, Any]:
    if "format" not in schema or schema["format"] in FORMATS:
        return schema
    plain = {name: value for name, value in schema.items() if name != "format"}
    return plain | {"pattern": PATTERNS[schema["format"]]} if _is_enforced(schema) else plain


_JOINED = {"$ref", "anyOf", "oneOf", "then", "else"}


def _named(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """Return the schema with the keys that `propertyNames` allows as patterns, if it is simple enough to say so."""
    if "propertyNames" not in schema or schema.keys() & (TWICE | _JOINED | {"patternProperties"}):
        return schema
    plain = {name: value for name, value in schema.items() if name != "propertyNames"}
    names = _without_reference(schema["propertyNames"], root)
    if names is True:
        return plain
    if names is False:
        return plain | {"maxProperties": 0}
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return schema
    asked = names.keys() - ANNOTATIONS - {"type"}
    if not asked:
        return plain
    other, named = schema.get("additionalProperties", {}), schema.get("properties", {})
    if asked <= {"const", "enum"} and len(asked) == 1:
        values = names["enum"] if "enum" in asked else [names["const"]]
        if not isinstance(values, list) or not isinstance(named, Mapping):
            return schema
        allowed = [value for value in values if isinstance(value, str)]
        plain["properties"] = {name: each for name, each in named.items() if name in allowed}
        free = [re.escape(name) for name in allowed if name not in named]
        patterns = {f"^(?:{'|'.join(free)})$": other} if free and other is not False else {}
    elif named:  # which of them the pattern allows is for its own dialect to say
        return schema
    elif asked == {"pattern"}:
        patterns = {names["pattern"]: other}
    elif asked <= {"minLength", "maxLength"}:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        patterns = {f"^(?s:.){{{least},{most}}}$": other}
    else:
        return schema
    return plain | {"patternProperties": patterns, "additionalProperties": False}


def _without_reference(schema: Any, root: Any) -> Any:
    """Return the definition of the root schema that a schema refers to, or the schema itself if it is no such one."""
    if not isinstance(schema, Mapping) or not schema.keys() <= {"$ref", *ANNOTATIONS} or "$ref" not in schema:
        return schema
    start, _, name = str(schema["$ref"]).rpartition("/")
    folder = start.removeprefix("#/")
    found = root.get(folder) if folder in ("$defs", "definitions") and isinstance(root, Mapping) else None
    return found.get(name, schema) if isinstance(found, Mapping) else schema


def _check_least(schema: dict[str, Any]) -> None:
    """Raise InvalidRequest if equal keys could stand for the number of keys that the schema asks for.

    Required keys are written once, and one more is another than these. Of two more, one may repeat the other.
    """
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if not isinstance(least, int | float) or not isinstance(required, list):
        return
    if least > 1 + len({name for name in required if isinstance(name, str)}):
        raise InvalidRequest(
            f"the grammar cannot be used: minProperties is {least}, and keys that are not required may be written "
            "twice; name in required all but one of the keys that are asked for.",
            param="structured_outputs",
        )


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
    values = list({text_of(value): value for value in reversed(values)}.values())[::-1]
    least, most = schema.get("minItems", 0), min(schema.get("maxItems", len(values)), len(values))
    lengths = range(least, most + 1) if isinstance(least, int) and isinstance(most, int) else range(0)
    several = accumulate(perm(len(values), length) for length in lengths)  # the first that are too many end it
    if not lengths or any(arrays > MOST_ARRAYS for arrays in several):
        return schema
    about = {name: plain[name] for name in ("title", "description", "default", "examples") if name in plain}
    arrays = [_array(chosen) for length in lengths for chosen in permutations(values, length)]
    return about | {"anyOf": arrays}


_ARRAY = {"type", "items", "minItems", "maxItems", "title", "description", "default", "examples"}


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

"""Small schemas, made of others: all of them, one of them, and values other than those of a list."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from ridgeline.core.errors import RidgelineError

TYPES = ("null", "boolean", "number", "string", "array", "object")
MOST_DENIED = 2000  # characters of texts that one pattern leaves out
LONGEST_DENIED = 200


class Inexpressible(RidgelineError):
    """There are no words for this."""


def all_of(parts: Iterable[Any]) -> Any:
    """Return a schema that asks for all of these."""
    asked = [part for part in parts if part is not True and part != {}]
    if any(part is False for part in asked):
        return False
    return asked[0] if len(asked) == 1 else {"allOf": asked} if asked else True


def any_of(parts: Iterable[Any]) -> Any:
    """Return a schema that takes what one of these takes."""
    choices = [part for part in parts if part is not False]
    if any(part is True or part == {} for part in choices):
        return True
    return choices[0] if len(choices) == 1 else {"anyOf": choices} if choices else False


def other_than(types: Iterable[str]) -> Any:
    """Return a schema of the other types. Beside whole numbers, those with a fraction are left out too."""
    excluded = {"number" if name == "integer" else name for name in types}
    others = [name for name in TYPES if name not in excluded]
    return {"type": others} if others else False


def other_values(values: Sequence[Any]) -> Any:
    """Return a schema of other values than these. Raise Inexpressible."""
    kinds = {kind(value) for value in values}
    of = {name: [value for value in values if kind(value) == name] for name in kinds}
    parts = [other_than(kinds)]
    if len(set(of.get("boolean", ()))) == 1:
        parts.append({"const": not of["boolean"][0]})
    if numbers := sorted(set(of.get("number", ()))):
        parts.append({"type": "number", "exclusiveMaximum": numbers[0]})
        parts += [{"type": "number", "exclusiveMinimum": a, "exclusiveMaximum": b} for a, b in pairwise(numbers)]
        parts.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    if texts := of.get("string"):
        if sum(map(len, texts)) > MOST_DENIED or max(map(len, texts)) > LONGEST_DENIED:
            raise Inexpressible("enum")
        parts.append({"type": "string", "pattern": f"^(?:{_other_texts(set(texts))})$"})
    if arrays := of.get("array"):
        parts.append(all_of(map(_other_array, arrays)))
    if objects := of.get("object"):
        parts.append(all_of(map(_other_object, objects)))
    return any_of(parts)


def _other_array(value: list[Any]) -> Any:
    size = len(value)
    shorter = [{"type": "array", "maxItems": size - 1}] if size else []
    longer = {"type": "array", "minItems": size + 1}
    return any_of([*shorter, longer, *(item(place, other_values([each])) for place, each in enumerate(value))])


def _other_object(value: dict[str, Any]) -> Any:
    """Return a schema of objects that lack a key of this one, or have another value there."""
    if not value:
        return {"type": "object", "minProperties": 1}
    lacking = [{"type": "object", "properties": {key: False}} for key in value]
    other = [with_key(key, other_values([each])) for key, each in value.items()]
    return any_of([*lacking, *other])


def _other_texts(texts: set[str]) -> str:
    """Return a pattern of all texts but these, letter by letter."""
    first = {text[0] for text in texts if text}
    choices = [f"{_escaped(letter)}(?:{_other_texts({t[1:] for t in texts if t[:1] == letter})})" for letter in first]
    choices.append(f"[^{''.join(map(_escaped, sorted(first)))}](?s:.)*" if first else "(?s:.)+")
    return "|".join([*choices, *([] if "" in texts else [""])])


def _escaped(letter: str) -> str:
    return f"\\x{{{ord(letter):x}}}" if not letter.isalnum() or not letter.isascii() else letter


def item(place: int, schema: Any) -> Any:
    """Return a schema of arrays that have such an item at a place."""
    return schema is not False and {
        "type": "array",
        "prefixItems": [*[True] * place, schema],
        "minItems": place + 1,
    }


def with_key(key: str, schema: Any = True) -> Any:
    """Return a schema of objects that have such a value under a key."""
    return schema is not False and {"type": "object", "required": [key], "properties": {key: schema}}


def kind(value: object) -> str:
    """Return the type of a JSON value; whole numbers are numbers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def text_of(value: object) -> str:
    """Return a text that equal JSON values share: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(text_of, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(sorted(f'{json.dumps(key)}:{text_of(each)}' for key, each in value.items()))}}}"
    return json.dumps(value)

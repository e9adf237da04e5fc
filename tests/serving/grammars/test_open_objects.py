"""Objects and arrays that a schema leaves open: what is accepted is valid, as the package `jsonschema` says, and what
such a schema is for can be written."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")
from jsonschema import Draft202012Validator

from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.grammars.grammar import DETAILS, usable
from ridgeline.serving.grammars.schemas import known
from ridgeline.serving.grammars.tags import to_lark
from ridgeline.transport.messages import Grammar
from ridgeline_bench.scripts.schema_suites import takes, walk

NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
MAP: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "integer"}}
NESTED: dict[str, Any] = {"type": "object", "required": ["o"], "additionalProperties": False}
ANY = ["{}", '{"b": "s"}', '{"o": {"k": [1, {"z": null}]}}', '{ "a" : 1 }']
TEXTS = [
    *ANY,
    *('{"a": 1}', '{"a": "s"}', '{"b": 1}', '{"a": 1, "b": "s"}', '{"b": "s", "a": 1}', '{"a": 1, "a": 2}', '{"": 1}'),
    *('{"x": 1}', '{"x": "s"}', '{"xx": 1}', '{"xx": "s"}', '{"y": 1, "x": 2}', '{"x": 1, "x": 2}', '{"b": 1, "b": 2}'),
    *('{"o": {}}', '{"o": []}', '{"o": [1, "s"]}', '{"o": null}', '{"o": 1}', '{"y1": "s", "x1": 1}'),
    *("[]", "[1]", '["s"]', '[1, "s"]', '[{"k": 1}]', "null", "true", "1", '"s"', "1.5"),
    # other spellings of keys that a schema may name
    *(
        '{"\\u0061": "s"}',
        '{"a": 1, "\\u0061": "s"}',
        '{"\\u0078": "s"}',
        '{"\\u0078x": "s"}',
        '{"x": 1, "\\u0078": 2}',
    ),
]
# The schema, and texts that must be accepted.
ACCEPTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "any object": ({"type": "object"}, ANY),
    "an object with a title": ({"type": "object", "title": "t", "description": "d"}, ANY),
    "an object with a default": ({"type": "object", "default": {}}, ANY),
    "no properties named": ({"type": "object", "properties": {}}, ANY),
    "one key at least": ({"type": "object", "minProperties": 1}, ANY[1:]),
    "one key at most": ({"type": "object", "maxProperties": 1}, ANY),
    "additional absent": (NAMED, ["{}", '{"a": 1}', '{"a": 1, "b": "s"}', '{"b": "s"}']),
    "additional true": (NAMED | {"additionalProperties": True}, ['{"a": 1}', '{"a": 1, "b": "s"}']),
    "additional {}": (NAMED | {"additionalProperties": {}}, ['{"a": 1}', '{"a": 1, "b": "s"}']),
    "additional false": (NAMED | {"additionalProperties": False}, ["{}", '{"a": 1}']),
    "additional of a type": (NAMED | {"additionalProperties": {"type": "string"}}, ['{"a": 1, "b": "s"}']),
    "a map": (MAP, ["{}", '{"b": 1}', '{"y": 1, "x": 2}']),
    "a map without a type": ({"additionalProperties": {"type": "integer"}}, ['{"b": 1}', "[1]", "null"]),
    "nothing but {}": ({"type": "object", "additionalProperties": False}, ["{}"]),
    "required and not named": ({"type": "object", "required": ["b"]}, ['{"b": "s"}', '{"b": 1}']),
    "two required of two": ({"type": "object", "required": ["a"], "minProperties": 2}, ['{"a": 1, "b": "s"}']),
    "patterns": ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, ['{"x": 1}', '{"b": "s"}']),
    "patterns alone": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        ['{"x": 1}', "{}"],
    ),
    "patterns beside names": (NAMED | {"patternProperties": {"^x": {"type": "string"}}}, ['{"a": 1}', '{"x": "s"}']),
    "several patterns": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}, "^y": {"type": "string"}}},
        ['{"y1": "s", "x1": 1}'],
    ),
    "names from a list": (MAP | {"propertyNames": {"enum": ["x", "y"]}}, ['{"y": 1, "x": 2}', "{}"]),
    "a name from a list": (MAP | {"propertyNames": {"enum": ["x"]}, "minProperties": 1}, ['{"x": 1}']),
    "one name": (MAP | {"propertyNames": {"const": "x"}}, ['{"x": 1}', "{}"]),
    "names by reference": (
        MAP | {"propertyNames": {"$ref": "#/$defs/Key"}, "$defs": {"Key": {"enum": ["x", "y"], "title": "Key"}}},
        ['{"y": 1, "x": 2}'],
    ),
    "names beside properties": (NAMED | {"propertyNames": {"enum": ["a", "b"]}}, ['{"a": 1, "b": "s"}', '{"b": 1}']),
    "names that leave a property out": (NAMED | {"propertyNames": {"enum": ["b"]}}, ['{"b": 1}', "{}"]),
    "names by a pattern": (MAP | {"propertyNames": {"pattern": "^x"}}, ['{"xx": 1}', '{"x": 1}']),
    "names of a length": (MAP | {"propertyNames": {"minLength": 2, "maxLength": 2}}, ['{"xx": 1}']),
    "names of two and more": (MAP | {"propertyNames": {"minLength": 2}}, ['{"xx": 1}']),
    "names that are texts": (MAP | {"propertyNames": {"type": "string"}}, ['{"b": 1}']),
    "no names": (NAMED | {"propertyNames": {"enum": []}}, ["{}"]),
    "unevaluated false": (NAMED | {"unevaluatedProperties": False}, ['{"a": 1}']),
    "unevaluated beside a choice": (
        NAMED | {"unevaluatedProperties": False, "anyOf": [{"properties": {"b": {}}}]},
        ['{"a": 1}', '{"a": 1, "b": "s"}'],
    ),
    "unevaluated of a type": (NAMED | {"unevaluatedProperties": {"type": "string"}}, ['{"a": 1, "b": "s"}']),
    "unevaluated beside additional": (
        NAMED | {"unevaluatedProperties": False, "additionalProperties": {"type": "string"}},
        ['{"a": 1, "b": "s"}'],
    ),
    "an object inside": (NESTED | {"properties": {"o": {"type": "object"}}}, ['{"o": {"k": [1, {"z": null}]}}']),
    "an array inside": (NESTED | {"properties": {"o": {"type": "array"}}}, ['{"o": []}', '{"o": [1, "s"]}']),
    "anything inside": (
        NESTED | {"properties": {"o": {}}},
        ['{"o": {}}', '{"o": [1, "s"]}', '{"o": null}', '{"o": 1}'],
    ),
    "true inside": (NESTED | {"properties": {"o": True}}, ['{"o": {}}', '{"o": [1, "s"]}', '{"o": null}']),
    "an array": ({"type": "array"}, ["[]", '[1, "s"]', '[{"k": 1}]']),
    "an array of anything": ({"type": "array", "items": {}}, ["[]", '[1, "s"]', '[{"k": 1}]']),
    "an array of true": ({"type": "array", "items": True}, ['[1, "s"]']),
    "an array of nothing": ({"type": "array", "items": False}, ["[]"]),
    "an array of objects": ({"type": "array", "items": {"type": "object"}}, ["[]", '[{"k": 1}]']),
    "the first item": ({"type": "array", "prefixItems": [{"type": "integer"}]}, ["[]", "[1]", '[1, "s"]']),
    "{}": ({}, [*ANY, "[1]", "null", "1", '"s"']),
    "object or null": ({"type": ["object", "null"]}, ['{"b": "s"}', "null"]),
    "an object by reference": ({"$ref": "#/$defs/o", "$defs": {"o": {"type": "object"}}}, ['{"b": "s"}']),
    "a control character": ({"enum": ["\x01", "s"]}, ['"s"', '"\\u0001"']),
}


def grammar(schema: object) -> Grammar:
    return usable(Grammar(kind="json", text=json.dumps(schema)))


@pytest.mark.few(25)
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_is_valid_and_can_be_written(name: str) -> None:
    schema, wanted = ACCEPTED[name]
    asked, valid = grammar(schema), Draft202012Validator(schema).is_valid
    for text in TEXTS:
        assert valid(json.loads(text)) or not takes(asked, text.encode()), text
    for text in wanted:
        assert valid(json.loads(text)), f"the table is wrong: {text}"
        assert takes(asked, text.encode()), text
    for seed in range(5):
        written = walk(asked, random.Random(seed))
        assert written is None or valid(json.loads(written)), written


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "minProperties": 2}, "written twice"),
        (MAP | {"minProperties": 2.0, "propertyNames": {"enum": ["x", "y"]}}, "written twice"),
        (NAMED | {"required": ["b"], "additionalProperties": False}, "unsatisfiable"),
        (NAMED | {"propertyNames": {"enum": ["b"]}, "required": ["a"]}, "unsatisfiable"),
        (NAMED | {"propertyNames": {"pattern": "^x"}}, "propertyNames"),
        (MAP | {"propertyNames": {"enum": ["x"]}, "anyOf": [{"required": ["x"]}]}, "propertyNames"),
        (NAMED | {"unevaluatedProperties": False, "anyOf": [{"$ref": "#"}]}, "unevaluatedProperties"),
        ({"type": "object", "not": {"pattern": "^x"}, "x-guidance": {"lenient": True}}, "not"),
        ({"type": "object", "not": {}}, "no value fits"),
        ({"type": "object", "properties": {"a": {"const": "\x01"}}}, "control characters"),
    ],
)
def test_a_schema_that_cannot_be_held_to_is_refused_with_the_reason(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        grammar(schema)


def test_keys_have_one_spelling_in_structural_tags_too() -> None:
    content = {"type": "json_schema", "json_schema": NAMED}
    tagged = usable(Grammar(kind="grammar", text=to_lark({"format": content}, details=DETAILS)))
    assert takes(tagged, b'{"a": 1, "b": "s"}')
    assert not takes(tagged, b'{"\\u0061": "s"}')


def test_what_a_schema_tells_the_library_itself_says_nothing_of_escapes() -> None:
    told = {"json_allowed_escapes": 'nrbtf\\"u', "whitespace_flexible": False, "whitespace_pattern": None}
    asked = grammar(NAMED | {"x-guidance": told})
    assert takes(asked, b'{"a":1}')
    assert not takes(asked, b'{"a": 1}')
    assert not takes(asked, b'{"\\u0061":"s"}')


def test_a_long_list_of_values_that_are_unique_takes_little_time() -> None:
    start = time.process_time()
    known({"type": "array", "uniqueItems": True, "items": {"enum": list(range(20_000))}})
    assert time.process_time() - start < 2

"""Keywords that llguidance lacks, said by others: what the words take, the schema takes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("jsonschema")

from jsonschema import Draft202012Validator

from ridgeline.serving.grammars.complements import Inexpressible, other_values, text_of
from ridgeline.serving.grammars.expressed import LACKING, MOST_PARTS, expressed

KEYS = ("a", "b", "c")
SCALARS = st.sampled_from([None, True, False, 0, 1, 2.5, -1, "", "a", "ab", "xyz"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=5,
)
COUNTS = st.integers(0, 2)
LEAVES = st.one_of(
    st.booleans(),
    st.fixed_dictionaries({"type": st.sampled_from(["null", "integer", "number", "string", "array", "object"])}),
    st.fixed_dictionaries({"const": VALUES}),
    st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"required": st.lists(st.sampled_from(KEYS), max_size=2, unique=True)}),
    *[st.fixed_dictionaries({name: st.integers(-1, 2)}) for name in ("minimum", "maximum", "exclusiveMinimum")],
    *[st.fixed_dictionaries({f"{end}{what}": COUNTS}) for end in ("min", "max") for what in ("Length", "Items")],
    st.just({"$ref": "#/$defs/d"}),
    st.just({"minProperties": 1}),
)


def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(st.sampled_from(KEYS), inner, max_size=2)
    lists = st.lists(inner, min_size=1, max_size=3)
    keywords = {
        **dict.fromkeys(("not", "if", "then", "else", "items", "contains", "additionalProperties"), inner),
        **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), inner),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), lists),
        **dict.fromkeys(("properties", "dependentSchemas"), objects),
        **dict.fromkeys(("minContains", "maxContains"), COUNTS),
        "dependentRequired": st.dictionaries(st.sampled_from(KEYS), st.just(["b"]), max_size=2),
    }
    return st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: keywords[name] for name in names})
    )


SCHEMAS = st.recursive(LEAVES, around, max_leaves=6)


@settings(max_examples=150, deadline=None)
@given(schema=SCHEMAS, definition=LEAVES, values=st.lists(VALUES, min_size=8, max_size=8))
def test_words_take_nothing_that_the_schema_refuses(schema: Any, definition: Any, values: list[Any]) -> None:
    if not isinstance(schema, dict):
        schema = {"not": schema}
    if definition == {"$ref": "#/$defs/d"}:
        definition = True
    root = schema | {"$defs": {"d": definition}}
    said = expressed(root)
    asked = Draft202012Validator(root)
    words = Draft202012Validator(said)
    for value in values:
        assert asked.is_valid(value) or not words.is_valid(value), (root, said, value)


@given(values=st.lists(VALUES, min_size=1, max_size=4), tried=VALUES)
def test_other_values_are_all_but_these(values: list[Any], tried: Any) -> None:
    found = Draft202012Validator(other_values(values)).is_valid(tried)
    listed = not Draft202012Validator({"not": {"enum": values}}).is_valid(tried)
    assert not (found and listed)
    if not isinstance(tried, dict):  # an object with keys more is not written
        assert found or listed or any(isinstance(value, list) for value in values)


@pytest.mark.parametrize(
    ("schema", "takes", "refuses"),
    [
        ({"not": {"enum": ["on", "off"]}, "type": "string"}, ["o", "", "offs", "\n"], ["on", "off"]),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
        (
            {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
            [{"a": 1, "b": 2}, {"a": 2}, {}],
            [{"a": 1}],
        ),
        ({"dependencies": {"a": ["b"], "b": {"required": ["c"]}}}, [{"c": 1}, {"b": 1, "c": 1}], [{"a": 1}, {"b": 1}]),
        ({"type": "array", "contains": {"const": 7}}, [[7], [1, 2, 7]], [[], [1]]),
        (
            {"allOf": [{"$ref": "#/$defs/d"}], "properties": {"b": {}}, "unevaluatedProperties": False}
            | {"$defs": {"d": {"properties": {"a": {}}}}},
            [{"a": 1, "b": 1}],
            [{"c": 1}],
        ),
        (
            {"$dynamicAnchor": "node", "properties": {"next": {"$dynamicRef": "#node"}}, "required": ["n"]},
            [{"n": 1}, {"n": 1, "next": {"n": 2}}],
            [{"n": 1, "next": {}}],
        ),
    ],
)
def test_what_agents_send_has_words(schema: dict[str, Any], takes: list[Any], refuses: list[Any]) -> None:
    said = expressed(schema)
    assert not any(f'"{name}"' in json.dumps(said) for name in LACKING)
    words = Draft202012Validator(said)
    assert [words.is_valid(value) for value in takes] == [True] * len(takes)
    assert [words.is_valid(value) for value in refuses] == [False] * len(refuses)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"pattern": "^a"}},
        {"not": {"$ref": "#/$defs/d"}, "$defs": {"d": {"anyOf": [{"$ref": "#/$defs/d"}, {"const": 1}]}}},
        {"not": {"enum": ["x" * 3000]}},
        {"oneOf": [{"properties": {f"k{n}": {"const": m} for n in range(40)}, "required": ["k1"]} for m in range(40)]},
    ],
)
def test_what_has_no_words_stays(schema: dict[str, Any]) -> None:
    said = expressed(schema)
    assert said == schema
    assert len(json.dumps(said)) < 40 * MOST_PARTS


JUNK = st.recursive(
    SCALARS | st.just({"$ref": "#"}),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*sorted(LACKING), "$ref", "anyOf", "a"]), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from([*sorted(LACKING), "allOf", "anyOf", "properties", "type", "enum"]), JUNK))
def test_a_malformed_schema_is_left_to_llguidance(schema: dict[str, Any]) -> None:
    json.dumps(expressed(schema))


def test_a_long_schema_is_copied() -> None:
    plain = {"properties": {f"k{n}": {"type": "string"} for n in range(3 * MOST_PARTS)}}
    assert expressed(plain) == plain
    assert expressed(plain | {"not": {"required": ["k0"]}})["allOf"] == [
        {"type": "object", "properties": {"k0": False}}
    ]


def chain(length: int) -> dict[str, Any]:
    return {f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(length)}


def level(number: int) -> dict[str, Any]:
    names = [f"k{n}" for n in range(90)]
    below = {"$ref": f"#/$defs/{number - 1}"}
    return {"type": "object", "required": names, "properties": dict.fromkeys(names, below)}


NODE = {"type": "object", "required": ["next", "v"], "properties": {"next": {"$ref": "#/$defs/n"}, "v": {"minimum": 1}}}
WIDE = {"anyOf": [{"properties": {f"k{n}": {}}} for n in range(300)]}


@pytest.mark.parametrize(
    "schema",
    [
        {"contains": True, "minContains": 10**9, "maxContains": 10**9},
        {"not": {"$ref": "#/$defs/d0"}, "$defs": {**chain(2000), "d2000": {"type": "null"}}},
        {"unevaluatedProperties": False, "allOf": [WIDE, WIDE, WIDE]},
        {"unevaluatedProperties": False, "anyOf": [{"allOf": [WIDE, WIDE]}] * 3},
        {
            "oneOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/m"}],
            "$defs": {"n": NODE, "m": NODE | {"maxProperties": 2}},
        },
        {"oneOf": [{"enum": list(range(k, 9000, 2))} for k in range(2)]},
        {"oneOf": [{"required": [f"k{n}"]} for n in range(2000)]},
        {"oneOf": [{"enum": list(range(k, 10_000, 100))} for k in range(100)]},
        {
            "oneOf": [{"$ref": "#/$defs/3"}] * 2,
            "$defs": {"0": {"type": "string"}, **{f"{n}": level(n) for n in (1, 2, 3)}},
        },
        {"not": {"const": "x" * 1900}},
    ],
    ids=[
        "counts",
        "references",
        "branches",
        "joined",
        "recursive",
        "constants",
        "choices",
        "many constants",
        "levels",
        "text",
    ],
)
def test_little_is_done_for_what_has_too_many_words(schema: dict[str, Any]) -> None:
    start = time.process_time()
    assert len(json.dumps(expressed(schema))) < 1 << 20
    assert time.process_time() - start < 2


def test_long_lists_of_texts_are_not_left_out() -> None:
    with pytest.raises(Inexpressible):
        other_values(["x" * 3000])


@given(VALUES, VALUES)
def test_equal_values_have_one_text(one: Any, other: Any) -> None:
    listed = Draft202012Validator({"const": one}).is_valid(other)
    assert (text_of(one) == text_of(other)) == listed

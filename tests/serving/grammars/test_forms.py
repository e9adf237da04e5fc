"""Schemas and grammars in words that llguidance does not know are put into ones that it does, and mean the same."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

pytest.importorskip("llguidance")
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.grammars import schemas
from ridgeline.serving.grammars.formats import PATTERNS
from ridgeline.serving.grammars.grammar import BYTES, compiled, usable
from ridgeline.serving.grammars.tags import to_lark
from ridgeline.transport.messages import Grammar
from ridgeline_bench.scripts.schema_suites import walk


def of(schema: object) -> Grammar:
    return usable(Grammar(kind="json", text=json.dumps(schema)))


def lark(text: str) -> Grammar:
    return usable(Grammar(kind="grammar", text=text))


def takes(grammar: Grammar, text: str) -> bool:
    matcher = LLMatcher(BYTES, compiled(grammar), log_level=0)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def test_a_format_that_nobody_knows_is_an_annotation() -> None:
    assert takes(of({"type": "string", "format": "phone"}), '"anything"')
    assert not takes(of({"type": "string", "format": "uuid"}), '"anything"')
    named = of({"type": "object", "properties": {"format": {"enum": ["phone"]}}, "required": ["format"]})
    assert takes(named, '{"format": "phone"}')
    assert not takes(named, '{"format": "fax"}'), "a property is no keyword"
    assert takes(of({"const": {"format": "phone"}}), '{"format": "phone"}'), "nor is what stands in a value"


def test_a_refusal_names_what_matters() -> None:
    schema = {"properties": {"path": {"type": "string", "format": "path"}, "b": {"not": {"pattern": "^x"}}}}
    with pytest.raises(InvalidRequest, match=r'Unimplemented keys: \["not"\]'):
        of(schema)


def test_objects_are_closed_where_that_takes_nothing_away() -> None:
    plain = {"type": "object", "properties": {"a": {"type": "array", "items": {"properties": {"b": {}}}}}}
    assert schemas.closed_where_plain(plain) == schemas.closed(plain) != plain
    # a property called "not" is no keyword
    assert schemas.closed_where_plain({"properties": {"not": {}}})["additionalProperties"] is False
    part = {"properties": {"b": {}}}
    for more in ({"allOf": [part]}, {"anyOf": [part]}, {"if": part, "then": part}, {"$ref": "#/$defs/x"}):
        whole = {"properties": {"a": {}}, "$defs": {"x": part}, **more}
        assert schemas.closed_where_plain(whole) == whole


@pytest.mark.parametrize("bounds", [{}, {"minItems": 1}, {"maxItems": 2}, {"minItems": 2, "maxItems": 2}])
def test_unique_items_of_a_short_list_are_all_arrays_without_repetition(bounds: dict[str, int]) -> None:
    values = ["a", 1, True]
    grammar = of({"type": "array", "items": {"enum": [*values, 1]}, "uniqueItems": True, **bounds})
    for length in range(5):
        for chosen in itertools.product(values, repeat=length):
            distinct = len({json.dumps(value) for value in chosen}) == length
            fits = distinct and bounds.get("minItems", 0) <= length <= bounds.get("maxItems", 9)
            assert takes(grammar, json.dumps(chosen)) == fits, chosen


def test_unique_items_that_cannot_be_said_are_refused_by_name() -> None:
    for items in ({"type": "string"}, {"enum": list(range(9))}):
        with pytest.raises(InvalidRequest, match="uniqueItems"):
            of({"type": "array", "items": items, "uniqueItems": True})
    assert takes(of({"type": "array", "items": {"type": "string"}, "uniqueItems": False}), '["a", "a"]')


def test_numbers_that_may_be_any_have_few_digits() -> None:
    for kind in ("number", "integer", ["number", "null"]):
        grammar = of({"type": kind})
        for text in ("0", "-7", "999999999999999"):
            assert takes(grammar, text), text
        assert not takes(grammar, "9" * 16)
    number = of({"type": "number"})
    assert takes(number, "-1.123456789")
    assert not takes(number, "1." + "3" * 40)
    nested = of({"type": "object", "properties": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}})
    assert not takes(nested, '{"n": ' + "9" * 40 + "}")


def test_numbers_of_which_something_is_asked_are_left_as_they_are() -> None:
    assert takes(of({"type": "number", "minimum": 0}), "1." + "3" * 40)
    assert takes(of({"enum": [10**30]}), str(10**30))
    assert takes(of({"type": "integer", "const": 10**16}), str(10**16))
    # both must hold, and a bound of ours would leave nothing
    assert takes(of({"allOf": [{"type": "number"}, {"minimum": 1e16, "maximum": 1e17}]}), "1" + "0" * 16)


def test_objects_are_closed_where_they_say_nothing_else() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "object", "properties": {"b": {}}},
            "c": {"properties": {}, "additionalProperties": {}},
        },
    }
    found = schemas.closed(schema)
    assert found["additionalProperties"] is False
    assert found["properties"]["a"]["additionalProperties"] is False
    assert found["properties"]["c"]["additionalProperties"] == {}
    assert "additionalProperties" not in schema


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "items", "format", "uniqueItems", "enum", "anyOf", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_nothing_that_a_client_sends_for_a_schema_breaks_it(value: Any) -> None:
    before = json.dumps(value)
    for change in (schemas.known, schemas.bounded, schemas.closed):
        json.dumps(change(value))
    assert json.dumps(value) == before, "what the client sent is not written to"


@pytest.mark.parametrize(
    ("ebnf", "fits", "does_not"),
    [
        ('root ::= "a" item*\nitem ::= [0-9] | "(" root ")"', ["a", "a1", "a1(a2)"], ["b", "a(", "a1)"]),
        ('root ::= ("yes" | "no") "!"?  # a comment', ["yes", "no!"], ["maybe", "yes!!"]),
        ('root ::= [a-z]{2,3} "-" [^0-9]', ["ab-x", "abc--"], ["a-x", "abcd-x", "ab-1"]),
        ('root ::= the-rule\nthe-rule ::= "x"+ ', ["x", "xxx"], [""]),
    ],
)
def test_ebnf_is_taken_as_xgrammar_and_llama_cpp_take_it(ebnf: str, fits: list[str], does_not: list[str]) -> None:
    grammar = lark(ebnf)
    assert all(takes(grammar, text) for text in fits)
    assert not any(takes(grammar, text) for text in does_not)


def test_larks_syntax_stays_what_it_is() -> None:
    text = 'start: "::=" | "b"'
    assert lark(text).text == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('root ::= "a" missing', "missing"),
        ('rule ::= "a"', "root"),
        ('root ::= "a', "not EBNF"),
        ("root ::= " + "(" * 9000 + '"a"' + ")" * 9000, "deep|not EBNF|cannot be used"),
        ('root ::= "' + "a" * 70_000 + '"', "characters"),
    ],
)
def test_what_is_no_ebnf_is_refused_in_a_sentence(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        lark(text)
    assert len(str(refused.value)) < 600


# ---- structural tags ----------------------------------------------------------------------------------------------

SUM = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def test_text_is_free_until_a_trigger() -> None:
    structures = [
        {"begin": "<function=sum>", "schema": SUM, "end": "</function>"},
        {"begin": "<function=now>", "schema": {"type": "object"}, "end": "</function>"},
    ]
    grammar = lark(to_lark({"triggers": ["<function="], "structures": structures}))
    for text in ("", "plain", 'so: <function=sum>{"a":3}</function> and <function=now>{}</function>.'):
        assert takes(grammar, text), text
    for text in ("<function=other>", '<function=sum>{"a":"3"}</function>', "<function=sum>"):
        assert not takes(grammar, text), text


def tag(begin: str, content: object, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


@pytest.mark.parametrize(
    ("form", "fits", "does_not"),
    [
        ({"type": "const_string", "value": 'a"b'}, ['a"b'], ["ab"]),
        ({"type": "json_schema", "json_schema": SUM}, ['{"a":1}'], ["{}"]),
        ({"type": "regex", "pattern": "[a-z/]+"}, ["a/b"], ["A"]),
        ({"type": "or", "elements": [{"type": "const_string", "value": x} for x in "ab"]}, ["a", "b"], ["ab", "c"]),
        (
            {"type": "sequence", "elements": [tag("<think>", {"type": "any_text"}, "</think>"), {"type": "any_text"}]},
            ["<think>a < b</think>c", "<think></think>"],
            ["c", "<think>a"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<t>"],
                "tags": [tag("<t>", {"type": "json_schema", "json_schema": {"type": "boolean"}}, "</t>")],
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["so <t>true</t>"],
            ["so", "<t>true</t> more"],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [tag("[", {"type": "regex", "pattern": "[a-z]"}, "]")],
                "separator": ", ",
            },
            ["", "[a]", "[a], [b]"],
            ["[a] [b]", "[A]", "[a], "],
        ),
    ],
    ids=lambda x: x["type"] if isinstance(x, dict) else "",
)
def test_every_part_of_a_format(form: dict[str, Any], fits: list[str], does_not: list[str]) -> None:
    grammar = lark(to_lark({"format": form}))
    assert [text for text in fits if not takes(grammar, text)] == []
    assert [text for text in does_not if takes(grammar, text)] == []


def test_special_tokens_are_named_since_they_have_no_text() -> None:
    text = to_lark(
        {"format": tag("<|call|>x", {"type": "json_schema", "json_schema": SUM}, "<|end|>")}, ["<|call|>", "<|end|>"]
    )
    assert 'start: <|call|> "x" r0 <|end|>' in text


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"format": 3},
        {"format": {"type": "nothing"}},
        {"format": {"type": "sequence", "elements": []}},
        {"format": {"type": "tag", "begin": "a"}},
        {"format": {"type": "json_schema"}},
        {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b>"]},
        {"structures": [3], "triggers": ["<b>"]},
        {"structures": [{"begin": "", "schema": {}, "end": ""}], "triggers": [""]},
    ],
)  # fmt: skip
def test_a_tag_that_is_wrong_is_named(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="the structural tag"):
        to_lark(asked)


@pytest.mark.parametrize("name", [*PATTERNS, *schemas.FORMATS])
def test_what_a_format_lets_through_is_valid(name: str) -> None:
    """By a library that is not ours."""
    schema = {"type": "string", "format": name, "maxLength": 60}
    valid = pytest.importorskip("jsonschema_rs").Draft202012Validator(schema, validate_formats=True).is_valid
    assert not valid("\x00 ^{"), "it does not know this format"
    grammar, found = of(schema), 0
    for seed in range(40):
        if (text := walk(grammar, random.Random(seed))) is not None:
            assert valid(json.loads(text)), text
            found += 1
    assert found > 10


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("date", "2024-02-29", True), ("date", "2023-02-29", False), ("date", "1900-02-29", False),
        ("date", "2000-02-29", True), ("date-time", "2024-02-29T12:00:00.5Z", True), ("time", "12:00:60Z", False),
        ("idn-email", "jürgen@exämple.de", True), ("idn-email", "nobody", False),
        ("iri", "http://exämple.de/ü?q=é#f", True), ("iri", "../a", False), ("iri-reference", "../a/b", True),
        ("json-pointer", "", True), ("json-pointer", "/a/b~1c", True), ("json-pointer", "a", False),
        ("relative-json-pointer", "1/a", True), ("relative-json-pointer", "0#", True),
        ("uri-reference", "//h:80/a?b", True), ("uri-template", "/users/{id}{?q*,lang:3}", True),
        ("uri-template", "/users/{id", False),
    ],
)  # fmt: skip
def test_formats_are_kept_to(name: str, value: str, fits: bool) -> None:
    assert takes(of({"type": "string", "format": name}), json.dumps(value, ensure_ascii=False)) is fits
    assert takes(of({"format": name}), "7"), "a format is about texts alone"


def test_what_a_schema_says_without_effect_is_named() -> None:
    schema = {
        "type": "object",
        "example": {},
        "properties": {
            "a": {"type": "string", "format": "regex"},
            "format": {"type": "string", "format": "json-pointer", "minLenght": 3},
            "both": {"format": "time", "pattern": "^1"},
            "c": {"const": {"unknown": 1}},
        },
    }
    assert schemas.unenforced(schema) == ["format.regex", "minLenght", "format.time", "example"]

"""Forced calls in forms that write arguments one by one: what a grammar allows is what the form's reader reads back."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from ridgeline.serving.grammars.grammar import check, compiled, vocabulary
from ridgeline.serving.requests.bodies import ChatBody
from ridgeline.serving.requests.tools import calls_grammar, schemas_of
from ridgeline.text.parsers.arguments import arguments_of
from ridgeline.text.parsers.choose import Forms, choose
from ridgeline.text.parsers.events import CallDelta, Content
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.conftest import MODEL, Server

NAMES = ("qwen3_coder", "glm45", "minimax_m2", "olmo3", "pythonic")
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
PROPERTIES: dict[str, Any] = {
    "city": TEXT,
    "days": WHOLE | {"minimum": 1, "maximum": 9},
    "unit": {"enum": ["metric", 'imperial "old"']},
    "kind": {"$ref": "#/$defs/Kind"},
    "deep": {"type": "boolean"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    "tags": {"type": "array", "items": TEXT},
    "place": {"type": "object", "properties": {"lat": {"type": "number"}, "name": TEXT}, "required": ["lat"]},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["city", "kind"],
    "additionalProperties": False,
    "$defs": {"Kind": {"type": "string", "enum": ["rain", "snow"]}},
}
TEXTS = (
    "Oslo",
    "",
    "a <b> c",
    "</para",
    "two\nlines",
    "\\n \"q\" 'r'",
    "São Paulo 5",
    "[1]",
    "None of it",
    "</parameter",
)


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def body_of(*tools: dict[str, Any]) -> ChatBody:
    return ChatBody(messages=[{"role": "user", "content": "a"}], tools=list(tools), tool_choice="required")  # type: ignore[list-item]


def arguments(rng: random.Random) -> dict[str, Any]:
    text = rng.choice
    every: dict[str, Any] = {
        "city": text(TEXTS),
        "days": rng.randint(1, 9),
        "unit": text(["metric", 'imperial "old"']),
        "kind": text(["rain", "snow"]),
        "deep": rng.random() < 0.5,
        "note": text([*TEXTS, None]),
        "tags": [text(["a", "b <c", 'd"e']) for _ in range(rng.randrange(3))],
        "place": {"lat": rng.randrange(90) + 0.5, "name": text(["x", "y"])},
    }
    return {name: value for name, value in every.items() if name in SCHEMA["required"] or rng.random() < 0.6}


def written(name: str, forms: Forms, calls: list[dict[str, Any]]) -> str:
    assert forms.tools is not None
    frame = forms.tools.frame
    assert frame is not None

    def value(given: Any) -> str:
        if frame.python:
            return str(given) if isinstance(given, bool) else json.dumps(given, ensure_ascii=False)
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    def call(given: dict[str, Any]) -> str:
        one = [frame.argument.replace("$KEY", key).replace("$VALUE", value(each)) for key, each in given.items()]
        text = frame.call.replace("$NAME", name).replace("$QUOTED", json.dumps(name))
        return text.replace("$ARGS", frame.separator.join(one))

    return frame.start + frame.between.join(map(call, calls)) + frame.end


@pytest.mark.parametrize("tags", ["tokens", "texts"])
@pytest.mark.parametrize("form", NAMES)
def test_what_the_grammar_allows_is_read_back(form: str, tags: str) -> None:
    backend = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    forms = choose(form, "none", [], ())
    assert forms.tools is not None
    if tags == "tokens":
        backend.add_special_tokens([tokenizers.AddedToken(tag, special=True) for tag in forms.tools.tags])
    tokenizer = Tokenizer(backend, {})
    body = body_of(tool("weather", SCHEMA), tool("now", None))
    assert forms.forced(schemas_of(body)) is forms.tools
    grammar = calls_grammar(body, tokenizer, forms)
    assert grammar is not None
    check(grammar, vocabulary(tokenizer.added, tokenizer.vocab_size))
    compiled_once, known = compiled(grammar), LLTokenizer(backend.to_str())
    rng = random.Random(form + tags)
    for _ in range(12):
        calls = [arguments(rng) for _ in range(rng.randint(1, 2))]
        text = written("weather", forms, calls)
        ids = tokenizer.encode(text, add_special_tokens=False)
        matcher = LLMatcher(known, compiled_once, log_level=0)
        taken = matcher.try_consume_tokens(ids)
        assert taken == len(ids), (text, tokenizer.decode(ids[:taken], False))
        assert matcher.is_accepting()
        reader = forms.reader("Hi", schemas_of(body), calls=True, forced=True)
        events = [event for char in text for event in reader.read(char, ended=False)] + reader.read("", ended=True)
        assert not any(isinstance(event, Content) for event in events)
        found = [event for event in events if isinstance(event, CallDelta)]
        joined = ["".join(each.arguments for each in found if each.index == n) for n in range(len(calls))]
        assert [json.loads(each) for each in joined] == calls
    for wrong in (
        [{"kind": "rain"}],
        [{"city": "Oslo", "kind": "hail"}],
        [{"city": "Oslo", "kind": "rain", "days": 10}] if form in ("olmo3", "pythonic") else [{"days": 3}],
        [{"city": "Oslo", "kind": "rain", "more": "x"}],
    ):
        ids = tokenizer.encode(written("weather", forms, wrong), add_special_tokens=False)
        matcher = LLMatcher(known, compiled_once, log_level=0)
        assert matcher.try_consume_tokens(ids) < len(ids) or not matcher.is_accepting(), wrong


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "^x"}}},
        {"properties": {"a": {"type": "string", "maxLength": 5}}},
        {"properties": {"a": {}}},
        {"properties": {"a": True}},
        {"properties": {"a": {"type": ["string", "integer"]}}},
        {"properties": {"a": {"enum": ["a</parameter>b"]}}},
        {"properties": {"a": {"enum": ["a", 1]}}},
        {"properties": {"a": {"type": "array", "items": {"type": "string", "format": "date"}}}},
        {"properties": {"a": {"type": "object"}}},
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": TEXT}},
        {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"properties": {"a": TEXT}, "required": ["b"]},
        {"properties": {"a b": TEXT}},
        {"properties": {"a": TEXT, "b": TEXT}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"properties": {"a": TEXT}, "minProperties": 1},
        {"properties": []},
    ],
)
def test_schemas_that_say_more_than_the_form_can_are_forced_as_json(schema: dict[str, Any]) -> None:
    body = body_of(tool("f", {"type": "object"} | schema))
    forms = choose("qwen3_coder", "none", [], ())
    assert arguments_of(schema, "</parameter>") is None
    assert forms.forced(schemas_of(body)).name == "hermes"
    reader = forms.reader("", schemas_of(body), calls=True, forced=True)
    events = reader.read('<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>', ended=True)
    assert "".join(event.arguments for event in events if isinstance(event, CallDelta)) == '{"a": "x"}'


@pytest.mark.dealt
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "form",
    [pytest.param(name, marks=[pytest.mark.thorough] if name not in ("glm45", "olmo3") else []) for name in NAMES],
)
def test_a_model_that_knows_no_tools_is_held_to_them(
    server: Server, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.api, "forms", choose(form, "none", [], ()))
    small = {"type": "object", "required": ["unit", "days"], "properties": PROPERTIES | {"city": {"enum": ["Oslo"]}}}
    del (
        small["properties"]["kind"],
        small["properties"]["note"],
        small["properties"]["place"],
        small["properties"]["tags"],
    )
    for seed, streams in ((1, False), (2, True)):
        asked: Any = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Rain?"}],
            "max_tokens": 300,
            "seed": seed,
        }
        asked |= {"tools": [tool("weather", small)], "tool_choice": "required", "parallel_tool_calls": False}
        if streams:
            with server.client.chat.completions.stream(**asked) as stream:
                choice: Any = stream.get_final_completion().choices[0]
        else:
            choice = server.client.chat.completions.create(**asked).choices[0]
        (call,) = choice.message.tool_calls or []
        told = json.loads(call.function.arguments)
        assert not choice.message.content
        assert told["unit"] in ("metric", 'imperial "old"')
        assert 1 <= told["days"] <= 9
        assert told.keys() <= small["properties"].keys()


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {}}, "required": [[]]},
        {"properties": {"a": {"type": "object", "properties": {"b": TEXT}, "required": [{}]}}},
        {"properties": {"a": {"type": ["string", []]}}},
        {"properties": {"a": {"anyOf": [TEXT, {"type": []}]}}},
        {"properties": {"a": {"type": {}}}},
        {"properties": {"a": {"enum": {}}}},
        {"properties": {"a": {"$ref": "#/$defs/"}}, "$defs": {}},
        {"properties": {"a": {"$ref": "#/$defs/a/b"}}, "$defs": {"a": 5}},
        {"properties": {"a": {"$ref": 5}}},
        {"properties": {"a": {"anyOf": [5]}}},
        {"properties": {"a": {"anyOf": []}}},
        {"properties": {"a": {"type": "array", "items": []}}},
        {"properties": {"a": 5}},
        {"properties": {"a": TEXT}, "required": 5},
        {"properties": 5},
        {"$defs": {"a": []}},
    ],
)
def test_schemas_that_are_none_are_no_reason_to_fail(schema: dict[str, Any]) -> None:
    for end in ("</parameter>", None):
        found = arguments_of(schema, end)
        assert found is None or isinstance(found, list)

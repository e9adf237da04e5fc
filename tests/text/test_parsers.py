"""Forms of answers, each on texts as its model writes them, whole and cut anywhere: what is read is what was written."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.text.parsers.events import CallDelta, Content, Reasoning
from ridgeline.text.parsers.forms import ReasoningForm
from ridgeline.text.parsers.reader import Parser
from ridgeline.text.parsers.reasoning import deepseek_r1, granite, mistral, think
from ridgeline.text.parsers.reasoning.think import ThinkParser
from ridgeline.text.parsers.tools import TOOL_FORMS
from ridgeline.text.parsers.tools.harmony import HarmonyParser

Read = tuple[str, str, list[tuple[str, str, str | None]]]  # reasoning, content, and each call's name, arguments and id

SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "limit": {"type": "integer"},
        "ratio": {"type": "number"},
        "fresh": {"type": "boolean"},
        "filter": {"type": "object"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "day": {"type": ["string", "null"]},
        "page": {"$ref": "#/$defs/page"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "free": {},
    },
    "$defs": {"page": {"type": "integer"}},
}
TOOLS: dict[str, Any] = {"search": SEARCH, "now": {"type": "object", "properties": {}}}
FORMS = {form.name: form for form in TOOL_FORMS}
QUERY = '<b>"São\n\\Paulo" 😀</b>'
ARGS = json.dumps({"query": QUERY, "limit": 3}, ensure_ascii=False)
S, E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
C, B, D = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
K, L = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
PLAIN = "It <b>rains</b> [1], {2} and `x` <to"


def joined(parser: Parser, pieces: list[str]) -> Read:
    """Everything joined, as a client joins it."""
    reasoning, content, calls = "", "", dict[int, tuple[str, str, str | None]]()
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.finish():
        match event:
            case Content(text):
                assert text
                content += text
            case Reasoning(text):
                assert text
                reasoning += text
            case CallDelta(index, name, arguments, call_id):
                assert (name is not None) == (index not in calls), "a name comes once, and first"
                before = calls.get(index, (name or "", "", call_id))
                calls[index] = before[0], before[1] + arguments, before[2]
    assert list(calls) == list(range(len(calls)))
    assert parser.finish() == []
    return reasoning, content, list(calls.values())


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


def xml(*arguments: tuple[str, str]) -> str:
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)


def glm(*arguments: tuple[str, str]) -> str:
    return "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments)


def m2(*arguments: tuple[str, str]) -> str:
    return "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments)


TYPED = [
    ("query", QUERY), ("limit", "3"), ("ratio", "1e-3"), ("fresh", "true"), ("filter", '{"a": [1, null]}'),
    ("tags", '["x", "y"]'), ("day", "null"), ("page", "7"), ("either", "12"), ("free", "5"), ("other", "007"),
]  # fmt: skip
TYPED_VALUES = {
    "query": QUERY, "limit": 3, "ratio": 0.001, "fresh": True, "filter": {"a": [1, None]}, "tags": ["x", "y"],
    "day": None, "page": 7, "either": 12, "free": 5, "other": "007",
}  # fmt: skip
ODD = [("limit", "three"), ("fresh", "True"), ("filter", "{'a': None}"), ("day", "12"), ("query", "null")]
ODD_VALUES = {"limit": "three", "fresh": True, "filter": {"a": None}, "day": "12", "query": "null"}
ONE = [("search", {"query": QUERY, "limit": 3})]
TWO = [*ONE, ("now", {})]

WRITTEN: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f'Well.\n<tool_call>\n{{"name": "search", "arguments": {ARGS}}}\n</tool_call>', "Well.\n", ONE),
    (
        "hermes",
        f'<tool_call>{{"name": "search", "arguments": {ARGS}}}</tool_call><tool_call>{{"name": "now"}}</tool_call> ok',
        "ok",
        TWO,
    ),
    ("llama3_json", f'{{"name": "search", "parameters": {ARGS}}}', "", ONE),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "search", "parameters": {ARGS}}}; {{"name": "now", "parameters": {{}}}}',
        "",
        TWO,
    ),
    ("llama3_json", f'Sure. <|python_tag|>{{"type": "function", "name": "search", "parameters": {ARGS}}}', "Sure. ", ONE),
    ("llama3_json", '{"answer": 5} and so on', '{"answer": 5} and so on', []),
    ("pythonic", f"[search(query={QUERY!r}, limit=3), now()]", "", TWO),
    ("pythonic", "[search(query='a', tags=[\"x\", 'y)'], fresh=True, day=null, filter={'a': (1)})]", "", [
        ("search", {"query": "a", "tags": ["x", "y)"], "fresh": True, "day": None, "filter": {"a": 1}})
    ]),
    ("pythonic", f"<|python_start|>[search({QUERY!r}, limit=3)]<|python_end|>", "", ONE),
    ("pythonic", "[see(1)] says more", "[see(1)] says more", []),
    ("pythonic", "[1] says more", "[1] says more", []),
    ("olmo3", f"Hm.<function_calls>\nsearch(query={QUERY!r}, limit=3)\nnow()\n</function_calls>", "Hm.", TWO),
    ("olmo3", "<function_calls>search(query=\"a\", fresh=true)</function_calls>", "", [
        ("search", {"query": "a", "fresh": True})
    ]),
    ("mistral", f'[TOOL_CALLS][{{"name": "search", "arguments": {ARGS}}}, {{"name": "now", "arguments": {{}}}}]', "", TWO),
    ("mistral", f'Hm [TOOL_CALLS] [{{"name": "search", "arguments": {ARGS}, "id": "abcdefghi"}}]', "Hm ", ONE),
    ("mistral", f"Hm[TOOL_CALLS]search{ARGS}[TOOL_CALLS]now{{}}", "Hm", TWO),
    ("mistral", f"[TOOL_CALLS]search[ARGS]{ARGS}[TOOL_CALLS]now[ARGS]{{}}", "", TWO),
    ("mistral", f"[TOOL_CALLS]search[CALL_ID]a1B2c3D4e[ARGS]{ARGS}", "", ONE),
    ("deepseek_v3", f"Hm{S}{C}function{B}search\n```json\n{ARGS}\n```{D}\n{C}function{B}now\n```json\n{{}}\n```{D}{E}", "Hm", TWO),
    ("deepseek_v31", f"Hm{S}{C}search{B}{ARGS}{D}{C}now{B}{{}}{D}{E}", "Hm", TWO),
    (
        "kimi_k2",
        f"Hm{K}<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{ARGS}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>{L}",
        "Hm",
        TWO,
    ),
    ("granite", f'<|tool_call|>[{{"name": "search", "arguments": {ARGS}}}, {{"name": "now", "arguments": {{}}}}]', "", TWO),
    ("granite", f'<tool_call> {{"name": "search", "arguments": {ARGS}}}', "", ONE),
    ("minimax", f'Hm<tool_calls>\n{{"name": "search", "arguments": {ARGS}}}\n{{"name": "now", "arguments": {{}}}}\n</tool_calls>', "Hm", TWO),
    ("qwen3_coder", f"Hm\n<tool_call>\n<function=search>\n{xml(*TYPED)}</function>\n</tool_call>", "Hm\n", [("search", TYPED_VALUES)]),
    ("qwen3_coder", f"<tool_call><function=search>{xml(*ODD)}</function></tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("search", ODD_VALUES), ("now", {})]),
    ("qwen3_coder", f"<function=search>\n{xml(('query', QUERY), ('limit', '3'))}</function>\n</tool_call>", "", ONE),
    ("qwen3_coder", "<tool_call>\nno\n</tool_call>", "<tool_call>\nno\n</tool_call>", []),
    ("glm45", f"Hm\n<tool_call>search\n{glm(*TYPED)}</tool_call>\n<tool_call>now\n</tool_call>", "Hm\n", [("search", TYPED_VALUES), ("now", {})]),
    ("glm45", f"<tool_call>search{glm(*ODD)}</tool_call>", "", [("search", ODD_VALUES)]),
    ("minimax_m2", f'Hm\n<minimax:tool_call>\n<invoke name="search">\n{m2(*TYPED)}</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>', "Hm\n", [("search", TYPED_VALUES), ("now", {})]),
    ("minimax_m2", f'<minimax:tool_call><invoke name="search">{m2(*ODD)}</invoke></minimax:tool_call>', "", [("search", ODD_VALUES)]),
    (
        "openai",
        f"<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.search "
        f"<|constrain|>json<|message|>{ARGS}<|call|><|start|>assistant to=functions.now<|channel|>commentary<|message|><|call|>",
        "Let me see.",
        TWO,
    ),
    ("openai", "<|channel|>final<|message|>It rains.<|return|>", "It rains.", []),
]  # fmt: skip


def cuts_agree(parser: Any, text: str) -> Read:
    """The text read whole, which must be what is read in single characters and cut at each place."""
    whole = joined(parser(), [text])
    assert joined(parser(), list(text)) == whole
    for place in range(1, len(text)):
        assert joined(parser(), [text[:place], text[place:]]) == whole, place
    return whole


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    WRITTEN,
    ids=lambda value: value if isinstance(value, str) and len(value) < 14 else "",
)
def test_calls_are_those_that_the_model_wrote(name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    reasoning, found, made = cuts_agree(lambda: FORMS[name].parser(TOOLS), text)
    assert (reasoning, found) == ("", content)
    assert [(name, json.loads(arguments)) for name, arguments, _ in made] == calls


@pytest.mark.parametrize("name", FORMS)
def test_text_without_calls_is_content(name: str) -> None:
    assert cuts_agree(lambda: FORMS[name].parser(TOOLS), PLAIN) == ("", PLAIN, [])


def test_every_form_is_among_these_texts() -> None:
    assert {name for name, *_ in WRITTEN} == set(FORMS)


@settings(max_examples=400)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(FORMS)),
    places=st.lists(st.integers(0, 10_000), max_size=8),
)
def test_what_is_broken_reads_the_same_however_it_is_cut(data: st.DataObject, name: str, places: list[int]) -> None:
    texts = [text for form, text, *_ in WRITTEN if form == name]
    spans = st.tuples(st.sampled_from(texts), st.integers(0, 400), st.integers(0, 400))
    parts = data.draw(
        st.lists(st.one_of(spans, st.sampled_from([*FORMS[name].tags, "{", "}", '"', "\n", "x"])), max_size=5)
    )
    text = "".join(part if isinstance(part, str) else part[0][min(part[1:]) : max(part[1:])] for part in parts)
    whole = joined(FORMS[name].parser(TOOLS), [text])
    assert joined(FORMS[name].parser(TOOLS), cut(text, places)) == whole
    assert joined(FORMS[name].parser(TOOLS), list(text)) == whole

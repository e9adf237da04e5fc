"""Tool calls read from text, whole and however it is cut: against the calls that the text was made of."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.text.parsers.events import CallDelta, Content
from ridgeline.text.parsers.tools.hermes import CLOSE, OPEN, HermesParser

Read = tuple[str, list[tuple[str | None, str]]]  # content, and name and arguments of each call


def read(pieces: list[str]) -> Read:
    """Everything joined, as a client joins it."""
    parser, content, calls = HermesParser(), "", dict[int, tuple[str | None, str]]()
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    for delta in deltas:
        if isinstance(delta, CallDelta):
            assert (delta.name is not None) == (delta.index not in calls), "a name comes once, and first"
            name, arguments = calls.get(delta.index, (delta.name, ""))
            calls[delta.index] = name, arguments + delta.arguments
        else:
            assert isinstance(delta, Content)
            assert delta.text, "nothing to say"
            content += delta.text
    assert list(calls) == list(range(len(calls)))
    assert parser.finish() == []
    return content, list(calls.values())


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


plain = st.text(st.sampled_from("ab <>/\\\"{}[],:\n'é😀tool_call"), max_size=30).filter(lambda text: OPEN not in text)
names = st.text(st.sampled_from('abc_-."\\é \n'), min_size=1, max_size=8)
words = st.one_of(plain, st.sampled_from([CLOSE, OPEN, '"}', "\\", '\\"']))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), words),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
calls = st.tuples(names, st.dictionaries(words, values, max_size=3), st.sampled_from([None, 1]), st.booleans())
PLACES = st.lists(st.integers(0, 10_000), max_size=12)


@settings(max_examples=300)
@given(before=plain, parts=st.lists(st.tuples(calls, st.sampled_from(["", "\n", " \n"])), max_size=3), places=PLACES)
def test_calls_are_those_that_were_written_wherever_the_text_is_cut(
    before: str, parts: list[Any], places: list[int]
) -> None:
    text, want = before, []
    for (name, arguments, indent, ascii_only), gap in parts:
        call = json.dumps({"name": name, "arguments": arguments}, indent=indent, ensure_ascii=ascii_only)
        text += f"{OPEN}\n{call}\n{CLOSE}{gap}"
        want.append((name, arguments))
    content, found = read(cut(text, places))
    assert content == before
    assert [(name, json.loads(arguments)) for name, arguments in found] == want


@settings(max_examples=500)
@given(
    parts=st.lists(
        st.one_of(
            plain,
            st.sampled_from(
                [OPEN, CLOSE, OPEN + '\n{"name": "f", "arguments": {', '"a": "', '{"name": "', "}", '"f", ']
            ),
        ),
        max_size=12,
    ),
    places=PLACES,
)
def test_what_is_broken_reads_the_same_however_it_is_cut(parts: list[str], places: list[int]) -> None:
    text = "".join(parts)
    whole = read([text])
    assert read(cut(text, places)) == whole
    assert read(list(text)) == whole
    if OPEN not in text:
        assert whole == (text, [])


def test_arguments_are_given_out_as_they_come() -> None:
    parser = HermesParser()
    assert parser.push('Well.\n<tool_call>\n{"name": "f", "argum') == [Content("Well.\n")]
    assert parser.push('ents": {"a') == [CallDelta(0, "f"), CallDelta(0, arguments='{"a')]
    assert parser.push('": [1, "}') == [CallDelta(0, arguments='": [1, "}')]
    assert parser.push('"]}}\n</tool_') == [CallDelta(0, arguments='"]}')]
    assert parser.push("call>\nDone.") == [Content("Done.")]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', ("", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
        ('<tool_call>{"arguments": {}, "name": "f"}', ("", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', ("", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f", "arguments": {"a": "x', ("", [("f", '{"a": "x')])),
        ('<tool_call>{"name": "f", "arguments": {"a": </tool_call>!', ("!", [("f", '{"a": ')])),
        (
            '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}</tool_call>',
            ("", [("f", "{}"), ("g", "{}")]),
        ),
        ("<tool_call>f(1)</tool_call> x", ("<tool_call>f(1)</tool_call> x", [])),
        (
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
        ),
        ('<tool_call>{"na', ('<tool_call>{"na', [])),
        ("a < b <tool", ("a < b <tool", [])),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", ("<tool_call>" + "[" * 100_000 + "</tool_call>", [])),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_other_forms_and_what_is_none(text: str, want: Read) -> None:
    assert read([text]) == want
    if len(text) < 1000:
        assert read(list(text)) == want

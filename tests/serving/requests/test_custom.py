"""Custom tools whose input follows a grammar: a model that would write another text is held to it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ridgeline.serving.grammars.grammar import MOST_CHARS
from ridgeline.serving.requests import custom as custom_tools
from tests import scripted_model
from tests.scripted_model import TAGS, call
from tests.serving.conftest import PATIENCE, Server, StartServer, engine_in_a_thread

DIGITS = {"type": "grammar", "syntax": "regex", "definition": "^[0-9]{3}$"}
LINES = {
    "type": "grammar",
    "syntax": "lark",
    "definition": 'start: line+ "end"\nline: ("a" | "b\\"") LF\n%import common.LF\n',
}
AHEAD = {"type": "grammar", "syntax": "regex", "definition": "(?=a)b"}
SAID = "I say it."
TURNS = [
    f"{SAID}\n{call('digits', input='no digits')}\nAnd more, {call('lines', input='none')}",
    call("digits", input="123") + "\nThen " + call("other", input="free"),
    call("lines", input='b"\na\nend') + "\nbehind",
]


@contextmanager
def serving(
    folder: Path, start_server: StartServer, turns: list[str], *, tags: Sequence[str] = (), **settings: Any
) -> Iterator[Server]:
    model = scripted_model.save(folder / "model", turns, tags=tags)
    with engine_in_a_thread(folder / "s", model=str(model)), start_server(model, folder / "s", **settings) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, start_server: StartServer) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("c"), start_server, TURNS) as running:
        yield running


def custom(name: str, form: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "custom", "name": name, "description": "d", **({"format": form} if form else {})}


TOOLS = [custom("digits", DIGITS), custom("lines", LINES), custom("other")]


def post(server: Server, turn: int = 0, **body: Any) -> httpx.Response:
    said = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}] * turn
    asked = {"input": [{"role": "user", "content": "x"}, *said], "tools": TOOLS, "max_output_tokens": 400} | body
    answer = httpx.post(f"{server.url}/v1/responses", json={"temperature": 0} | asked, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer


def inputs(answer: httpx.Response) -> list[tuple[str, str]]:
    return [(item["name"], item["input"]) for item in answer.json()["output"] if item["type"] == "custom_tool_call"]


def test_what_a_model_calls_of_itself_is_held_to_its_grammar(server: Server) -> None:
    held_to_digits(server)


def test_a_call_whose_tags_are_special_tokens_is_held_too(tmp_path: Path, start_server: StartServer) -> None:
    turn = f"{SAID}\n{call('digits', input='no digits')}"
    with serving(tmp_path, start_server, [turn], tags=TAGS) as running:
        held_to_digits(running)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["qwen3_coder", "pythonic", "openai"])
def test_other_forms_are_held_where_calls_are_forced(tmp_path: Path, start_server: StartServer, form: str) -> None:
    with serving(tmp_path, start_server, ["Hello to all."], tool_call_parser=form) as running:
        assert post(running).headers["ridgeline-ignored"] == "tools.format"
        forced = post(running, tool_choice={"type": "custom", "name": "digits"})
        assert "ridgeline-ignored" not in forced.headers
        [[name, text]] = inputs(forced)
    assert name == "digits"
    assert re.fullmatch("[0-9]{3}", text)


def test_what_is_thought_before_a_call_is_free(tmp_path: Path, start_server: StartServer) -> None:
    thought = f"I may name {call('digits', input='digits')}</think>\nNow: {call('digits', input='none at all')}"
    ends = ["</think>"]
    with serving(tmp_path, start_server, [thought], tags=ends, reasoning_parser="deepseek_r1") as running:
        answer = post(running)
    [reasoning, *_] = answer.json()["output"]
    assert reasoning["content"][0]["text"] == thought.partition(ends[0])[0]
    [[name, text], *_] = inputs(answer)
    assert (name, bool(re.fullmatch("[0-9]{3}", text))) == ("digits", True)


def held_to_digits(server: Server) -> None:
    answer = post(server)
    assert "ridgeline-ignored" not in answer.headers
    output = answer.json()["output"]
    assert output[0]["content"][0]["text"].startswith(SAID)  # what is no call is free
    [name, text], *_ = inputs(answer)
    assert name == "digits"
    assert re.fullmatch("[0-9]{3}", text)


def test_what_follows_the_grammar_is_written_as_the_model_would(server: Server) -> None:
    assert inputs(post(server, 1)) == [("digits", "123"), ("other", "free")]
    answer = post(server, 2)
    assert inputs(answer) == [("lines", 'b"\na\nend')]
    assert answer.json()["status"] == "completed"


# The model repeats lines until its tokens run out.
@pytest.mark.parametrize(("name", "pattern"), [("digits", "[0-9]{3}"), ("lines", '((a|b")\n)*(a|b"?|e|en|end)?')])
def test_a_forced_call_is_held_to_its_grammar(server: Server, name: str, pattern: str) -> None:
    [[called, text]] = inputs(post(server, tool_choice={"type": "custom", "name": name}))
    assert called == name
    assert re.fullmatch(pattern, text)


def test_a_grammar_that_cannot_be_held_is_named(server: Server) -> None:
    for tools in ([custom("digits", AHEAD)], [*TOOLS, custom("more", {"type": "grammar", "syntax": "ebnf"})]):
        answer = post(server, 1, tools=tools)
        assert answer.headers["ridgeline-ignored"] == "tools.format"
        assert inputs(answer)[0] == ("digits", "123")


def test_grammars_are_bounded_together_and_give_way_to_a_form_of_the_answer(server: Server) -> None:
    wide = DIGITS | {"definition": "(?:" + "|".join(f"{n:04}\\n" for n in range(700)) + ")"}
    answer = post(server, 1, tools=[*TOOLS, custom("wide", wide), custom("more", wide | {"definition": "a|" * 9000})])
    assert answer.headers["ridgeline-ignored"] == "tools.format"
    assert inputs(answer)[0] == ("digits", "123")
    form = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "integer"}}}
    answer = post(server, 1, text=form, max_output_tokens=3)
    assert answer.headers["ridgeline-ignored"] == "tools.format"


def test_a_pattern_that_is_too_long_is_left_out_before_any_work(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_tools, "ANCHORS", None)
    slashes = {"type": "grammar", "syntax": "regex", "definition": "/" * (MOST_CHARS + 1)}
    answer = post(server, tools=[custom("slashes", slashes)], max_output_tokens=1)
    assert answer.headers["ridgeline-ignored"] == "tools.format"

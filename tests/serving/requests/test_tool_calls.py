"""Tools as the real `openai` client sees them. The embedded model knows no tools: what it writes is held to a form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from ridgeline.serving.grammars.grammar import BYTES, check, compiled, vocabulary
from ridgeline.serving.http import answers
from ridgeline.serving.requests.bodies import ChatBody
from ridgeline.serving.requests.tools import calls_grammar
from ridgeline.text.parsers.choose import Forms, choose
from ridgeline.text.parsers.events import CallDelta, Content
from ridgeline.text.parsers.forms import Frame, ToolForm
from ridgeline.text.parsers.tools import TOOL_FORMS
from ridgeline.text.parsers.tools.hermes import CLOSE, OPEN
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.conftest import MODEL, Server, StartServer
from tests.serving.http.test_http import events

MESSAGES: Any = [{"role": "user", "content": "Is it raining?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", "São Paulo"]}},
}


def tool(name: str, **rest: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **rest}}


TOOLS: Any = [tool("weather", parameters=CITY), tool("time.now")]
ASKED: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 600, "temperature": 0.7, "seed": 3}


def fits(name: str, arguments: Any) -> bool:
    if name == "time.now":
        return arguments == {}
    return name == "weather" and arguments["city"] in ("Oslo", "São Paulo") and 1 <= arguments["days"] <= 9


def joined(server: Server, **asked: Any) -> tuple[str | None, list[tuple[str, str]], str | None]:
    """Content, calls and finish reason of a stream, joined by the client's own helper."""
    with server.client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    calls = choice.message.tool_calls or []
    assert ("tool_calls.function.arguments.done" in kinds) == bool(calls)
    assert len({call.id for call in calls}) == len(calls)
    return (
        choice.message.content or None,
        [(c.function.name, c.function.arguments) for c in calls],
        choice.finish_reason,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_well_formed_whole_and_streamed(
    server: Server, parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a parser, too: the form is then ours."""
    monkeypatch.setattr("ridgeline.serving.requests.tools.MOST_CALLS", 3)
    asked = ASKED | {"tool_choice": "required", "parallel_tool_calls": parallel}
    choice = server.client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls = choice.message.tool_calls or []
    assert len(calls) == (3 if parallel else 1), "the model never ends by itself"
    assert all(fits(call.function.name, json.loads(call.function.arguments)) for call in calls)
    assert all(call.type == "function" and call.id for call in calls)
    written = [(call.function.name, call.function.arguments) for call in calls]
    assert joined(server, **asked) == (None, written, "tool_calls")
    assert server.wait_idle()


@pytest.mark.parametrize("name", ["weather", "time.now"])
def test_a_named_call_is_the_one_that_is_made(server: Server, name: str) -> None:
    asked = ASKED | {"tool_choice": {"type": "function", "function": {"name": name}}, "n": 2}
    for choice in server.client.chat.completions.create(**asked).choices:
        [call] = choice.message.tool_calls or []
        assert call.function.name == name
        assert fits(name, json.loads(call.function.arguments))
        assert choice.finish_reason == "stop", "as OpenAI ends a call that the client named"


def test_the_form_of_messages_does_not_hinder_a_forced_call(server: Server) -> None:
    """There is no message then, so nothing goes against the form."""
    schema = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    asked = ASKED | {"tool_choice": "required", "parallel_tool_calls": False, "response_format": form}
    message = server.client.chat.completions.create(**asked).choices[0].message
    [call] = message.tool_calls or []
    assert message.content is None
    assert fits(call.function.name, json.loads(call.function.arguments))


@pytest.fixture(scope="module")
def hermes(start_server: StartServer) -> Iterator[Server]:
    with start_server(tool_call_parser="hermes") as running:
        yield running


def test_a_form_of_calls_that_is_not_known_is_told_of(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start, and in the header of each answer that may have calls in its text."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }} <odd_call>"
    with start_server(chat_template=template) as running:
        assert sum("in none of the known forms" in record.message for record in caplog.records) == 1
        function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
        turns = [{"role": "user", "content": "x"}]
        asked: dict[str, dict[str, Any]] = {
            "/chat/completions": {"messages": turns, "tools": [{"type": "function", "function": function}]},
            "/responses": {"input": "x", "max_output_tokens": 1, "tools": [{"type": "function", **function}]},
            "/messages": {"messages": turns, "tools": [{"name": "f", "input_schema": function["parameters"]}]},
        }
        for path, body in asked.items():
            body = {"model": MODEL, "max_tokens": 1, **body} if path != "/responses" else {"model": MODEL, **body}
            for more, told in (({}, True), ({"tools": []}, False)):
                answer = httpx.post(f"{running.url}/v1{path}", json=body | more, timeout=60)
                assert answer.status_code == 200, answer.text
                assert ("tool_calls" in answer.headers.get("ridgeline-ignored", "").split(", ")) == told, path


WEATHER, TIME_NOW = '{"city": "São Paulo", "days": 2}', "{}"
WRITTEN = (
    f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "time.now", "arguments": {TIME_NOW}}}\n</tool_call>'
)
CALLS = [("weather", WEATHER), ("time.now", TIME_NOW)]


def writes(text: str, **asked: Any) -> dict[str, Any]:
    """A request to which the model can only answer with the text."""
    return ASKED | {"extra_body": {"structured_outputs": {"choice": [text]}}} | asked


@pytest.mark.dealt
def test_calls_are_found_in_what_the_model_writes(hermes: Server) -> None:
    choice = hermes.client.chat.completions.create(**writes(WRITTEN)).choices[0]
    found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert (choice.message.content, found, choice.finish_reason) == ("Let me see.\n", CALLS, "tool_calls")
    assert joined(hermes, **writes(WRITTEN)) == ("Let me see.\n", CALLS, "tool_calls")
    first = hermes.client.chat.completions.create(**writes(WRITTEN, parallel_tool_calls=False)).choices[0].message
    assert [call.function.name for call in first.tool_calls or []] == ["weather"]


def test_a_call_that_is_cut_off_ends_for_its_length(hermes: Server) -> None:
    whole = hermes.client.chat.completions.create(**writes(WRITTEN, logprobs=True, temperature=0)).choices[0]
    assert whole.logprobs is not None
    lengths = [len(token.bytes or ()) for token in whole.logprobs.content or ()]
    asked = writes(WRITTEN, temperature=0, max_tokens=sum(end <= 70 for end in accumulate(lengths)))
    choice = hermes.client.chat.completions.create(**asked).choices[0]
    [call] = choice.message.tool_calls or []
    assert (choice.message.content, call.function.name, choice.finish_reason) == ("Let me see.\n", "weather", "length")
    assert 1 < len(call.function.arguments) < len(WEATHER)
    assert WEATHER.startswith(call.function.arguments)
    with pytest.raises(openai.LengthFinishReasonError):
        joined(hermes, **asked)


def test_text_without_calls_is_content(hermes: Server) -> None:
    for text in ("It <b>rains</b> <tool", "<tool_call>weather</tool_call>"):
        choice = hermes.client.chat.completions.create(**writes(text)).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
        assert joined(hermes, **writes(text)) == (text, [], "stop")


@pytest.mark.few(1)
@pytest.mark.parametrize("asked", [{"tool_choice": "none"}, {"tools": None}])
def test_nothing_is_looked_for_where_no_tool_may_be_called(hermes: Server, asked: dict[str, Any]) -> None:
    body = {name: value for name, value in writes(WRITTEN, **asked).items() if value is not None}
    choice = hermes.client.chat.completions.create(**body).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (WRITTEN, None)


def test_without_a_parser_calls_stay_text(server: Server) -> None:
    choice = server.client.chat.completions.create(**writes(WRITTEN)).choices[0]
    assert (choice.message.content, choice.finish_reason) == (WRITTEN, "stop")


def test_answers_with_calls_are_what_the_document_says(hermes: Server) -> None:
    asked = writes(WRITTEN, logprobs=True, return_token_ids=True)
    asked |= asked.pop("extra_body")
    for stream in (False, True):
        response = httpx.post(f"{hermes.url}/v1/chat/completions", json=asked | {"stream": stream}, timeout=120)
        assert response.status_code == 200, response.text
        if not stream:
            [choice] = msgspec.json.decode(response.content, type=answers.Chat).choices
            assert choice.logprobs is not None
            tokens = [entry.token for entry in choice.logprobs.content]
        else:
            chunks = [msgspec.json.decode(event, type=answers.ChatChunk) for event in events(response)[:-1]]
            told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
            assert [entry.token for each in told if each for entry in each.content] == tokens


def test_a_calls_answer_goes_back_into_the_conversation(hermes: Server) -> None:
    message = hermes.client.chat.completions.create(**writes(WRITTEN)).choices[0].message
    said: Any = [*MESSAGES, message.model_dump(exclude_none=True)]
    for call in message.tool_calls or []:
        said.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
    answer = hermes.client.chat.completions.create(**ASKED | {"messages": said, "max_tokens": 4})
    assert answer.choices[0].finish_reason in ("stop", "length")


REQUIRED = {"tool_choice": "required"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (REQUIRED, "tool_choice"),
        (REQUIRED | {"tools": []}, "tool_choice"),
        (REQUIRED | {"tools": [{}]}, "tools.0.function"),
        (REQUIRED | {"tools": [tool("ok"), tool("two words")]}, "tools.1.function.name"),
        (REQUIRED | {"tools": [tool("f", parameters=[])]}, "tools.0.function.parameters"),
        (REQUIRED | {"tools": [tool("f", parameters={"type": "array"})]}, "tools.0.function.parameters"),
        (REQUIRED | {"tools": [tool("f", parameters={"properties": {"a": {"type": "odd"}}})]}, "tools"),
        (REQUIRED | {"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_what_cannot_be_forced_is_named(server: Server, body: dict[str, Any], param: str) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8} | body
    response = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=120)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param, response.text


def test_a_schema_that_nests_too_deeply_is_refused(server: Server) -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"properties": {"a": deep}}
    asked = REQUIRED | {"model": MODEL, "messages": MESSAGES, "tools": [tool("f", parameters=deep)]}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=120).json()["error"]
    assert error["param"] == "tools.0.function.parameters"
    assert "deep" in error["message"]


@pytest.mark.parametrize("kind", ["none", "plain", "special"])
def test_a_model_writes_the_tags_with_the_tokens_it_was_taught(kind: str, tmp_path: Path) -> None:
    """Where it has such tokens. A reader sees them even if they are special."""
    backend = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    added = [tokenizers.AddedToken(tag, special=kind == "special") for tag in (OPEN, CLOSE)]
    if kind != "none":
        backend.add_special_tokens(added) if kind == "special" else backend.add_tokens(added)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    body = ChatBody(messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    grammar = calls_grammar(body, tokenizer, Forms())
    assert grammar is not None
    check(grammar, vocabulary(tokenizer.added, tokenizer.vocab_size))
    text = f"{OPEN}\n{json.dumps({'name': 'weather', 'arguments': json.loads(WEATHER)}, ensure_ascii=False)}\n{CLOSE}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    spelled = [i for part in ("<", text[1:-12], "<", "/tool_call>") for i in tokenizer.encode(part, False)]
    assert (ids[0] == backend.token_to_id(OPEN)) == (kind != "none")
    for tokens, fits_well in ((ids, True), (spelled, kind == "none")):
        matcher = LLMatcher(LLTokenizer(backend.to_str()), compiled(grammar), log_level=0)
        accepted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert accepted == fits_well, tokens


FRAMED: list[tuple[ToolForm, Frame, tuple[object, ...]]]
# Forms that write arguments one by one are in test_forced_forms.py.
FRAMED = [(f, f.frame, (f.newer or ())[:1]) for f in TOOL_FORMS if f.frame is not None and not f.frame.argument]
FRAMED += [(form, form.newer[1], ()) for form in TOOL_FORMS if form.newer is not None]


@pytest.mark.parametrize(("form", "frame", "absent"), FRAMED, ids=lambda part: getattr(part, "name", ""))
def test_forced_calls_have_the_models_own_form(form: ToolForm, frame: Frame, absent: tuple[str, ...]) -> None:
    """What the grammar accepts is what the reader of the same form reads, with tags that are tokens of the model."""
    backend = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    backend.add_special_tokens([tokenizers.AddedToken(tag, special=True) for tag in form.tags if tag not in absent])
    tokenizer = Tokenizer(backend, {})
    forms = choose(form.name, "none", [], ())
    body = ChatBody(messages=MESSAGES, tools=TOOLS, tool_choice="required")
    grammar = calls_grammar(body, tokenizer, forms)
    assert grammar is not None
    check(grammar, vocabulary(tokenizer.added, tokenizer.vocab_size))
    calls = [
        frame.call.replace("$NAME", name).replace("$QUOTED", f'"{name}"').replace("$ARGS", arguments)
        for name, arguments in CALLS
    ]
    written = [call.replace("$INDEX", str(index)) for index, call in enumerate(calls)]
    text = frame.start + frame.between.join(written) + frame.end
    ids = tokenizer.encode(text, add_special_tokens=False)
    matcher = LLMatcher(LLTokenizer(backend.to_str()), compiled(grammar), log_level=0)
    assert matcher.try_consume_tokens(ids) == len(ids), (text, tokenizer.decode(ids, False))
    assert matcher.is_accepting()
    for end in (len(text), len(text) - 3, 9, 3):
        reader = forms.reader("Hi", {}, calls=True, forced=True)
        events = reader.read(text[:end], ended=True)
        found = {event.index: event.name for event in events if isinstance(event, CallDelta) and event.name}
        assert len(found) == len([event for event in events if isinstance(event, CallDelta) and event.name])
        assert not any(isinstance(event, Content) for event in events), "nothing of the form leaks"
        if end == len(text):
            joined = ["".join(e.arguments for e in events if isinstance(e, CallDelta) and e.index == n) for n in found]
            assert list(zip(found.values(), map(str.strip, joined), strict=True)) == CALLS


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("time.now")]}}


def test_only_allowed_tools_are_called(server: Server) -> None:
    asked = ASKED | {"tool_choice": ALLOWED, "parallel_tool_calls": False}
    choice = server.client.chat.completions.create(**asked).choices[0]
    assert [call.function.name for call in choice.message.tool_calls or []] == ["time.now"]
    assert choice.finish_reason == "tool_calls"


def test_a_forced_call_that_is_cut_off_leaves_no_text(server: Server) -> None:
    for most in (1, 4, 12):
        asked = ASKED | {"tool_choice": "required", "max_tokens": most}
        choice = server.client.chat.completions.create(**asked).choices[0]
        assert (choice.message.content or "", choice.finish_reason) == ("", "length")


def test_schemas_of_tools_are_put_into_words_that_can_be_forced() -> None:
    """An unknown format is an annotation, a number that may be any has few digits, and arguments that are not named are
    not made up."""
    parameters = {
        "type": "object",
        "properties": {"phone": {"type": "string", "format": "phone"}, "count": {"type": "integer"}},
        "required": ["phone", "count"],
    }
    offered = [{"type": "function", "function": {"name": "call", "parameters": parameters}}]
    body = ChatBody(messages=MESSAGES, tools=offered, tool_choice="required", parallel_tool_calls=False)
    grammar = calls_grammar(body, Tokenizer.from_folder(EMBEDDED_MODEL), Forms())
    assert grammar is not None
    start = '<tool_call>\n{"name": "call", "arguments": '
    right = {"phone": "+47", "count": 3}
    for arguments, fits in ((right, True), (right | {"count": 10**16}, False), (right | {"other": 1}, False)):
        matcher = LLMatcher(BYTES, compiled(grammar), log_level=0)
        text = f"{start}{json.dumps(arguments)}}}\n</tool_call>".encode()
        assert (matcher.try_consume_tokens(list(text)) == len(text)) == fits

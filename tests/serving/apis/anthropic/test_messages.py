"""/v1/messages as Anthropic's own client sees it, with its types as the oracle of every event, and against what chats
answer."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import httpx
import msgspec
import pydantic
import pytest

from ridgeline.serving.http import answers
from tests.serving.apis.openai.test_responses import client_at as openai_at
from tests.serving.clients.asked import needing
from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer
from tests.serving.requests.test_reasoning import ANSWER, BUDGET
from tests.serving.requests.test_tool_calls import CITY, fits

WIRE = httpx.Client(timeout=PATIENCE, verify=False)
if find_spec("anthropic"):
    import anthropic
by_client = needing("anthropic")

TEXT = "def add(a, b):"
USER: Any = {"role": "user", "content": TEXT}
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_tokens": 12, "messages": [USER]}
TOOLS: Any = [{"name": "weather", "description": "Tells it.", "input_schema": CITY}]
SAMPLED: Any = {"model": MODEL, "temperature": 0.7, "max_tokens": 500, "seed": 4}
THINKING: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "temperature": 0.7,
    "max_tokens": 60,
    "thinking": {"type": "enabled", "budget_tokens": BUDGET},
    "seed": 5,
    "structured_outputs": {"choice": [ANSWER]},
}


@pytest.fixture(scope="module")
def thinker(start_server: StartServer) -> Iterator[Server]:
    with start_server(reasoning_parser="deepseek_r1", tool_call_parser="hermes") as running:
        yield running


def client(server: Server, key: str = "none") -> Any:
    return client_at(server.url, key)


@cache
def client_at(url: str, key: str) -> Any:
    """Making one takes longer than most requests here."""
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE)


def split(call: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the client, which has no names for some fields of the API, as older ones have."""
    names = inspect.signature(call).parameters
    own = {name: value for name, value in fields.items() if name in names}
    return own | {"extra_body": {name: value for name, value in fields.items() if name not in names}}


def create(server: Server, key: str = "none", **fields: Any) -> Any:
    call = client(server, key).messages.create
    return call(**split(call, fields))


def stream(server: Server, **fields: Any) -> Any:
    call = client(server).messages.stream
    return call(**split(call, fields))


def post(server: Server, path: str = "", **body: Any) -> httpx.Response:
    return WIRE.post(f"{server.url}/v1/messages{path}", json=body)


def chat(server: Server, *messages: Any, **asked: Any) -> Any:
    asked = {"temperature": 0, "max_tokens": 12} | asked
    return openai_at(server.url).chat.completions.create(model=MODEL, messages=list(messages), **asked)


def refused(server: Server, **body: Any) -> str:
    """The message of a failure, which has the shape that Anthropic's clients know."""
    answer = post(server, **GREEDY | body)
    assert answer.status_code == 400, answer.text
    told = msgspec.json.decode(answer.content, type=answers.AnthropicsErrorAnswer)
    assert told.error.type == "invalid_request_error"
    assert told.request_id == answer.headers["request-id"] == answer.headers["x-request-id"]
    return told.error.message


def raw_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each of which Anthropic's own types accept."""
    kinds = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            kinds.validate_python(event)
        found.append(event)
    return found


@by_client
def test_an_answer_is_the_chats_whole_and_streamed(server: Server) -> None:
    want = chat(server, {"role": "system", "content": "Be\nbrief."}, USER)
    system = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in ("Be", "brief.")]
    answer = create(server, **GREEDY, system=system)
    [block] = answer.content
    assert (block.type, block.text) == ("text", want.choices[0].message.content)
    assert (answer.stop_reason, answer.stop_sequence, answer.model) == ("max_tokens", None, MODEL)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == want.usage.prompt_tokens
    assert answer.usage.output_tokens == 12
    anthropic.types.Message.model_validate(answer.to_dict(), strict=False)
    msgspec.convert(answer.to_dict(), type=answers.MessageAnswer)
    with stream(server, **GREEDY, system=system) as told:
        assert "".join(told.text_stream) == block.text
        final = told.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
    told = raw_events(post(server, **GREEDY, stream=True))
    kinds = [event["type"] for event in told]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert told[0]["message"]["content"] == []


@by_client
def test_stop_sequences_are_named_and_the_async_client_reads_them(server: Server) -> None:
    async def ask() -> Any:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="x", max_retries=0) as client:
            asked = GREEDY | {"max_tokens": 60, "stop_sequences": ["never", "Parameters"]}
            async with client.messages.stream(**split(client.messages.stream, asked)) as told:
                return await told.get_final_message()

    answer = asyncio.run(ask())
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Parameters")
    assert "Parameters" not in answer.content[0].text
    assert server.wait_idle()


@by_client
def test_a_conversation_is_the_chats(server: Server) -> None:
    turns: Any = [USER, {"role": "assistant", "content": "return a + b"}]
    turns.append({"role": "user", "content": [{"type": "text", "text": text} for text in ("And", "then?")]})
    want = chat(server, *turns[:2], {"role": "user", "content": "And\nthen?"})
    answer = create(server, **GREEDY | {"messages": turns})
    assert answer.content[0].text == want.choices[0].message.content
    counted = client(server).messages.count_tokens(model=MODEL, messages=turns)
    assert counted.input_tokens == want.usage.prompt_tokens
    prefilled = create(server, **GREEDY | {"messages": turns[:2]})
    open_end = {"continue_final_message": True, "add_generation_prompt": False}
    want = chat(server, *turns[:2], extra_body=open_end)
    assert prefilled.content[0].text == want.choices[0].message.content


@by_client
def test_what_has_no_room_ends_as_such(server: Server) -> None:
    long = GREEDY | {"max_tokens": 100_000, "messages": [{"role": "user", "content": "word " * 1015}]}
    answer = create(server, **long, ignore_eos=True)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert answer.usage.output_tokens > 0


# ---- tools and thinking -------------------------------------------------------------------------------------------


@by_client
def test_tools_are_used_whole_and_streamed_and_their_results_go_back(server: Server) -> None:
    asked = SAMPLED | {"messages": [{"role": "user", "content": "Is it raining?"}], "tools": TOOLS}
    asked |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    answer = create(server, **asked)
    [use] = answer.content
    assert (use.type, answer.stop_reason) == ("tool_use", "tool_use")
    assert fits(use.name, use.input)
    with stream(server, **asked) as told:
        kinds = [event.type for event in told]
        [streamed] = told.get_final_message().content
    assert (streamed.name, streamed.input) == (use.name, use.input)
    assert "input_json" in kinds
    raw_events(post(server, **asked, stream=True))
    one = create(server, **asked | {"tool_choice": {"type": "tool", "name": "weather"}})
    assert [block.name for block in one.content] == ["weather"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "It rains."}]}
    turns = [*asked["messages"], {"role": "assistant", "content": [use.to_dict()]}]
    turns.append({"role": "user", "content": [result, {"type": "text", "text": "So?"}]})
    call = {"id": use.id, "type": "function"}
    call["function"] = {"name": use.name, "arguments": json.dumps(use.input)}
    by_hand = [
        asked["messages"][0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": use.id, "content": "It rains."},
        {"role": "user", "content": "So?"},
    ]
    again = create(server, **GREEDY | {"messages": turns}, tools=TOOLS)
    functions = [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}]
    assert again.content[0].text == chat(server, *by_hand, tools=functions).choices[0].message.content


def test_a_result_names_the_tools_that_were_found_and_what_was_left_out(server: Server) -> None:
    """A conversation is sent whole each time, so an image that a tool returned would end it."""
    found = [{"type": "tool_reference", "tool_name": name} for name in ("Read", "Write")]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [*found, {"type": "image", "source": {}}]}
    use = {"type": "tool_use", "id": "a", "name": "ToolSearch", "input": {}}
    turns = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": [{"type": "server_tool_use", "id": "b", "name": "web_search"}, use]},
        {"role": "user", "content": [result]},
    ]
    answer = post(server, "/render", model=MODEL, max_tokens=1, messages=turns)
    assert answer.json()["prompt"].endswith("Read\nWrite\n[image: left out, because the model reads text alone]")
    assert set(answer.headers["ridgeline-ignored"].split(", ")) == {"server_tool_use", "tool_result.image"}


@by_client
def test_a_call_that_is_cut_off_has_what_is_there(server: Server) -> None:
    asked = SAMPLED | {"messages": [USER], "tools": TOOLS, "tool_choice": {"type": "any"}}
    found = set()
    for most in (8, 17, 30):
        answer = create(server, **asked | {"max_tokens": most})
        assert answer.stop_reason == "max_tokens"
        found |= {block.type for block in answer.content}
        assert all(isinstance(block.input, dict) for block in answer.content)
    assert found == {"tool_use"}


@by_client
def test_thinking_is_a_block_of_its_own(thinker: Server) -> None:
    answer = create(thinker, **THINKING)
    thought, text = answer.content
    assert (thought.type, text.type, text.text, answer.stop_reason) == ("thinking", "text", ANSWER, "end_turn")
    assert thought.thinking
    assert answer.usage.output_tokens_details.thinking_tokens == BUDGET
    assert thought.signature
    with stream(thinker, **THINKING) as told:
        pieces = [event.thinking for event in told if event.type == "thinking"]
        final = told.get_final_message()
    assert "".join(pieces) == thought.thinking
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in answer.content]
    raw_events(post(thinker, **THINKING, stream=True))
    turns = [*THINKING["messages"], {"role": "assistant", "content": [b.to_dict() for b in answer.content]}]
    turns.append({"role": "user", "content": "Why?"})
    assert create(thinker, **THINKING | {"messages": turns}).content[-1].text == ANSWER
    other = create(thinker, **THINKING | {"thinking": {"type": "adaptive"}, "max_tokens": 8})
    assert [block.type for block in other.content] == ["thinking"]


@by_client
def test_the_form_of_the_text_is_kept_to(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    answer = create(server, **SAMPLED, messages=[USER], output_config={"format": form})
    assert json.loads(answer.content[0].text)["a"] in (1, 2)


# ---- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages are empty"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "reads text alone"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 3}]}]}, "input must be"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "maximum context length"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "custom"}]}, "tools.0.name"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "tool"}}, "needs name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"temprature": 1}, "did you mean temperature"),
        ({"top_p": 7}, "top_p"),
    ],
)
def test_a_mistake_is_told_in_anthropics_shape(server: Server, fields: dict[str, Any], words: str) -> None:
    assert words in refused(server, **fields)


@by_client
def test_failures_have_the_classes_of_anthropics_client(start_server: StartServer) -> None:
    with start_server(api_key=("right",), request_timeout=0.8) as running:
        assert create(running, "right", **GREEDY | {"max_tokens": 1}).content
        with pytest.raises(anthropic.AuthenticationError):
            create(running, "wrong", **GREEDY)
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            create(running, "right", **GREEDY | {"model": "claude"})
        with pytest.raises(anthropic.BadRequestError, match="anthropic-version is 2023-06-01"):
            create(running, "right", **GREEDY, extra_headers={"anthropic-version": "2023-01-01"})
        long = GREEDY | {"max_tokens": 1900, "ignore_eos": True}
        with pytest.raises(anthropic.APIStatusError) as failure:
            create(running, "right", **long)
        assert failure.value.status_code == 504
        with pytest.raises(anthropic.APIStatusError, match="timeout_error"):
            list(create(running, "right", **long, stream=True))


def test_who_leaves_ends_its_request(server: Server) -> None:
    long = GREEDY | {"max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/messages", json=long, timeout=PATIENCE) as told:
        next(told.iter_bytes())
    assert server.wait_idle()


def test_what_changes_nothing_is_named(server: Server) -> None:
    """And what Claude Code sends is taken."""
    system = [{"type": "text", "text": "x-anthropic-billing-header: abc"}, {"type": "text", "text": "Be brief."}]
    turns = [{"role": "ctx", "content": TEXT}]
    tools = [TOOLS[0] | {"cache_control": {"type": "ephemeral"}, "strict": True}]
    fields = {"metadata": {"user_id": "x"}, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    answer = post(server, "?beta=true", **GREEDY | {"messages": turns}, system=system, tools=tools, **fields)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["ridgeline-ignored"].split(", ")) == {
        "metadata",
        "thinking",
        "tools.strict",
        "x-anthropic-billing-header",
    }
    want = post(server, **GREEDY, system="Be brief.", tools=TOOLS)
    assert answer.json()["content"][0]["text"] == want.json()["content"][0]["text"]
    later = {"anthropic-version": "2031-01-01"}
    answer = WIRE.post(f"{server.url}/v1/messages", json=GREEDY, headers=later)
    assert answer.headers["ridgeline-ignored"] == "anthropic-version"
    redacted = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    answer = post(server, **GREEDY | {"messages": [USER, redacted, USER]})
    assert answer.headers["ridgeline-ignored"] == "redacted_thinking"

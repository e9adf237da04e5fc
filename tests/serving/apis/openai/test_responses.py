"""/v1/responses as the real `openai` client sees it, with its own types as the oracle of every event, and against what
chats answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import httpx
import msgspec
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from ridgeline.serving.http import answers
from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer
from tests.serving.http.test_http import events
from tests.serving.requests.test_reasoning import ANSWER, BUDGET
from tests.serving.requests.test_tool_calls import CITY, fits

WIRE = httpx.Client(timeout=PATIENCE, verify=False)
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
TEXT = "def add(a, b):"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": CITY, "strict": None}]
SAMPLED: Any = {"model": MODEL, "temperature": 0.7, "max_output_tokens": 400, "extra_body": {"seed": 4}}
THINKING: Any = {
    "model": MODEL,
    "temperature": 0.7,
    "max_output_tokens": 60,
    "extra_body": {"seed": 5, "thinking_token_budget": BUDGET, "structured_outputs": {"choice": [ANSWER]}},
}


@pytest.fixture(scope="module")
def thinker(start_server: StartServer) -> Iterator[Server]:
    with start_server(reasoning_parser="deepseek_r1", tool_call_parser="hermes") as running:
        yield running


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def chat(server: Server, *messages: Any, **asked: Any) -> Any:
    asked = {"temperature": 0, "max_tokens": 12} | asked
    return client(server).chat.completions.create(model=MODEL, messages=list(messages), **asked)


def post(server: Server, path: str = "", key: str | None = None, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return WIRE.post(f"{server.url}/v1/responses{path}", json=body, headers=headers)


@cache
def client_at(url: str) -> openai.OpenAI:
    """Making one takes longer than most requests here."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def client(server: Server) -> openai.OpenAI:
    return client_at(server.url)


def refused(server: Server, **body: Any) -> tuple[str, str]:
    answer = post(server, **{"model": MODEL, "input": "x", "max_output_tokens": 2} | body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"], answer.json()["error"]["message"]


def raw_events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each of which openai's own types accept, numbered from 0."""
    found = []
    for number, block in enumerate(response.text.strip().split("\n\n")):
        name, data = block.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event, strict=False)
        found.append(event)
    return found


def plain(response: Any) -> dict[str, Any]:
    """An answer without what is new in each, and without what the client's helper adds."""
    given = response.to_dict() if isinstance(response, Response) else response
    text = json.dumps(given).replace(given["id"].removeprefix("resp_"), "key")
    told: dict[str, Any] = json.loads(text, object_hook=lambda part: {k: part[k] for k in part if k != "parsed"})
    usage = told["usage"] and {name: told["usage"][name] for name in ("input_tokens", "output_tokens")}
    return told | {"created_at": 0, "completed_at": 0, "usage": usage}


# ---- texts --------------------------------------------------------------------------------------------------------


def test_an_answer_is_the_chats_whole_and_streamed(server: Server) -> None:
    want = chat(server, said("system", "Be brief."), said("user", TEXT))
    asked = GREEDY | {"input": TEXT, "instructions": "Be brief.", "metadata": {"a": "b"}}
    answer = client(server).responses.create(**asked)
    assert answer.output_text == want.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.input_tokens == want.usage.prompt_tokens
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (12, want.usage.total_tokens)
    assert (answer.metadata, answer.instructions, answer.store) == ({"a": "b"}, "Be brief.", True)
    Response.model_validate(answer.to_dict(), strict=False)
    msgspec.convert(answer.to_dict(), type=answers.ResponseAnswer, strict=False)
    told = raw_events(post(server, **asked, stream=True))
    kinds = [event["type"] for event in told]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[:4] == [f"response.{name}" for name in begin]
    assert kinds[-4:] == [f"response.{name}" for name in end]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert plain(told[-1]["response"]) == plain(answer)
    assert told[0]["response"]["status"] == told[1]["response"]["status"] == "in_progress"
    assert "".join(event["delta"] for event in told[4:-4]) == answer.output_text


def test_a_stop_string_completes_an_answer_and_the_clients_read_it(server: Server) -> None:
    asked: Any = GREEDY | {"input": TEXT, "max_output_tokens": 60, "extra_body": {"stop": ["\n"]}}

    async def ask() -> tuple[Response, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            events = [event.type async for event in await client.responses.create(**asked, stream=True)]
            return await client.responses.create(**asked), events

    answer, kinds = asyncio.run(ask())
    assert (answer.status, kinds[-1]) == ("completed", "response.completed")
    assert answer.incomplete_details is None
    with client(server).responses.stream(**asked) as stream:
        assert plain(stream.until_done().get_final_response()) == plain(answer)
    assert "\n" not in answer.output_text
    assert server.wait_idle()


def test_the_form_of_the_text_is_kept_to(server: Server) -> None:
    class Weather(pydantic.BaseModel):
        city: Literal["Oslo", "Bergen"]
        days: Literal[1, 2]

    answer = client(server).responses.parse(**SAMPLED, input="Weather?", text_format=Weather)
    assert isinstance(answer.output_parsed, Weather)
    assert answer.text.format.type == "json_schema"
    param, _ = refused(server, text={"format": {"type": "json_schema", "name": "x"}})
    assert param == "text.format.schema"
    param, _ = refused(server, text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}})
    assert param.startswith("text.format")


def test_logprobs_are_those_of_the_chat(server: Server) -> None:
    want = chat(server, said("user", TEXT), logprobs=True, top_logprobs=2).choices[0].logprobs.content
    asked = GREEDY | {"input": TEXT, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = client(server).responses.create(**asked)
    found = answer.output[0].content[0].logprobs
    assert [each.token for each in found] == [each.token for each in want]
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in want], abs=1e-4)
    assert [len(each.top_logprobs) for each in found] == [2] * len(found)
    told = raw_events(post(server, **asked, stream=True))
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    joined = [each for event in deltas for each in event["logprobs"]]
    assert [each["token"] for each in joined] == [each.token for each in want]
    stopped = client(server).responses.create(**asked | {"max_output_tokens": 40}, extra_body={"stop": [" ", "\n "]})
    [part] = stopped.output[0].content
    assert "".join(each.token for each in part.logprobs).startswith(part.text)
    assert refused(server, top_logprobs=2)[0] == "top_logprobs"


# ---- conversations ------------------------------------------------------------------------------------------------


def test_an_answer_is_gone_on_from(server: Server) -> None:
    first = client(server).responses.create(**GREEDY, input=TEXT, instructions="Be brief.")
    second = client(server).responses.create(**GREEDY, input="And then?", previous_response_id=first.id)
    turns = [said("user", TEXT), said("assistant", first.output_text), said("user", "And then?")]
    want = chat(server, *turns)  # instructions are not carried over
    assert (second.output_text, second.previous_response_id) == (want.choices[0].message.content, first.id)
    assert second.usage.input_tokens == want.usage.prompt_tokens
    third = client(server).responses.create(**GREEDY, input=[said("user", "So?")], previous_response_id=second.id)
    by_hand = [*turns, said("assistant", second.output_text), said("user", "So?")]
    assert third.output_text == chat(server, *by_hand).choices[0].message.content
    assert client(server).responses.create(**GREEDY, input=by_hand).output_text == third.output_text
    counted = client(server).responses.input_tokens.count(model=MODEL, input="So?", previous_response_id=second.id)
    assert counted.input_tokens == third.usage.input_tokens
    listed = client(server).responses.input_items.list(third.id, order="asc").data
    assert [item.role for item in listed] == ["user", "assistant"] * 2 + ["user"]
    newest = client(server).responses.input_items.list(third.id, limit=2)
    assert [item.id for item in newest.data] == [item.id for item in reversed(listed)][:2]
    assert newest.has_more
    rest = client(server).responses.input_items.list(third.id, after=newest.data[-1].id)
    assert [item.id for item in rest.data] == [item.id for item in reversed(listed)][2:]
    references = [{"type": "item_reference", "id": item.id} for item in listed]
    assert client(server).responses.create(**GREEDY, input=references).output_text == third.output_text
    assert refused(server, input=[{"type": "item_reference", "id": listed[0].id + "0"}])[0] == "input.0.id"
    assert refused(server, previous_response_id="resp_1")[0] == "previous_response_id"


def test_items_that_are_referred_to_are_bounded_as_a_body_is(start_server: StartServer) -> None:
    """One item of a tenth of a body, two hundred times over."""
    with start_server(max_body_bytes=1 << 16) as running:
        told = [said("user", "word " * 1200), said("user", "Hi")]
        answer = client(running).responses.create(**GREEDY, input=told, truncation="auto")
        long = WIRE.get(f"{running.url}/v1/responses/{answer.id}/input_items").json()["data"][-1]["id"]
        again = [{"type": "item_reference", "id": long}]
        assert client(running).responses.create(**GREEDY, input=[*again, *told[1:]], truncation="auto").status
        param, message = refused(running, input=[*again * 200, *told[1:]], truncation="auto")
        assert (param, "65536 bytes" in message) == ("input", True)


def test_answers_are_kept_until_they_are_deleted(server: Server) -> None:
    answer = client(server).responses.create(**GREEDY, input=TEXT)
    assert client(server).responses.retrieve(answer.id).to_dict() == answer.to_dict()
    assert WIRE.delete(f"{server.url}/v1/responses/{answer.id}").json() == {
        "id": answer.id,
        "object": "response",
        "deleted": True,
    }
    unkept = client(server).responses.create(**GREEDY, input=TEXT, store=False)
    assert not unkept.store
    for name in (answer.id, unkept.id, "resp_x"):
        with pytest.raises(openai.NotFoundError, match="is kept here"):
            client(server).responses.retrieve(name)
    with pytest.raises(openai.BadRequestError, match="not made in the background"):
        client(server).responses.cancel(client(server).responses.create(**GREEDY, input=TEXT).id)


def test_an_answer_is_seen_by_its_own_client_and_makes_room_for_newer_ones(start_server: StartServer) -> None:
    with start_server(api_key=("one", "two"), max_stored_responses=2) as running:
        asked = {"input": "x", "max_output_tokens": 1}
        names = [post(running, key="one", **asked).json()["id"] for _ in range(3)]

        def status(name: str, key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return WIRE.get(f"{running.url}/v1/responses/{name}", headers=headers).status_code

        assert [status(name, "one") for name in names] == [404, 200, 200]
        assert [status(name, "two") for name in names] == [404] * 3
        assert post(running, key="two", **asked, previous_response_id=names[2]).status_code == 400
        assert post(running, f"/{names[2]}/cancel", key="two").status_code == 404
    with start_server(max_stored_responses=0) as running:
        answer = post(running, **asked, store=True)
        assert (answer.json()["store"], answer.headers["ridgeline-ignored"]) == (False, "store")
        assert refused(running, background=True)[0] == "background"


# ---- tools and reasoning ------------------------------------------------------------------------------------------


def test_calls_come_whole_and_streamed_and_their_outputs_go_back(server: Server) -> None:
    asked = SAMPLED | {"input": "Is it raining?", "tools": TOOLS, "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False}
    answer = client(server).responses.create(**asked)
    [call] = answer.output
    assert (call.type, call.status, answer.status) == ("function_call", "completed", "completed")
    assert fits(call.name, json.loads(call.arguments))
    with client(server).responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        [streamed] = stream.get_final_response().output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    assert kinds.count("response.function_call_arguments.done") == 1
    raw_events(post(server, **(asked | {"extra_body": None}), seed=4, stream=True))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    after = client(server).responses.create(**GREEDY, input=[output], previous_response_id=answer.id, tools=TOOLS)
    body = {"input": [said("user", "Is it raining?"), call.to_dict(), output], "tools": TOOLS, **GREEDY}
    assert client(server).responses.create(**body).output_text == after.output_text
    told = post(server, **body | {"tools": [TOOLS[0] | {"strict": True}]})
    assert told.headers["ridgeline-ignored"] == "tools.strict"
    cut_off = [said("user", "x"), call.to_dict() | {"arguments": "{"}, output]
    assert post(server, model=MODEL, input=cut_off, max_output_tokens=1).status_code == 200


AGENTS: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "local_shell"},
    {"type": "namespace", "name": "mcp__x", "description": "d", "tools": TOOLS},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}},
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("choice", "kind", "known"),
    [
        ({"type": "function", "namespace": "mcp__x", "name": "weather"}, "function_call", {"namespace": "mcp__x"}),
        ({"type": "custom", "name": "patch"}, "custom_tool_call", {}),
    ],
)
def test_an_agents_tools_are_called_as_it_knows_them(
    server: Server, choice: dict[str, Any], kind: str, known: dict[str, Any]
) -> None:
    """And what was called goes back as it came. What nobody here can run is left out by name."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "tools": AGENTS,
        "client_metadata": {"a": "1"},
        "text": {"verbosity": "low"},
    }
    asked |= {"temperature": 0.7, "seed": 4, "max_output_tokens": 300, "input": TEXT, "tool_choice": choice}
    answer = post(server, **asked)
    told = answer.json()
    [call] = told["output"]
    assert (call["type"], call["name"]) == (kind, choice["name"])
    assert {name: call[name] for name in known} == known
    left_out = {"tools.web_search", "tools.local_shell", "client_metadata", "text.verbosity"}
    assert set(answer.headers["ridgeline-ignored"].split(", ")) == left_out
    streamed = raw_events(post(server, **asked, stream=True))
    [written] = streamed[-1]["response"]["output"]
    assert written | {"id": call["id"], "call_id": call["call_id"]} == call
    if kind == "custom_tool_call":
        [done] = [event for event in streamed if event["type"] == "response.custom_tool_call_input.done"]
        assert done["input"] == call["input"] == "a"  # the only text of its grammar
    result = {"type": f"{kind}_output", "call_id": call["call_id"], "output": "done"}
    items = [said("user", TEXT), {"type": "web_search_call", "id": "w"}, call, result]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}  # of which none is there
    referred = [said("user", TEXT), {"type": "item_reference", "id": call["id"]}, result]
    there = post(server, **asked | {"input": referred, "tool_choice": allowed, "max_output_tokens": 2})
    assert there.status_code == 200, there.text
    again = post(server, **asked | {"input": items, "tool_choice": "none", "max_output_tokens": 2})
    assert again.status_code == 200, again.text
    assert "input.web_search_call" in again.headers["ridgeline-ignored"]


SEARCH = {"type": "object", "properties": {"query": {"enum": ["rain", "snow"]}}, "required": ["query"]}


def test_a_search_for_tools_runs_at_the_client_and_adds_what_it_found(server: Server) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 60}
    asked["tools"] = [{"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": SEARCH}]
    choice = {"type": "function", "name": "tool_search"}
    answer = post(server, **asked, input=TEXT, tool_choice=choice)
    assert "ridgeline-ignored" not in answer.headers
    [call] = answer.json()["output"]
    assert (call["type"], call["execution"], call["status"]) == ("tool_search_call", "client", "completed")
    assert call["arguments"]["query"] in ("rain", "snow")
    streamed = raw_events(post(server, **asked, input=TEXT, tool_choice=choice, stream=True))
    [written] = streamed[-1]["response"]["output"]
    assert written | {"id": call["id"], "call_id": call["call_id"]} == call
    found = {"type": "tool_search_output", "call_id": call["call_id"], "execution": "client", "tools": [AGENTS[2]]}
    items = [said("user", TEXT), call, found]
    prompt = post(server, "/render", **asked, input=items).json()["prompt"]
    assert prompt.endswith("mcp__x__weather")
    again = post(
        server, **asked, input=items, tool_choice={"type": "function", "name": "weather", "namespace": "mcp__x"}
    )
    [called] = again.json()["output"]
    assert (called["type"], called["name"], called["namespace"]) == ("function_call", "weather", "mcp__x")
    hosted = [{"type": "tool_search"}, AGENTS[3]]
    assert "tools.tool_search" in post(server, **asked | {"tools": hosted}, input=TEXT).headers["ridgeline-ignored"]


def test_an_item_adds_tools_and_may_change_those_that_are_there(server: Server) -> None:
    def added(*tools: dict[str, Any]) -> dict[str, Any]:
        return {"type": "additional_tools", "role": "developer", "tools": list(tools)}

    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 60}
    asked |= {"tool_choice": {"type": "custom", "name": "patch", "namespace": "functions"}}
    space = {"type": "namespace", "name": "functions", "tools": [AGENTS[3]]}
    answer = post(server, **asked, input=[added(space), said("user", TEXT), added(space)])
    [call] = answer.json()["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("custom_tool_call", "patch", "functions")
    assert "input.additional_tools" not in answer.headers.get("ridgeline-ignored", "")


def test_what_is_not_known_of_a_conversation_is_left_out_by_name(server: Server) -> None:
    """A conversation is sent whole each time, so one item would end it."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    items = [
        said("user", TEXT),
        {"type": "something_new", "id": "x"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "Seen:"}, image]},
    ]
    answer = post(server, model=MODEL, input=items, max_output_tokens=1)
    assert answer.status_code == 200, answer.text
    left_out = {"input.something_new", "input.function_call_output.input_image"}
    assert set(answer.headers["ridgeline-ignored"].split(", ")) == left_out
    prompt = post(server, "/render", model=MODEL, input=items).json()["prompt"]
    assert prompt.endswith("Seen:\n[input_image: left out, because the model reads text alone]")
    new: Any = [{"type": "new_part", "x": 1}]
    items = [said("user", TEXT), said("assistant", new), items[2], items[3] | {"output": new}]
    answer = post(server, model=MODEL, input=items, max_output_tokens=1)
    assert answer.status_code == 200, answer.text
    left_out = {"input.new_part", "input.function_call_output.new_part"}
    assert set(answer.headers["ridgeline-ignored"].split(", ")) == left_out
    prompt = post(server, "/render", model=MODEL, input=items).json()["prompt"]
    assert prompt.count("[new_part: left out, because this server does not know it]") == 2
    thought = {"type": "reasoning", "summary": [{"type": "new_part"}]}
    answer = post(server, model=MODEL, input=[said("user", TEXT), thought], max_output_tokens=1)
    assert answer.headers["ridgeline-ignored"] == "input.reasoning.new_part"


def test_reasoning_is_an_item_of_its_own(thinker: Server) -> None:
    answer = client(thinker).responses.create(**THINKING, input="Once upon a time")
    thought, message = answer.output
    assert (thought.type, message.type, answer.output_text) == ("reasoning", "message", ANSWER)
    assert thought.content[0].text
    assert answer.usage.output_tokens_details.reasoning_tokens == BUDGET
    with client(thinker).responses.stream(**THINKING, input="Once upon a time") as stream:
        pieces = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
        final = stream.get_final_response()
    assert plain(final) == plain(answer)
    assert "".join(pieces) == thought.content[0].text
    body = {name: value for name, value in THINKING.items() if name != "extra_body"} | THINKING["extra_body"]
    told = raw_events(post(thinker, input="Once upon a time", stream=True, **body))
    assert [event["type"] for event in told].count("response.reasoning_text.done") == 1
    include = ["message.output_text.logprobs"]
    scored = client(thinker).responses.create(**THINKING, input="Once upon a time", include=include)
    assert "".join(each.token for each in scored.output[1].content[0].logprobs) == ANSWER
    assert scored.usage.output_tokens_details.reasoning_tokens == BUDGET
    cut = client(thinker).responses.create(model=MODEL, input="Once", max_output_tokens=6, temperature=0)
    assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")]
    more = client(thinker).responses.create(**THINKING, input="Why?", previous_response_id=answer.id)
    assert more.output_text == ANSWER


# ---- in the background --------------------------------------------------------------------------------------------


def test_an_answer_is_written_in_the_background_and_its_events_are_read_again(server: Server) -> None:
    asked = GREEDY | {"input": TEXT, "max_output_tokens": 20}
    want = client(server).responses.create(**asked)
    began = client(server).responses.create(**asked, background=True)
    assert began.status in ("queued", "in_progress")
    until = time.monotonic() + PATIENCE
    while (found := client(server).responses.retrieve(began.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert plain(found) == plain(want) | {"background": True}
    stream = list(client(server).responses.create(**asked, background=True, stream=True))
    assert [event.sequence_number for event in stream] == list(range(len(stream)))
    assert [event.type for event in stream[:3]] == ["response.created", "response.queued", "response.in_progress"]
    name = stream[0].response.id
    again = WIRE.get(f"{server.url}/v1/responses/{name}?stream=true")
    assert raw_events(again) == [event.to_dict() for event in stream]
    rest = list(client(server).responses.retrieve(name, stream=True, starting_after=4))
    assert [event.to_dict() for event in rest] == [event.to_dict() for event in stream[5:]]
    assert WIRE.get(f"{server.url}/v1/responses/{began.id}?stream=true").status_code == 400
    assert refused(server, background=True, store=False)[0] == "background"


def test_an_answer_in_the_background_is_cancelled(server: Server) -> None:
    asked = {"model": MODEL, "input": TEXT, "max_output_tokens": 1900, "background": True}
    began = client(server).responses.create(**asked, extra_body={"ignore_eos": True})
    assert refused(server, previous_response_id=began.id)[0] == "previous_response_id"
    ended = client(server).responses.cancel(began.id)
    assert ended.status == client(server).responses.retrieve(began.id).status == "cancelled"
    assert not [item for item in ended.output if item.status == "in_progress"]
    assert server.wait_idle(), "it goes on in the engine"
    began = client(server).responses.create(**asked, extra_body={"ignore_eos": True})
    client(server).responses.delete(began.id)
    assert server.wait_idle(), "what was forgotten goes on"


def test_a_failure_on_the_way_ends_the_stream_with_an_event(start_server: StartServer) -> None:
    with start_server(request_timeout=0.8) as running:
        long = {"model": MODEL, "input": TEXT, "max_output_tokens": 1900, "ignore_eos": True}
        told = raw_events(post(running, **long, stream=True))
        failed = told[-1]["response"]
        assert (told[-1]["type"], failed["status"], failed["error"]["code"]) == (
            "response.failed",
            "failed",
            "server_error",
        )
        assert told[-2]["item"]["status"] == "incomplete"
        assert WIRE.get(f"{running.url}/v1/responses/{failed['id']}").status_code == 404
        assert post(running, **long).status_code == 504
        name = post(running, **long, background=True).json()["id"]
        until = time.monotonic() + PATIENCE
        while (found := WIRE.get(f"{running.url}/v1/responses/{name}").json())["status"] != "failed":
            assert time.monotonic() < until
            time.sleep(0.02)
        assert found["error"]["code"] == "server_error"


def test_who_leaves_ends_its_request(server: Server) -> None:
    long = {"model": MODEL, "input": TEXT, "max_output_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=long, timeout=PATIENCE) as stream:
        next(stream.iter_bytes())
    assert server.wait_idle()


# ---- bounds and mistakes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "message", "role": "judge", "content": "x"}]}, "input.0.role"),
        ({"input": [said("user", [{"type": "input_image", "image_url": "x"}])]}, "input.0.content.0"),  # type: ignore
        ({"input": [said("user", [{"type": "new_part"}])]}, "input.0.content.0"),  # type: ignore
        ({"input": [said("assistant", [{"type": "no type"}])]}, "input.0.content.0"),  # type: ignore
        ({"input": [{"type": "web_search"}]}, "input"),  # nothing is left of it
        ({"input": [{"type": ["message"]}]}, "input.0"),
        ({"input": [{"type": "additional_tools", "tools": [7]}]}, "input.0.tools"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "b"}]}, "input.0.input"),
        ({"tools": [{"type": 7}]}, "tools.0"),
        ({"tools": [{"type": "custom", "name": "f"}, {"type": "function", "name": "f"}]}, "tools.1"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [7]}]}, "tools.0.tools"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input.0.name"),
        ({"input": [{"type": "item_reference", "id": []}]}, "input.0.id"),
        ({"input": 7}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"include": ["x"]}, "include"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"reasoning": {"efort": "low"}}, "reasoning.efort"),
        ({"temperature": -1}, "temperature"),
        ({"input": "word " * 3000}, "input"),
        ({"max_output_tokens": 5000}, "input"),
    ],
)
def test_a_mistake_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    assert refused(server, **fields)[0] == param


def test_truncation_leaves_out_the_oldest_turns(server: Server) -> None:
    turns = [said(role, f"{index} " + "word " * 90) for index in range(15) for role in ("user", "assistant")]
    long = [said("system", "Be brief."), *turns, said("user", TEXT)]
    assert refused(server, input=long)[0] == "input"
    answer = client(server).responses.create(**GREEDY, input=long, truncation="auto")
    room, cut = 2048 - GREEDY["max_output_tokens"], 0

    def counted(cut: int) -> int:
        rest = [long[0], *long[1 + 2 * cut :]]
        return int(post(server, "/input_tokens", model=MODEL, input=rest).json()["input_tokens"])

    while counted(cut) > room:
        cut += 1
    assert 0 < cut < 15
    assert answer.usage.input_tokens == counted(cut)
    assert refused(server, input="word " * 3000, truncation="auto")[0] == "input"


def test_harmless_fields_are_named(server: Server) -> None:
    fields = {"user": "x", "max_tool_calls": 3, "include": ["reasoning.encrypted_content"]}
    fields |= {"reasoning": {"summary": "auto"}, "stream_options": {"include_obfuscation": False}, "stream": True}
    answer = post(server, input="x", max_output_tokens=1, **fields)
    assert set(answer.headers["ridgeline-ignored"].split(", ")) == {
        "include.reasoning.encrypted_content",
        "max_tool_calls",
        "reasoning.summary",
        "stream_options.include_obfuscation",
        "user",
    }
    assert events(answer) or raw_events(answer)

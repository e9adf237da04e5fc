"""Ollama's API as its own client for Python sees it, against what chats and completions answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import datetime
from importlib.util import find_spec
from typing import Any

import httpx
import msgspec
import pytest

from ridgeline.serving.apis.ollama.answers import OllamasChat, OllamasText
from ridgeline.serving.apis.ollama.bodies import OllamasChatBody, chat_of
from ridgeline.serving.apis.ollama.generate import Parts
from ridgeline.serving.apis.ollama.models import spelled
from ridgeline.serving.http import sse
from ridgeline.serving.http.absent import ABSENT
from ridgeline.serving.requests.validation import parse
from ridgeline.text.parsers.events import CallDelta, Content, Reasoning
from ridgeline_bench.scripts.api_fields import APIS, BODIES, state
from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer

if find_spec("ollama"):
    import ollama
by_client = pytest.mark.skipif(not find_spec("ollama"), reason="ollama is not installed (pip install ollama)")

TEXT = "def add(a, b):"
USER: Any = {"role": "user", "content": TEXT}
GREEDY: Any = {"temperature": 0, "num_predict": 12}
CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL: Any = {
    "type": "object",
    "properties": {"name": {"const": "weather"}, "parameters": CITY},
    "required": ["name", "parameters"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}


@pytest.fixture(scope="module")
def caller(start_server: StartServer) -> Iterator[Server]:
    """A JSON object is a call there."""
    with start_server(tool_call_parser="llama3_json") as running:
        yield running


def client(server: Server, **more: Any) -> Any:
    return ollama.Client(host=server.url, timeout=PATIENCE, **more)


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/api/{path}", json=body, timeout=PATIENCE)


def lines(response: httpx.Response, kind: Any = OllamasChat) -> list[Any]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [msgspec.json.decode(line, type=kind) for line in response.content.splitlines()]


def chatted(server: Server, *messages: Any, **more: Any) -> Any:
    asked = {"temperature": 0, "max_tokens": 12} | more
    return server.client.chat.completions.create(model=MODEL, messages=list(messages), **asked)


@by_client
def test_a_chat_is_openais_whole_and_in_lines(server: Server) -> None:
    want = chatted(server, USER)
    answer = client(server).chat(model=MODEL, messages=[USER], options=GREEDY)
    assert answer.message.content == want.choices[0].message.content
    assert (answer.done, answer.done_reason, answer.model) == (True, "length", MODEL)
    assert (answer.prompt_eval_count, answer.eval_count) == (want.usage.prompt_tokens, 12)
    assert answer.total_duration >= answer.eval_duration > 0
    assert answer.prompt_eval_duration > 0
    told = list(client(server).chat(model=f"{MODEL}:latest", messages=[USER], options=GREEDY, stream=True))
    assert "".join(part.message.content for part in told) == answer.message.content
    assert [part.done for part in told] == [False] * (len(told) - 1) + [True]
    assert told[-1].eval_count == 12
    assert told[0].eval_count is None
    assert datetime.fromisoformat(told[0].created_at) <= datetime.fromisoformat(told[-1].created_at)


@by_client
def test_a_prompt_is_what_a_user_says_and_raw_is_what_is_continued(server: Server) -> None:
    ask = client(server).generate
    system = {"role": "system", "content": "# Be brief."}
    assert ask(model=MODEL, prompt=TEXT, options=GREEDY).response == chatted(server, USER).choices[0].message.content
    told = ask(model=MODEL, prompt=TEXT, system="# Be brief.", options=GREEDY, stream=True)
    assert "".join(part.response for part in told) == chatted(server, system, USER).choices[0].message.content
    plain = server.client.completions.create(model=MODEL, prompt=TEXT, max_tokens=12, temperature=0)
    assert ask(model=MODEL, prompt=TEXT, raw=True, options=GREEDY).response == plain.choices[0].text
    with pytest.raises(ollama.ResponseError, match="no tokens for filling in the middle"):
        ask(model=MODEL, prompt=TEXT, suffix="return c", options=GREEDY)


@by_client
def test_the_async_client_reads_the_same(server: Server) -> None:
    async def ask() -> str:
        asking = ollama.AsyncClient(host=server.url, timeout=PATIENCE)
        told = await asking.chat(model=MODEL, messages=[USER], options=GREEDY, stream=True)
        return "".join([part.message.content async for part in told])

    assert asyncio.run(ask()) == chatted(server, USER).choices[0].message.content
    assert server.wait_idle()


def test_lines_are_the_default_and_each_is_whole_json(server: Server) -> None:
    told = lines(post(server, "chat", model=MODEL, messages=[USER], options=GREEDY))
    assert len(told) > 2
    assert "".join(line.message.content for line in told) == chatted(server, USER).choices[0].message.content
    told = lines(post(server, "generate", model=MODEL, prompt=TEXT, options=GREEDY), OllamasText)
    assert told[-1].done_reason == "length"


def test_a_waiting_client_reads_lines_although_blanks_stand_between(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE", 0.0)
    response = post(server, "chat", model=MODEL, messages=[USER], options=GREEDY)
    monkeypatch.undo()
    assert response.content.startswith(b" ")
    assert [json.loads(line) for line in response.text.splitlines()][-1]["done"] is True


def test_options_are_those_of_sampling(server: Server) -> None:
    drawn = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 1.0, "seed": 7}
    more = {"repeat_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "stop": ["\n\n"]}
    answer = post(
        server, "chat", model=MODEL, messages=[USER], stream=False, options=drawn | more | {"num_predict": 40}
    )
    same = {"top_k": 20, "min_p": 0.01, "typical_p": 1.0, "repetition_penalty": 1.1}
    shared = {name: (drawn | more)[name] for name in ("temperature", "top_p", "seed", "stop")}
    penalties = {"presence_penalty": 0.1, "frequency_penalty": 0.1}
    want = chatted(server, USER, max_tokens=40, **shared, **penalties, extra_body=same)
    assert answer.json()["message"]["content"] == want.choices[0].message.content
    assert answer.json()["done_reason"] == want.choices[0].finish_reason
    assert "ridgeline-ignored" not in answer.headers


def test_what_means_nothing_here_is_left_out_by_name(server: Server) -> None:
    options = GREEDY | {"num_gpu": 1, "mirostat": 0, "num_thread": 4, "num_ctx": 10**7, "made_up": [1]}
    more = {"keep_alive": "5m", "think": True, "shift": True, "brand_new": {"a": 1}}
    answer = post(server, "chat", model=MODEL, messages=[USER], stream=False, options=options, **more)
    assert answer.status_code == 200, answer.text
    named = set(answer.headers["ridgeline-ignored"].split(", "))
    assert named == {f"options.{name}" for name in ("num_gpu", "mirostat", "num_thread", "num_ctx", "made_up")} | {
        *more
    }


@pytest.mark.dealt
def test_num_ctx_bounds_prompt_and_output_together(server: Server) -> None:
    options = {"temperature": 0, "num_ctx": 20}
    answer = post(server, "generate", model=MODEL, prompt=TEXT, stream=False, options=options).json()
    assert answer["prompt_eval_count"] + answer["eval_count"] == 20
    assert answer["done_reason"] == "length"
    refused = post(server, "generate", model=MODEL, prompt=TEXT * 9, stream=False, options=options)
    assert refused.status_code == 400
    assert "maximum context length is 20 tokens" in refused.json()["error"]
    context = server.api.service.facts().max_model_len
    long = "x " * ((context - 40) * 100 // len(server.api.tokenizer.encode("x " * 100)))
    without = post(server, "generate", model=MODEL, prompt=long, raw=True, stream=False, options={"num_predict": 99999})
    told = without.json()
    assert 1 < told["eval_count"] < 100
    assert context - 60 < told["prompt_eval_count"] + told["eval_count"] <= context


def test_a_format_holds_the_answer(server: Server) -> None:
    options = {"temperature": 0.7, "seed": 3, "num_predict": 200}
    asked: Any = {"model": MODEL, "messages": [USER], "stream": False, "options": options}
    answer = post(server, "chat", **asked, format=CITY).json()
    assert json.loads(answer["message"]["content"])["city"] in ("Oslo", "Lima")
    text = post(
        server, "generate", model=MODEL, prompt=TEXT, raw=True, stream=False, format=CITY, options=options
    ).json()
    assert json.loads(text["response"])["city"] in ("Oslo", "Lima")
    some = post(server, "chat", **asked | {"options": options | {"num_predict": 8}}, format="json").json()
    assert some["message"]["content"].lstrip().startswith("{")
    refused = post(server, "chat", **asked, format="yaml")
    assert refused.status_code == 400
    assert 'format is "json" or a JSON schema' in refused.json()["error"]
    assert "schema.example" in post(server, "chat", **asked, format=CITY | {"example": 1}).headers["ridgeline-ignored"]


@by_client
def test_a_call_is_told_when_it_is_whole_and_can_be_sent_back(caller: Server) -> None:
    options = {"temperature": 0.7, "seed": 3, "num_predict": 300}
    asked: Any = {"model": MODEL, "messages": [USER], "tools": [TOOL], "format": CALL, "options": options}
    answer = client(caller).chat(**asked)
    [call] = answer.message.tool_calls
    assert call.function.name == "weather"
    assert call.function.arguments["city"] in ("Oslo", "Lima")
    assert (answer.message.content, answer.done_reason) == ("", "stop")
    told = [part for part in client(caller).chat(**asked, stream=True) if part.message.tool_calls]
    assert [part.message.tool_calls[0].function for part in told] == [call.function]
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    then = client(caller).chat(model=MODEL, messages=[USER, answer.message, result], options=GREEDY)
    assert then.eval_count == 12


def test_calls_and_their_answers_find_each_other(server: Server) -> None:
    calls = [{"function": {"name": name, "arguments": {"at": 1}}} for name in ("one", "two", "three")]
    answers = [{"role": "tool", "tool_name": name, "content": name} for name in ("two", "three")]
    last = {"role": "tool", "content": "one"}
    said = [USER, {"role": "assistant", "thinking": "Hm.", "tool_calls": calls}, *answers, last]
    chat, _ = chat_of(server.api, parse(OllamasChatBody, {"model": MODEL, "messages": said}))
    told = [message.model_dump(exclude_unset=True) for message in chat.messages]
    assert told[1]["reasoning_content"] == "Hm."
    ids = [call["id"] for call in told[1]["tool_calls"]]
    assert len(set(ids)) == 3
    assert [message["tool_call_id"] for message in told[2:]] == [ids[1], ids[2], ids[0]]
    assert told[1]["tool_calls"][0]["function"]["arguments"] == {"at": 1}


def test_absent_content_is_empty(server: Server) -> None:
    said = [USER, {"role": "assistant", "thinking": "Hm."}, {"role": "user"}, {"role": "system", "content": None}]
    answer = post(server, "chat", model=MODEL, messages=said, stream=False, options={"num_predict": 1})
    assert answer.status_code == 200, answer.text
    chat, _ = chat_of(server.api, parse(OllamasChatBody, {"model": MODEL, "messages": said}))
    assert [message.content for message in chat.messages[1:]] == ["", "", ""]


def test_parts_of_an_answer_keep_their_order_and_calls_their_number() -> None:
    parts = Parts()
    events = [Reasoning("a"), Reasoning("b"), Content("c"), CallDelta(0, "f", '{"x"'), CallDelta(0, None, ": 1}")]
    told = [part for event in [*events, CallDelta(1, "g"), Content("d")] for part in parts.take(event)]
    told += parts.end()
    assert [part.thinking for part in told[:2]] == ["a", "b"]
    first, second = (told[at].tool_calls[0].function for at in (3, 4))  # type: ignore[union-attr,index]
    assert (first.index, first.name, first.arguments) == (0, "f", {"x": 1})
    assert (second.index, second.name, second.arguments) == (1, "g", {})
    assert [told[at].content for at in (2, 5)] == ["c", "d"]


@by_client
def test_thinking_is_apart_and_can_be_asked_for(start_server: StartServer) -> None:
    template = "{% if enable_thinking %}think hard {% endif %}{{ messages[0].content }}"
    with start_server(reasoning_parser="deepseek_r1", chat_template=template) as server:
        answer = client(server).chat(model=MODEL, messages=[USER], options=GREEDY, think=True)
        assert answer.message.thinking
        assert not answer.message.content
        short = client(server).chat(model=MODEL, messages=[USER], options=GREEDY, think=False)
        assert answer.prompt_eval_count > short.prompt_eval_count
        told = list(client(server).generate(model=MODEL, prompt=TEXT, options=GREEDY, think="high", stream=True))
        assert "".join(part.thinking or "" for part in told) == answer.message.thinking
        assert client(server).show(MODEL).capabilities == ["completion", "thinking"]


@by_client
def test_logprobs_are_openais(server: Server) -> None:
    want = chatted(server, USER, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    answer = client(server).chat(model=MODEL, messages=[USER], options=GREEDY, logprobs=True, top_logprobs=2)
    assert [each.token for each in answer.logprobs] == [each.token for each in want]
    assert [each.logprob for each in answer.logprobs] == pytest.approx([each.logprob for each in want], abs=1e-3)
    assert [len(each.top_logprobs) for each in answer.logprobs] == [2] * 12
    told = client(server).chat(model=MODEL, messages=[USER], options=GREEDY, logprobs=True, stream=True)
    assert sum(len(part.logprobs or ()) for part in told) == 12


@by_client
def test_models_are_listed_and_shown(server: Server) -> None:
    facts = server.api.service.facts()
    found = client(server).list().models
    assert [model.model for model in found] == [MODEL, "alias"]
    assert found[0].size == facts.weight_bytes > facts.parameters > 10**6
    assert len(found[0].digest) == 64
    [running, _] = client(server).ps().models
    assert (running.context_length, running.size_vram) == (facts.max_model_len, 0)
    shown = client(server).show(f"{MODEL}:latest")
    family = shown.details.family
    assert shown.modelinfo[f"{family}.context_length"] == facts.max_model_len
    assert shown.modelinfo["general.parameter_count"] == facts.parameters
    assert shown.details.parameter_size == spelled(facts.parameters)
    assert (shown.details.format, shown.details.quantization_level) == ("safetensors", "F32")
    assert shown.capabilities == ["completion"]
    assert shown.template == server.api.chat_template.source
    assert post(server, "show", name=MODEL).json()["template"] == shown.template


def test_a_server_is_found_and_is_new_enough(server: Server) -> None:
    for path in ("/", "/api/tags", "/api/version"):
        found = httpx.head(server.url + path, timeout=PATIENCE)
        assert (found.status_code, found.content) == (200, b"")
    version = httpx.get(f"{server.url}/api/version", timeout=PATIENCE).json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # what editors ask for
    assert "links" in httpx.get(server.url, timeout=PATIENCE).json()


@by_client
def test_a_request_that_asks_for_nothing_loads_what_is_there(server: Server) -> None:
    loaded = client(server).generate(model=MODEL, keep_alive=0)
    assert (loaded.done, loaded.done_reason, loaded.response) == (True, "load", "")
    assert client(server).chat(model=MODEL).done_reason == "load"


@by_client
def test_what_would_change_models_is_one_sentence(server: Server) -> None:
    asking = client(server)
    calls = (
        lambda: asking.pull("other"),
        lambda: asking.push(MODEL),
        lambda: asking.create("other", from_=MODEL),
        lambda: asking.copy(MODEL, "other"),
        lambda: asking.delete(MODEL),
        lambda: list(asking.pull("other", stream=True)),
    )
    for call in calls:
        with pytest.raises(ollama.ResponseError, match="models that it was started with") as refused:
            call()
        assert refused.value.status_code == 404
    assert all(f"/api/{name}" in ABSENT for name in ("pull", "push", "create", "copy", "delete"))


@by_client
def test_mistakes_are_one_sentence_in_ollamas_shape(server: Server) -> None:
    with pytest.raises(ollama.ResponseError, match="the model 'other' does not exist") as refused:
        client(server).chat(model="other", messages=[USER])
    assert refused.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="images are not supported"):
        client(server).chat(model=MODEL, messages=[USER | {"images": [b"aGk="]}])
    with pytest.raises(ollama.ResponseError, match="images are not supported"):
        client(server).generate(model=MODEL, prompt="?", images=[b"aGk="])
    with pytest.raises(ollama.ResponseError, match="context is not supported"):
        client(server).generate(model=MODEL, prompt="?", context=[1, 2])
    with pytest.raises(ollama.ResponseError, match="this model generates"):
        client(server).embed(model=MODEL, input="?")
    with pytest.raises(ollama.ResponseError, match="temperature"):
        list(client(server).chat(model=MODEL, messages=[USER], options={"temperature": -1}, stream=True))
    for body in (b"{", b"[]", b'{"model": 5}', b'{"messages": [{"role": "user", "content": 5}]}'):
        answer = httpx.post(f"{server.url}/api/chat", content=body, timeout=PATIENCE)
        assert answer.status_code == 400
        assert set(answer.json()) == {"error"}
    assert httpx.get(f"{server.url}/api/none", timeout=PATIENCE).json().keys() == {"error"}


@by_client
def test_its_client_has_no_field_that_is_not_listed() -> None:
    from ollama import _types as types

    sent = {
        "ollama_chat": types.ChatRequest,
        "ollama_generate": types.GenerateRequest,
        "ollama_options": types.Options,
        "ollama_embed": types.EmbedRequest,
        "ollama_embeddings": types.EmbeddingsRequest,
    }
    for route, request in sent.items():
        assert request.model_fields.keys() <= APIS[route]["Ollama"], route
    for route in sent:
        for name in APIS[route]["Ollama"]:
            assert state(BODIES[route], name)[0] in ("implemented", "harmless", "refused")


@by_client
def test_the_same_keys_open_it(start_server: StartServer) -> None:
    with start_server(api_key=["secret"]) as server:
        with pytest.raises(ollama.ResponseError, match="no valid API key") as refused:
            client(server).list()
        assert refused.value.status_code == 401
        known = client(server, headers={"Authorization": "Bearer secret"})
        assert known.chat(model=MODEL, messages=[USER], options=GREEDY).eval_count == 12


def test_a_client_that_leaves_ends_its_request(server: Server) -> None:
    asked = {"model": MODEL, "prompt": TEXT, "raw": True, "options": {"num_predict": -1}}
    with httpx.stream("POST", f"{server.url}/api/generate", json=asked, timeout=PATIENCE) as response:
        next(response.iter_lines())
    assert server.wait_idle()

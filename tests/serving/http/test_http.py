"""The server as the real `openai` client sees it, against the offline API's answers."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import httpx
import msgspec
import openai
import pydantic
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.serving.errors import BadRequest
from ridgeline.serving.http import answers
from ridgeline.serving.http.shapes import finite
from ridgeline.serving.requests.bodies import ChatBody, CompletionBody, DetokenizeBody
from ridgeline.serving.requests.validation import parse
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.conftest import DTYPE, MODEL, PATIENCE, Server, StartServer

PROMPTS = ["def fibonacci(n):", "class Stack:\n    def push(self, item):", "import os\n"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=3, prompt_logprobs=2)


@pytest.fixture(scope="session")
def offline() -> dict[str, Any]:
    """Greedy answers of the offline API, by prompt."""
    outputs = LLM(dtype=DTYPE).generate(PROMPTS, GREEDY)
    return dict(zip(PROMPTS, outputs, strict=True))


def post(server: Server, path: str, **options: Any) -> httpx.Response:
    return httpx.post(server.url + path, timeout=PATIENCE, **options)


# ---- answers ------------------------------------------------------------------------------------------------------


def test_completions_are_the_offline_ones(server: Server, offline: dict[str, Any]) -> None:
    answer = server.client.completions.create(model=MODEL, prompt=PROMPTS, max_tokens=24, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [offline[p].outputs[0].text for p in PROMPTS]
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.usage.prompt_tokens == sum(len(offline[p].prompt_token_ids) for p in PROMPTS)
    assert answer.usage.completion_tokens == sum(len(offline[p].outputs[0].token_ids) for p in PROMPTS)


def test_a_prompt_may_be_token_ids(server: Server, offline: dict[str, Any]) -> None:
    ids = [offline[p].prompt_token_ids for p in PROMPTS]
    for prompt in (ids, ids[0]):
        answer = server.client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0)
        want = [offline[p].outputs[0].text for p in PROMPTS][: len(answer.choices)]
        assert [choice.text for choice in answer.choices] == want


def test_a_chat_is_the_offline_one_whole_and_streamed(server: Server) -> None:
    messages = [{"role": "user", "content": "def add(a, b):"}]
    want = LLM(dtype=DTYPE).chat(messages, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
    asked: dict[str, Any] = {"model": "alias", "messages": messages, "temperature": 0, "max_completion_tokens": 20}
    answer = server.client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == want.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == want.finish_reason
    assert answer.model == "alias"
    assert answer.id.startswith("chatcmpl-")
    chunks = list(server.client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [want.finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1


def test_streamed_completions_of_several_prompts_join_to_the_whole(server: Server, offline: dict[str, Any]) -> None:
    texts = ["", "", ""]
    for chunk in server.client.completions.create(
        model=MODEL, prompt=PROMPTS, max_tokens=24, temperature=0, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [offline[p].outputs[0].text for p in PROMPTS]


def test_the_async_client_and_n(server: Server) -> None:
    async def ask() -> tuple[list[str], dict[int, str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            asked: dict[str, Any] = {"model": MODEL, "prompt": "x =", "n": 3, "seed": 5, "max_tokens": 12}
            whole = await client.completions.create(**asked)
            texts: dict[int, str] = {}
            async for chunk in await client.completions.create(**asked, stream=True):
                choice = chunk.choices[0]
                texts[choice.index] = texts.get(choice.index, "") + choice.text
            return [choice.text for choice in whole.choices], texts

    whole, streamed = asyncio.run(ask())
    assert len(set(whole)) > 1, "three seeds, one text"
    assert [streamed[index] for index in range(3)] == whole


def test_a_stop_string_ends_the_text_and_is_named(server: Server) -> None:
    answer = server.client.completions.create(
        model=MODEL, prompt=PROMPTS[0], max_tokens=60, temperature=0, stop=["\n", "never"]
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert "\n" not in choice.text
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == "\n"
    assert server.wait_idle()


def test_a_stream_ends_once_where_a_stop_string_ends_it(server: Server) -> None:
    """Tokens that were under way when it was found are not told."""
    for seed in range(12):
        body = TEXT | {"prompt": PROMPTS[seed % 3], "max_tokens": 40, "seed": seed, "stop": ["\n", "e", "a"]}
        chunks = [
            json.loads(event) for event in events(post(server, "/v1/completions", json=body | {"stream": True}))[:-1]
        ]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert [reason for reason in reasons if reason] == [reasons[-1]]


# ---- logprobs -----------------------------------------------------------------------------------------------------


def test_chat_logprobs_have_bytes_that_join_to_the_text(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "s = 'naïve ☃'"}],
        max_tokens=16,
        temperature=0,
        logprobs=True,
        top_logprobs=4,
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    content = [entry for entry in choice.logprobs.content if entry.token != "<|endoftext|>"]
    joined = b"".join(bytes(entry.bytes or []) for entry in content).decode(errors="replace")
    assert joined == choice.message.content
    for entry in content:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs), "greedy takes the likeliest"


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_scores_the_prompt_as_lm_eval_asks(server: Server, offline: dict[str, Any], max_tokens: int) -> None:
    want = offline[PROMPTS[1]]
    ids = want.prompt_token_ids
    answer = post(
        server,
        "/v1/completions",
        json={
            "model": MODEL,
            "prompt": ids,
            "max_tokens": max_tokens,
            "echo": True,
            "logprobs": 1,
            "temperature": 0,
            "seed": 1234,
        },
    ).json()
    found = answer["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(ids) + max_tokens
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    for place in range(1, len(ids)):
        assert found["token_logprobs"][place] == pytest.approx(
            want.prompt_logprobs[place][ids[place]].logprob, abs=1e-3
        )
        best = max(found["top_logprobs"][place].values())
        assert best == pytest.approx(max(e.logprob for e in want.prompt_logprobs[place].values()), abs=1e-3)
    text, echo = answer["choices"][0]["text"], server.api.tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith(echo)
    assert max_tokens or text == echo
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token


def test_an_echo_of_text_has_no_token_that_the_client_did_not_write(server: Server) -> None:
    answer = server.client.completions.create(
        model=MODEL, prompt=PROMPTS[1], max_tokens=3, echo=True, logprobs=0, temperature=0
    )
    text, found = answer.choices[0].text, answer.choices[0].logprobs
    assert text.startswith(PROMPTS[1])
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert found.tokens[0] == "<|endoftext|>"
    assert found.text_offset[:2] == [0, 0]
    for token, offset in list(zip(found.tokens, found.text_offset, strict=True))[1:]:
        assert text[offset : offset + len(token)] == token


def test_streamed_logprobs_are_the_whole_ones(server: Server, offline: dict[str, Any]) -> None:
    asked = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0, "logprobs": 3}
    whole = server.client.completions.create(**asked).choices[0].logprobs  # type: ignore[call-overload]
    want = offline[PROMPTS[0]].outputs[0]
    assert whole.token_logprobs == pytest.approx(
        [entry[i].logprob for i, entry in zip(want.token_ids, want.logprobs, strict=True)], abs=1e-3
    )
    parts: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for chunk in server.client.completions.create(**asked, stream=True):  # type: ignore[call-overload]
        for name, values in parts.items():
            values += getattr(chunk.choices[0].logprobs, name)
    assert parts["tokens"] == whole.tokens
    assert parts["text_offset"] == whole.text_offset
    assert parts["token_logprobs"] == pytest.approx(whole.token_logprobs, abs=1e-3)


@pytest.mark.few(4)
@pytest.mark.parametrize("extra", [{}, {"max_tokens": 0}, {"n": 3, "temperature": 1.0, "seed": 4}])
@pytest.mark.parametrize(
    "prompt", [PROMPTS[1], PROMPTS[1] * 120, [7], [7, 300, 41]], ids=["text", "long", "one", "ids"]
)
def test_a_streamed_echo_with_logprobs_joins_to_the_whole_one(
    server: Server, prompt: Any, extra: dict[str, Any]
) -> None:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 2, "echo": True} | extra
    whole = post(server, "/v1/completions", json=asked).json()["choices"]
    joined: dict[int, dict[str, Any]] = {}
    for event in events(post(server, "/v1/completions", json=asked | {"stream": True}))[:-1]:
        [choice] = json.loads(event)["choices"]
        found = joined.setdefault(choice["index"], choice)
        if found is not choice:
            assert found["finish_reason"] is None, "it had ended"
            found["text"] += choice["text"]
            found["finish_reason"] = choice["finish_reason"]
            for name, values in choice["logprobs"].items():
                found["logprobs"][name] += values
        else:
            echo = prompt if isinstance(prompt, str) else server.api.tokenizer.decode(prompt)
            assert choice["text"].startswith(echo)
            assert len(choice["logprobs"]["tokens"]) >= len(prompt if isinstance(prompt, list) else [""])
    for choice in whole:
        found = joined[choice["index"]]
        for name in ("text", "finish_reason"):
            assert found[name] == choice[name]
        for name in ("tokens", "text_offset"):
            assert found["logprobs"][name] == choice["logprobs"][name]
        assert found["logprobs"]["token_logprobs"][0] is choice["logprobs"]["token_logprobs"][0] is None
        told = found["logprobs"]["token_logprobs"][1:]
        assert told == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=2e-3)
    assert len(joined) == len(whole)


def test_prompt_logprobs_and_token_ids_in_vllms_form(server: Server, offline: dict[str, Any]) -> None:
    want = offline[PROMPTS[0]]
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    answer = server.client.completions.create(
        model=MODEL, prompt=PROMPTS[0], max_tokens=24, temperature=0, extra_body=extra
    )
    choice = answer.choices[0].model_extra
    assert choice is not None
    assert choice["token_ids"] == want.outputs[0].token_ids
    assert choice["prompt_token_ids"] == want.prompt_token_ids
    assert choice["prompt_logprobs"][0] is None
    for entry, wanted in zip(choice["prompt_logprobs"][1:], want.prompt_logprobs[1:], strict=True):
        assert set(entry) == {str(i) for i in wanted}


def test_a_prompt_of_one_token_has_prompt_logprobs_without_a_value(server: Server) -> None:
    body = TEXT | {"prompt": [5], "max_tokens": 1, "prompt_logprobs": 1}
    assert post(server, "/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"] == [None]


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_a_tokenizer_that_panics_fails_one_request_with_a_sentence(
    server: Server, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """tokenizers' panics are derived from BaseException, and pass all that catches Exception."""
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    class Panicking:
        def __init__(self, backend: Any) -> None:
            self._backend, self._decoded = backend, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._backend, name)

        def encode(self, *args: Any, **kwargs: Any) -> Any:
            if method == "encode":
                raise panic("index out of bounds")
            return self._backend.encode(*args, **kwargs)

        def decode(self, *args: Any, **kwargs: Any) -> Any:
            self._decoded += 1
            if method == "decode" and self._decoded % 2 == 0:  # the first is of the prompt's end
                raise panic("index out of bounds")
            return self._backend.decode(*args, **kwargs)

    tokenizer = server.api.tokenizer
    monkeypatch.setattr(tokenizer, "backend", Panicking(tokenizer.backend))
    answer = post(server, "/v1/completions", json=TEXT)
    assert answer.status_code == (400 if method == "encode" else 500)
    assert "tokenizer" in answer.json()["error"]["message"]
    assert "index out of bounds" in answer.json()["error"]["message"]
    streamed = post(server, "/v1/completions", json=TEXT | {"stream": True}).text
    assert "index out of bounds" in streamed
    assert "Traceback" not in streamed
    monkeypatch.undo()
    assert post(server, "/v1/completions", json=TEXT).status_code == 200


def test_an_echos_logprobs_and_prompt_logprobs_have_widths_of_their_own(server: Server) -> None:
    body = TEXT | {"prompt": PROMPTS[1], "max_tokens": 1, "echo": True, "logprobs": 5, "prompt_logprobs": 1}
    choice = post(server, "/v1/completions", json=body).json()["choices"][0]
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} == {1, 2}, "the likeliest, and the prompt's own"
    assert min(len(entry) for entry in choice["logprobs"]["top_logprobs"][1:]) >= 4, "texts may be equal"


def test_json_has_no_infinity(server: Server) -> None:
    assert finite(-math.inf) == finite(math.nan) == -9999.0
    assert finite(-3.5) == -3.5


# ---- fields beside OpenAI's ----------------------------------------------------------------------------------------

LONG = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 12}


def texts(server: Server, **asked: Any) -> list[str]:
    response = post(server, "/v1/completions", json={"model": MODEL} | asked)
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def test_extra_sampling_fields_reach_the_sampler(server: Server) -> None:
    greedy = texts(server, **LONG)
    hot = LONG | {"temperature": 2.0, "n": 4, "seed": 3}
    assert len({*texts(server, **hot), *greedy}) > 1
    for narrow in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        assert {*texts(server, **hot | narrow)} == {*greedy}, narrow
    loops = texts(server, prompt="a a a a a a", temperature=0, max_tokens=40)
    varied = texts(server, prompt="a a a a a a", temperature=0, max_tokens=40, repetition_penalty=1.8)
    assert loops != varied


def test_logit_bias_forbids_and_forces_tokens(server: Server, offline: dict[str, Any]) -> None:
    first = offline[PROMPTS[0]].outputs[0].token_ids[0]
    forced = server.api.tokenizer.encode("class", add_special_tokens=False)[0]
    ids = {}
    for name, bias in (("forbidden", {str(first): -100}), ("forced", {str(forced): 100})):
        body = LONG | {"max_tokens": 1, "logit_bias": bias, "return_token_ids": True}
        ids[name] = post(server, "/v1/completions", json=body).json()["choices"][0]["token_ids"]
    assert ids["forbidden"] != [first]
    assert ids["forced"] == [forced]


def test_ends_that_a_request_may_move(server: Server, offline: dict[str, Any]) -> None:
    ids = offline[PROMPTS[0]].outputs[0].token_ids
    stop = ids[4]
    body = LONG | {"stop_token_ids": [stop], "return_token_ids": True}
    choice = post(server, "/v1/completions", json=body).json()["choices"][0]
    assert choice["token_ids"] == ids[: ids.index(stop) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    later = post(server, "/v1/completions", json=body | {"min_tokens": 8}).json()["choices"][0]
    assert len(later["token_ids"]) >= 8
    eos = server.api.tokenizer.special_tokens["eos_token"]
    eos_id = server.api.tokenizer.encode(eos, add_special_tokens=False)[0]
    ending = LONG | {"logit_bias": {str(eos_id): 100}, "return_token_ids": True}
    at_once = post(server, "/v1/completions", json=ending).json()["choices"][0]
    assert (at_once["token_ids"], at_once["finish_reason"]) == ([eos_id], "stop")
    ignoring = post(server, "/v1/completions", json=ending | {"ignore_eos": True}).json()["choices"][0]
    assert (ignoring["token_ids"], ignoring["finish_reason"]) == ([eos_id] * 12, "length")


def test_a_salt_keeps_tenants_caches_apart(server: Server) -> None:
    prompt = "# a prompt whose blocks one tenant has written before\n" * 8

    def cached(salt: str) -> int:
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        return post(server, "/v1/completions", json=asked).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("mine") == 0
    assert cached("mine") > 0
    assert cached("yours") == 0


def test_null_is_the_default_of_every_field(server: Server) -> None:
    for path, model, body in (("completions", CompletionBody, TEXT), ("chat/completions", ChatBody, CHAT)):
        nulls = dict.fromkeys(model.model_fields.keys() - body.keys(), None)
        response = post(server, f"/v1/{path}", json=nulls | body | {"max_tokens": 1})
        assert response.status_code == 200, response.text


# ---- structure ----------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_structured_outputs_hold_the_text_to_their_form(server: Server) -> None:
    messages: Any = [{"role": "user", "content": "Who?"}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    answer = server.client.chat.completions.create(
        model=MODEL, messages=messages, response_format=form, max_tokens=300, temperature=0
    )
    person = json.loads(answer.choices[0].message.content or "")
    assert person["name"] in ("Ada", "Alan")
    assert 1 <= person["age"] <= 99
    for structured, fits in (
        ({"choice": ["yes", "no"]}, {"yes", "no"}.__contains__),
        ({"regex": "[0-9]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text.replace("-", "").isdigit()),
        ({"json": {"type": "boolean"}}, {"true", "false"}.__contains__),
        ({"grammar": 'start: "a" "b"'}, "ab".__eq__),
        ({"grammar": 'root ::= "a" "b"'}, "ab".__eq__),
        ({"json": {"enum": [[1, 2]]}, "disable_any_whitespace": True}, "[1,2]".__eq__),
        ({"json": {"enum": [[1, 2]]}, "whitespace_pattern": " "}, lambda t: t.replace(" ", "") == "[1,2]"),
        (
            {"json": {"oneOf": [{"const": 1}, {"type": "integer"}]}, "coerce_one_of": True},
            lambda t: t.strip("-").isdigit(),
        ),
        ({"structural_tag": json.dumps({"format": {"type": "const_string", "value": "yes"}})}, "yes".__eq__),
    ):
        answer = server.client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=30, extra_body={"structured_outputs": structured}
        )
        assert fits(answer.choices[0].message.content or ""), (structured, answer.choices[0].message.content)


class Person(pydantic.BaseModel):
    name: Literal["Ada", "Alan"]
    born: Annotated[int, pydantic.Field(ge=1800, le=1999)]


def test_the_client_parses_what_it_asked_for_whole_and_streamed(server: Server) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Who?"}],
        "max_tokens": 200,
        "temperature": 0,
    }
    answer = server.client.chat.completions.parse(**asked, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)
    with server.client.chat.completions.stream(**asked, response_format=Person) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person)
    assert "content.delta" in kinds
    assert kinds[-1] == "content.done"


def test_the_async_client_streams_a_form_and_meets_its_errors(server: Server) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            asked: dict[str, Any] = {"model": MODEL, "messages": CHAT["messages"], "max_tokens": 200, "stream": True}
            form: Any = {"type": "json_object"}
            text = ""
            async for chunk in await client.chat.completions.create(**asked, response_format=form, temperature=0):
                text += chunk.choices[0].delta.content or ""
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**asked, temperature=-1)
            assert refused.value.param == "temperature"
            assert refused.value.request_id == refused.value.response.headers["x-request-id"]
            return text

    assert isinstance(json.loads(asyncio.run(ask())), dict)


def test_a_request_has_the_name_that_its_client_gave_it(server: Server) -> None:
    raw = server.client.chat.completions.with_raw_response.create(
        model=MODEL, messages=CHAT["messages"], max_tokens=1, extra_headers={"X-Request-Id": "mine-7"}
    )
    assert raw.headers["x-request-id"] == "mine-7"
    assert raw.parse().id == "chatcmpl-mine-7"
    assert raw.parse()._request_id == "mine-7"


# ---- streams, as they are on the wire -----------------------------------------------------------------------------


def events(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]


def test_usage_comes_in_a_chunk_of_its_own_and_null_before(server: Server, offline: dict[str, Any]) -> None:
    asked = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0, "stream": True}
    response = post(server, "/v1/completions", json=asked | {"stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = events(response)
    assert done == "[DONE]"
    assert all(json.loads(chunk)["usage"] is None for chunk in chunks)
    final = json.loads(last)
    assert final["choices"] == []
    want = offline[PROMPTS[0]]
    assert final["usage"]["prompt_tokens"] == len(want.prompt_token_ids)
    assert final["usage"]["completion_tokens"] == len(want.outputs[0].token_ids)
    for options in (None, {}, {"continuous_usage_stats": True}):
        plain = events(post(server, "/v1/completions", json=asked | {"stream_options": options}))
        assert all("usage" not in json.loads(chunk) for chunk in plain[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    counted = events(post(server, "/v1/completions", json=asked | {"stream_options": options}))[:-1]
    counts = [json.loads(chunk)["usage"]["completion_tokens"] for chunk in counted]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == len(want.outputs[0].token_ids)


def test_cached_tokens_are_told(server: Server) -> None:
    prompt = "# a prompt that is long enough to fill blocks of the cache\n" * 8
    for _ in range(2):
        usage = server.client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert 0 < (usage.prompt_tokens_details.cached_tokens or 0) < usage.prompt_tokens


def test_a_failure_on_the_way_is_an_event_and_the_end(start_server: StartServer) -> None:
    with start_server(request_timeout=0.8) as hurried:
        asked = {"model": MODEL, "prompt": "x", "max_tokens": 1900, "stream": True, "ignore_eos": True}
        found = events(post(hurried, "/v1/completions", json=asked))
        assert "[DONE]" not in found
        error = json.loads(found[-1])["error"]
        assert error["type"] == "timeout_error"
        assert "0.8 s" in error["message"]
        with pytest.raises(openai.APIError, match="longer than"):
            list(
                hurried.client.completions.create(
                    model=MODEL, prompt="x", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
                )
            )
        assert hurried.wait_idle()


def test_a_quiet_stream_is_kept_alive(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.serving.http.sse.KEEP_ALIVE", 0.0005)
    asked = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 60, "stream": True, "ignore_eos": True}
    response = post(server, "/v1/completions", json=asked)
    assert ": keep-alive\n\n" in response.text
    assert events(response)[-1] == "[DONE]"
    list(server.client.completions.create(model=MODEL, prompt="x", max_tokens=60, stream=True))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(server: Server, stream: bool) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(
        {"model": MODEL, "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    ).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        deadline = time.monotonic() + PATIENCE
        while server.api.client.num_open == 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert server.api.client.num_open == 1
    assert server.wait_idle()


@pytest.mark.few(1)
@pytest.mark.parametrize("reads_again", [True, False])
def test_a_client_that_does_not_read_is_cut(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, reads_again: bool
) -> None:
    monkeypatch.setattr("ridgeline.serving.http.sse.STALLED", 30.0 if reads_again else 2.0)
    monkeypatch.setattr("ridgeline.serving.http.sse.KEEP_ALIVE", 1.0)
    body = TEXT | {"max_tokens": 1900, "ignore_eos": True, "logprobs": 20, "stream": True}
    content = json.dumps(body).encode()
    with start_server(stream_buffer=16) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
        host, port = server.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        connection.sendall(head.encode() + content)
        deadline = time.monotonic() + PATIENCE
        client = server.api.client
        assert connection.recv(1, socket.MSG_PEEK), "it has begun"
        while client.num_open and time.monotonic() < deadline:
            time.sleep(0.05)
        assert client.num_open == 0, "the engine goes on for nobody"
        if not reads_again:
            assert server.wait_idle(), "its place in the queue is not given back"
        connection.settimeout(PATIENCE)
        received = b"".join(iter(lambda: connection.recv(1 << 20), b""))
        assert b"[DONE]" not in received
        assert (b'"slow_reader"' in received) == reads_again


# ---- errors -------------------------------------------------------------------------------------------------------

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL, "prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("chat/completions", CHAT | {"model": "gpt-9"}, 404, "model", "model_not_found"),
        ("chat/completions", {"model": MODEL}, 400, "messages", None),
        ("chat/completions", CHAT | {"messages": []}, 400, "messages", None),
        ("chat/completions", CHAT | {"messages": [{"content": "x"}]}, 400, "messages.0.role", None),
        ("chat/completions", CHAT | {"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content", None),
        ("chat/completions", CHAT | {"temperature": "hot"}, 400, "temperature", None),
        ("chat/completions", CHAT | {"temperature": -1}, 400, "temperature", None),
        ("chat/completions", CHAT | {"n": 1000}, 400, "n", None),
        ("chat/completions", CHAT | {"top_logprobs": 3}, 400, "top_logprobs", None),
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": -2}, 400, "top_logprobs", None),
        ("chat/completions", CHAT | {"max_tokens": 4000}, 400, "messages", "context_length_exceeded"),
        ("chat/completions", CHAT | {"stream_options": {"include_usage": True}}, 400, "stream_options", None),
        ("chat/completions", CHAT | {"response_format": {"type": "xml"}}, 400, "response_format.type", None),
        ("chat/completions", CHAT | {"structured_outputs": {"regex": "("}}, 400, "structured_outputs", None),
        ("completions", TEXT | {"structured_outputs": {"grammar": 'root ::= "'}}, 400, "structured_outputs", None),
        *(
            (
                "completions",
                TEXT | {"structured_outputs": {"regex": "a", name: value}},
                400,
                f"structured_outputs.{name}",
                None,
            )
            for name, value in (("whitespace_pattern", " "), ("coerce_one_of", True), ("disable_any_whitespace", True))
        ),
        ("completions", TEXT | {"response_format": {"type": "structural_tag"}}, 400, "response_format", None),
        (
            "completions",
            TEXT | {"structured_outputs": {"structural_tag": "{"}},
            400,
            "structured_outputs.structural_tag",
            None,
        ),
        ("chat/completions", CHAT | {"chat_template_kwargs": {"tools": 1}}, 400, "chat_template_kwargs.tools", None),
        ("completions", {"model": MODEL}, 400, "prompt", None),
        ("completions", TEXT | {"prompt": "", "add_special_tokens": False}, 400, "prompt", None),
        ("completions", TEXT | {"prompt": []}, 400, "prompt", None),
        ("completions", TEXT | {"prompt": [1, -2]}, 400, "prompt", None),
        ("completions", TEXT | {"prompt": [10**6]}, 400, "prompt", None),
        ("completions", TEXT | {"prompt": "word " * 3000}, 400, "prompt", "context_length_exceeded"),
        ("completions", TEXT | {"prompt": "x" * 10**6}, 400, "prompt", "context_length_exceeded"),
        ("completions", TEXT | {"logprobs": -2}, 400, "logprobs", None),
        ("completions", TEXT | {"logprobs": True}, 400, "logprobs", None),
        ("completions", TEXT | {"max_tokens": 0}, 400, "max_tokens", None),
        ("completions", TEXT | {"best_of": 4, "stream": True}, 400, "best_of", None),
        ("completions", TEXT | {"best_of": 1, "n": 2}, 400, "best_of", None),
        ("completions", TEXT | {"best_of": 2, "temperature": 0}, 400, "best_of", None),
        ("completions", TEXT | {"best_of": 1000}, 400, "best_of", None),
        ("chat/completions", CHAT | {"best_of": 4, "stream": True}, 400, "best_of", None),
        ("completions", TEXT | {"typical_p": 0.0}, 400, "typical_p", None),
        ("completions", TEXT | {"allowed_token_ids": []}, 400, "allowed_token_ids", None),
        ("completions", TEXT | {"allowed_token_ids": [10**6]}, 400, "allowed_token_ids", None),
        ("completions", TEXT | {"allowed_token_ids": [7] * 10**5}, 400, "allowed_token_ids", None),
        ("completions", TEXT | {"bad_words": "word"}, 400, "bad_words", None),
        ("completions", TEXT | {"bad_words": [""]}, 400, "bad_words.0", None),
        ("completions", TEXT | {"bad_words": ["x", 5]}, 400, "bad_words.1", None),
        ("completions", TEXT | {"bad_words": [["x"]]}, 400, "bad_words.0", None),
        ("completions", TEXT | {"bad_words": [[5, 10**6]]}, 400, "bad_words", None),
        ("completions", TEXT | {"bad_words": ["x"] * 1025}, 400, "bad_words", None),
        ("completions", TEXT | {"bad_words": [f"{i} " * 50 for i in range(500)]}, 400, "bad_words", None),
        ("completions", TEXT | {"allowed_token_ids": [7], "bad_words": [[7]]}, 400, "allowed_token_ids", None),
        ("chat/completions", CHAT | {"stop": "x", "detokenize": False}, 400, "stop", None),
        ("completions", TEXT | {"suffix": "end"}, 400, "suffix", None),
        ("completions", TEXT | {"logit_bias": {"x": 1}}, 400, "logit_bias", None),
        ("completions", TEXT | {"logit_bias": {"999999": 1}}, 400, "logit_bias", None),
        ("completions", TEXT | {"stop": [1]}, 400, "stop", None),
        ("completions", [1], 400, None, None),
    ],
)
def test_what_is_wrong_is_told_in_openais_shape(
    server: Server, path: str, body: Any, status: int, param: str | None, code: str | None
) -> None:
    response = post(server, f"/v1/{path}", json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (param, code), error["message"]


def test_deep_and_broken_bodies_are_refused(server: Server) -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"properties": {"a": deep}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}
    assert (
        "deep" in post(server, "/v1/chat/completions", json=CHAT | {"response_format": form}).json()["error"]["message"]
    )
    for content in (b"{", b"", b'{"a": NaN}', b"[" * 60_000, b'{"a": 1e999}', b"\xff"):
        response = post(server, "/v1/completions", content=content)
        assert response.status_code == 400
        assert "not valid JSON" in response.json()["error"]["message"]


MANY = 300_000


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (TEXT | {"stop_token_ids": ["a"] * MANY}, "stop_token_ids.0"),
        (TEXT | {"logit_bias": dict.fromkeys(map(str, range(MANY)), "x")}, "logit_bias"),
        (TEXT | {"stop": [1] * MANY}, "stop"),
        (TEXT | {"allowed_token_ids": ["a"] * MANY}, "allowed_token_ids.0"),
        (TEXT | {"bad_words": [5] * MANY}, "bad_words.0"),
        (TEXT | {"bad_words": [["a"] * MANY]}, "bad_words.0"),
        (TEXT | {"bad_words": [list(range(MANY))]}, "bad_words.0"),
        (TEXT | {"prompt": ["a", 1] * MANY}, "prompt"),
        (TEXT | {"structured_outputs": {"choice": [1] * MANY}}, "structured_outputs.choice.0"),
        (CHAT | {"messages": [{"role": "user", "content": [1] * MANY}]}, "messages.0.content"),
        (CHAT | {"messages": [{"role": "user", "content": 5}] * MANY}, "messages.0.content"),
        (CHAT | {"messages": [{"role": "user", "content": "x"}] * MANY}, "messages"),
        (CHAT | {"tools": [1] * MANY}, "tools.0"),
        (CHAT | {"documents": [1] * MANY}, "documents.0"),
        (CHAT | {"messages": [{"role": "user", "tool_calls": [1] * MANY}]}, "messages.0.tool_calls.0"),
        ({"tokens": ["a"] * MANY}, "tokens.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_body_that_is_wrong_many_times_costs_no_more_than_once(body: Any, param: str) -> None:
    model: Any = ChatBody if "messages" in body else DetokenizeBody if "tokens" in body else CompletionBody
    began = time.process_time()
    with pytest.raises(BadRequest) as refused:
        parse(model, body)
    assert time.process_time() - began < 2, "each wrong item was looked at"
    assert refused.value.param == param
    assert len(refused.value.message) < 300


@pytest.mark.parametrize("structured", [{"regex": "((a{1000}){1000}){1000}"}, {"grammar": 'start: "a" start'}])
def test_a_text_without_end_is_written_as_far_as_it_may_be(server: Server, structured: dict[str, Any]) -> None:
    """No step computes the whole text that such a grammar forces."""
    response = post(server, "/v1/completions", json=TEXT | {"structured_outputs": structured, "max_tokens": 8})
    choice = response.json()["choices"][0]
    assert set(choice["text"]) == {"a"}
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        ({"regex": "(" * 20_000 + "a" + ")" * 20_000}, "invalid regex"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "does not fetch"),
    ],
)
def test_a_grammar_beyond_the_librarys_limits_is_the_clients_mistake(
    server: Server, structured: dict[str, Any], words: str
) -> None:
    response = post(server, "/v1/completions", json=TEXT | {"structured_outputs": structured})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "structured_outputs"
    assert words in error["message"].lower()
    assert len(error["message"]) < 600
    assert "\n" not in error["message"]
    assert server.wait_idle()


def test_a_template_that_does_not_end_is_stopped_and_keeps_nobody_waiting(
    start_server: StartServer, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.text.chat_template.SECONDS", 1.5)
    template = tmp_path / "template.jinja"
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template.write_text("{% if forever %}" + loop + "{% endif %}x")
    with start_server(chat_template=str(template)) as stuck, ThreadPoolExecutor(1) as pool:
        assert post(stuck, "/v1/completions", json=TEXT | {"max_tokens": 1}).status_code == 200, "its routes are made"
        refused = pool.submit(
            post, stuck, "/v1/chat/completions", json=CHAT | {"chat_template_kwargs": {"forever": True}}
        )
        time.sleep(0.3)
        assert post(stuck, "/v1/completions", json=TEXT | {"max_tokens": 1}).status_code == 200
        assert not refused.done()
        error = refused.result().json()["error"]
        assert (error["param"], error["type"]) == ("messages", "invalid_request_error")
        assert "longer than 1.5 s" in error["message"]


def test_a_templates_variable_may_have_any_name(server: Server) -> None:
    kwargs = {"self": 1, "source": 2, "x y": 3, "__class__": 4}
    asked = CHAT | {"chat_template_kwargs": kwargs, "max_tokens": 1}
    assert post(server, "/v1/chat/completions", json=asked).status_code == 200


def test_routes_that_are_not_there(server: Server) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        response = httpx.request(method, server.url + path)
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_client_raises_its_own_errors(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        server.client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        server.client.completions.create(model=MODEL, prompt="x", max_tokens=100_000)
    assert long.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_tries_again_where_the_server_is_full_or_ending(start_server: StartServer, stream: bool) -> None:
    with start_server(max_queue_requests=1) as small:
        admission = small.api.service.admission
        for status, error in ((429, openai.RateLimitError), (503, openai.InternalServerError)):
            admission.open_requests, admission.draining = int(status == 429), status == 503
            with pytest.raises(error) as raised:
                small.client.completions.create(model=MODEL, prompt="x", stream=stream)
            assert raised.value.status_code == status
            assert int(raised.value.response.headers["retry-after"]) >= 1
        admission.open_requests, admission.draining = 1, False

        def make_room() -> None:
            admission.open_requests = 0

        small.loop.call_soon_threadsafe(small.loop.call_later, 0.2, make_room)
        answer: Any = small.client.with_options(max_retries=3).completions.create(
            model=MODEL, prompt="x", stream=stream, max_tokens=2
        )
        assert list(answer) if stream else answer.choices


def test_a_queue_timeout_ends_what_gets_no_token(start_server: StartServer) -> None:
    with start_server(queue_timeout=1e-6) as hasty:
        response = post(hasty, "/v1/completions", json=TEXT | {"stream": True})
        assert response.status_code == 504
        assert "no token came" in response.json()["error"]["message"]
        assert hasty.wait_idle()


# ---- the rest -----------------------------------------------------------------------------------------------------


def test_models_and_tokens(server: Server) -> None:
    models = server.client.models.list().data
    assert [model.id for model in models] == [MODEL, "alias"]
    assert models[0].model_extra is not None
    assert models[0].model_extra["max_model_len"] == 2048
    assert server.client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("a/b")
    text = "naïve ☃ = 1\n"
    answer = post(server, "/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == server.api.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert len(answer["token_strs"]) == answer["count"]
    assert answer["max_model_len"] == 2048
    assert post(server, "/detokenize", json={"tokens": answer["tokens"][1:]}).json() == {
        "prompt": text,
        "content": text,
    }
    chat = post(server, "/tokenize", json={"messages": CHAT["messages"]}).json()
    rendered = server.api.chat_template.render(CHAT["messages"])  # type: ignore[arg-type]
    assert chat["tokens"] == server.api.tokenizer.encode(rendered, False)
    info, file = httpx.get(server.url + "/tokenizer_info").json(), EMBEDDED_MODEL / "tokenizer_config.json"
    config = json.loads(file.read_text())
    for name in ("bos_token", "eos_token", "chat_template", "model_max_length", "tokenizer_class"):
        assert info[name] == config[name], name
    assert info["vocab_size"] == server.api.tokenizer.vocab_size
    assert httpx.get(server.url + "/version").json()["version"]


def test_a_breakdown_on_demand(server: Server) -> None:
    found = post(server, "/v1/completions", json=TEXT | {"include_breakdown": True}).json()["ridgeline"]
    assert found["completions"][0]["total"] > 0
    assert httpx.get(f"{server.url}/v1/requests/{found['id']}").json()["id"] == found["id"]
    assert "ridgeline" not in post(server, "/v1/completions", json=TEXT).json()


def test_every_reference_in_the_document_leads_somewhere(server: Server) -> None:
    document = httpx.get(server.url + "/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"} <= set(document["paths"])

    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [ref for each in value.values() for ref in references(each)]
        return [ref for each in value for ref in references(each)] if isinstance(value, list) else []

    found = references(document)
    assert found
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatBody"}
    assert "messages" in document["components"]["schemas"]["ChatBody"]["required"]


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"echo": True, "logprobs": 1}, {"n": 2, "temperature": 1.0}])
def test_answers_are_what_the_document_says(server: Server, extra: dict[str, Any]) -> None:
    asked = extra | {"max_tokens": 4, "return_token_ids": True, "include_breakdown": True}
    if "echo" not in extra:
        logprobs = {"logprobs": True, "top_logprobs": extra["logprobs"]} if "logprobs" in extra else {}
        whole = post(server, "/v1/chat/completions", json=CHAT | asked | logprobs | {"prompt_logprobs": 1})
        msgspec.json.decode(whole.content, type=answers.Chat)
        for event in events(post(server, "/v1/chat/completions", json=CHAT | asked | logprobs | {"stream": True}))[:-1]:
            msgspec.json.decode(event, type=answers.ChatChunk)
        for event in events(post(server, "/v1/completions", json=TEXT | asked | {"stream": True}))[:-1]:
            msgspec.json.decode(event, type=answers.CompletionChunk)
    whole = post(server, "/v1/completions", json=TEXT | asked | {"prompt_logprobs": 1})
    msgspec.json.decode(whole.content, type=answers.Completion)
    msgspec.json.decode(post(server, "/v1/completions", json={}).content, type=answers.ErrorAnswer)


def test_tools_and_roles_reach_the_template(start_server: StartServer, tmp_path: Any) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
        "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ mood }}"
    )
    with start_server(chat_template=str(template)) as other:
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        messages = [
            {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ]
        tools = [{"type": "function", "function": {"name": "weather"}}]
        body = {"messages": messages, "tools": tools, "chat_template_kwargs": {"mood": "!"}}
        ids = post(other, "/tokenize", json=body).json()["tokens"]
        text = post(other, "/detokenize", json={"tokens": ids}).json()["prompt"]
        assert text == "[system]be brief[assistant]Oslo[tool]rainweather!"

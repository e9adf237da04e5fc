"""Nothing of a request is ignored in silence: every field of OpenAI's and vLLM's bodies, sent to a real server."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import openai
import pytest

from ridgeline.serving.http import exchange
from ridgeline.serving.requests.fields import HARMLESS, REFUSED, refused_by
from ridgeline.text.infill import infill, marks
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline_bench.scripts.api_fields import APIS, BODIES, PAGE, page, state
from tests.serving.clients.asked import needing
from tests.serving.conftest import MODEL, Server, StartServer

TEXT: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 3, "temperature": 0}
USER = {"role": "user", "content": "Once upon"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 3, "temperature": 0}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "Once upon", "max_output_tokens": 3, "temperature": 0}
ROUTES = {
    "completions": ("/v1/completions", TEXT),
    "chat": ("/v1/chat/completions", CHAT),
    "responses": ("/v1/responses", RESPONSE),
    "messages": ("/v1/messages", CHAT),
}
# A value of each implemented field, with what it needs beside it.
SAMPLED: dict[str, Any] = {
    "length_penalty": {"use_beam_search": True, "length_penalty": 2.0, "n": 2},
    "truncation_side": {"truncate_prompt_tokens": 2, "truncation_side": "right"},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "stream_interval": {"stream": True, "stream_interval": 2},
    "best_of": {"best_of": 2, "temperature": 1},
    "n": {"n": 2, "temperature": 1},
    **{name: {name: True} for name in ("stream", "echo", "ignore_eos", "return_token_ids", "use_beam_search")},
    **{
        name: {name: True}
        for name in ("include_stop_str_in_output", "return_tokens_as_token_ids", "return_weight_versions")
    },
    **{name: {name: False} for name in ("skip_special_tokens", "add_special_tokens")},
    **{name: {name: 0.5} for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")},
    **{name: {name: 2} for name in ("max_tokens", "min_tokens", "top_k", "seed", "priority", "prompt_logprobs")},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 2},
    "allowed_token_ids": {"allowed_token_ids": [5, 6]},
    "logit_bias": {"logit_bias": {"5": 1}},
    "stop": {"stop": ["x"]},
    "stop_token_ids": {"stop_token_ids": [5]},
    "bad_words": {"bad_words": ["x"]},
    "cache_salt": {"cache_salt": "x"},
    "request_id": {"request_id": "x"},
    "model": {"model": MODEL},
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"choice": ["a", "b"]}},
    "repetition_detection": {"repetition_detection": {"max_pattern_size": 2, "min_count": 3}},
}
NAMES = """temperature top_p top_k presence_penalty frequency_penalty repetition_penalty seed priority logit_bias
cache_salt request_id model stream ignore_eos skip_special_tokens include_stop_str_in_output structured_outputs"""
PLAIN = {name: SAMPLED[name] for name in NAMES.split()}  # what every API has
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CACHED = {
    "prompt_cache_key": {"prompt_cache_key": "a"},
    "prompt_cache_retention": {"prompt_cache_retention": "in_memory"},
}
VALUES: dict[str, dict[str, Any]] = {
    "completions": SAMPLED
    | {"prompt": {"prompt": [1, 2]}, "logprobs": {"logprobs": 2}, "suffix": {"suffix": ""}}
    | {"logprob_token_ids": {"logprobs": 0, "logprob_token_ids": [5, 6]}},
    "chat": {name: fields for name, fields in SAMPLED.items() if name != "best_of"}
    | CACHED
    | {name: {name: False} for name in ("parallel_tool_calls", "include_reasoning", "add_generation_prompt")}
    | {
        "logprobs": {"logprobs": True},
        "top_logprobs": {"logprobs": True, "top_logprobs": 2},
        "logprob_token_ids": {"logprobs": True, "logprob_token_ids": [5, 6]},
        "messages": {"messages": [USER, {"role": "assistant", "content": "a"}, USER]},
        "tools": {"tools": [TOOL]},
        "tool_choice": {"tools": [TOOL], "tool_choice": "none"},
        "max_completion_tokens": {"max_completion_tokens": 2},
        "continue_final_message": {"continue_final_message": True},
        "chat_template_kwargs": {"chat_template_kwargs": {"a": 1}},
        "documents": {"documents": [{"text": "a"}]},
        "reasoning_effort": {"reasoning_effort": "low"},
        "return_prompt_text": {"return_prompt_text": True},
    },
    "responses": PLAIN
    | CACHED
    | {name: {name: False} for name in ("background", "parallel_tool_calls", "store")}
    | {
        "stream_options": {"stream": True, "stream_options": {}},
        "include": {"include": ["message.output_text.logprobs"]},
        "include_reasoning": {"include_reasoning": False},
        "chat_template_kwargs": {"chat_template_kwargs": {"a": 1}},
        "min_p": {"min_p": 0.5},
        "stop_token_ids": {"stop_token_ids": [5]},
        "top_logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        "input": {"input": [USER]},
        "instructions": {"instructions": "a"},
        "max_output_tokens": {"max_output_tokens": 2},
        "metadata": {"metadata": {"a": "b"}},
        "reasoning": {"reasoning": {"effort": "low"}},
        "stop": {"stop": ["x"]},
        "text": {"text": {"format": {"type": "json_object"}}},
        "tools": {"tools": [FUNCTION]},
        "tool_choice": {"tools": [FUNCTION], "tool_choice": "none"},
        "truncation": {"truncation": "auto"},
    },
    "messages": {name: PLAIN[name] for name in ("temperature", "top_p", "top_k", "model", "stream")}
    | {
        "max_tokens": {"max_tokens": 2},
        "messages": {"messages": [USER, {"role": "assistant", "content": "a"}, USER]},
        "cache_control": {"cache_control": {"type": "ephemeral"}},
        "output_config": {"output_config": {"effort": "low"}},
        "output_format": {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
        "stop_sequences": {"stop_sequences": ["x"]},
        "system": {"system": "a"},
        "tools": {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        "tool_choice": {"tool_choice": {"type": "none"}},
        "chat_template_kwargs": {"chat_template_kwargs": {"a": 1}},
        "cache_salt": {"cache_salt": "x"},
    },
}
# These need an operator's flag, or a model that reasons; their own tests have them.
ELSEWHERE = {
    "chat_template",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "thinking_token_budget",
    "thinking",
    "previous_response_id",
    "prompt_embeds",
}


def post(server: Server, route: str, **fields: Any) -> httpx.Response:
    path, body = ROUTES[route]
    return httpx.post(server.url + path, json=body | fields, timeout=60)


def test_the_page_is_what_the_server_reads_by() -> None:
    assert PAGE.read_text() == page(), "python -m ridgeline_bench.scripts.api_fields"


def test_openais_client_has_no_field_that_is_not_listed() -> None:
    from openai.types import batch_create_params as batches
    from openai.types import completion_create_params as completions
    from openai.types import file_create_params as files
    from openai.types.chat import completion_create_params as chats
    from openai.types.responses import input_token_count_params as counts
    from openai.types.responses import response_create_params as responses

    assert openai.VERSION
    theirs = {
        "completions": completions.CompletionCreateParamsBase.__annotations__,
        "chat": chats.CompletionCreateParamsBase.__annotations__,
        "responses": responses.ResponseCreateParamsBase.__annotations__,
        "input_tokens": counts.InputTokenCountParams.__annotations__,
        "batches": batches.BatchCreateParams.__annotations__,
        "files": files.FileCreateParams.__annotations__,
    }
    for route, names in theirs.items():
        assert names.keys() <= APIS[route]["OpenAI"], route


@needing("anthropic")
def test_anthropics_client_has_no_field_that_is_not_listed() -> None:
    import anthropic

    for types in (anthropic.types, anthropic.types.beta):
        names = types.message_create_params.MessageCreateParamsBase.__annotations__.keys()
        assert names - {"betas"} <= APIS["messages"]["Anthropic"]  # a header
        counted = types.message_count_tokens_params.MessageCountTokensParams.__annotations__.keys()
        assert counted - {"betas"} <= APIS["count_tokens"]["Anthropic"]


@pytest.mark.parametrize("route", ROUTES)
def test_every_refused_field_is_refused_by_name_and_every_harmless_one_is_named(server: Server, route: str) -> None:
    names = frozenset[str]().union(*APIS[route].values())
    states = {name: state(BODIES[route], name)[0] for name in names}
    assert set(states.values()) == {"implemented", "refused", "harmless"}
    refused = [name for name in sorted(names) if states[name] == "refused"]
    for name in refused:
        answer = post(server, route, **{name: ["something"]})
        assert answer.status_code == 400, name
        error = answer.json()["error"]
        assert name in error["message"] if route == "messages" else name == error["param"]
    refusals = REFUSED | dict(refused_by(BODIES[route][0]))
    idle = {name: refusals[name].idle[0] for name in refused if refusals[name].idle}
    answer = post(server, route, **idle)
    assert answer.status_code == 200, answer.text
    assert "ridgeline-ignored" not in answer.headers
    harmless = [name for name in sorted(names) if states[name] == "harmless"]
    assert set(harmless) <= HARMLESS.keys() | set(getattr(BODIES[route][0], "harmless", ()))
    answer = post(server, route, **dict.fromkeys(harmless, "x"))
    assert answer.status_code == 200, answer.text
    assert answer.headers["ridgeline-ignored"].split(", ") == harmless
    stream = post(server, route, stream=True, user="x")
    assert stream.headers["ridgeline-ignored"] == "user"
    assert "data: " in stream.text


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_a_session_that_is_kept_shorter_than_it_asks_is_told(server: Server, route: str) -> None:
    """The server keeps sessions for an hour at most."""
    for fields, said in (
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"prompt_cache_ttl": 3600, "prompt_cache_retention": "24h"}, None),
        ({"prompt_cache_key": "a"}, None),
    ):
        assert post(server, route, **fields).headers.get("ridgeline-ignored") == said


def test_a_field_without_effect_is_told_once_in_the_log(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_told", set())
    with caplog.at_level(logging.INFO, exchange.logger.name):
        for fields in ({"user": "a"}, {"user": "b"}, {"user": "c", "prediction": "x"}):
            answer = post(server, "chat", **fields)
            assert answer.headers["ridgeline-ignored"] == ", ".join(sorted(fields))
    told = [record.getMessage() for record in caplog.records if record.name == exchange.logger.name]
    assert told == [f"requests have fields without effect here: {name} (told once)" for name in ("user", "prediction")]


@pytest.mark.parametrize("route", ROUTES)
def test_every_implemented_field_is_taken(server: Server, route: str) -> None:
    names = frozenset[str]().union(*APIS[route].values())
    implemented = {name for name in names if state(BODIES[route], name)[0] == "implemented"}
    assert implemented == VALUES[route].keys() | (implemented & ELSEWHERE)
    for name, fields in VALUES[route].items():
        answer = post(server, route, **fields)
        assert answer.status_code == 200, (name, answer.text)
        assert "ridgeline-ignored" not in answer.headers, name


@pytest.mark.parametrize(
    ("route", "path", "like", "needed"),
    [
        ("input_tokens", "/v1/responses/input_tokens", "responses", {"input": "Once upon"}),
        ("count_tokens", "/v1/messages/count_tokens", "messages", {"messages": [USER]}),
    ],
)
def test_routes_that_count_take_what_the_page_says(
    server: Server, route: str, path: str, like: str, needed: dict[str, Any]
) -> None:
    for name in sorted(frozenset[str]().union(*APIS[route].values())):
        found, _ = state(BODIES[route], name)
        fields = VALUES[like].get(name, {}) if found == "implemented" else {name: ["something"]}
        answer = httpx.post(server.url + path, json={"model": MODEL} | needed | fields, timeout=60)
        if found == "refused":
            assert answer.status_code == 400, name
            assert name in answer.json()["error"]["message"]
        else:
            assert answer.status_code == 200, (name, answer.text)
            assert answer.json()["input_tokens"] > 0
            assert answer.headers.get("ridgeline-ignored") == (name if found == "harmless" else None)
    answer = httpx.post(server.url + path, json={"model": MODEL} | needed | {"max_tokens": 3}, timeout=60)
    assert "max_tokens" in answer.json()["error"]["message"]


def test_a_suffix_becomes_a_prompt_of_the_models_tokens() -> None:
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    assert marks(tokenizer) is None
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    tokenizer.backend.add_special_tokens(names)
    ids = marks(tokenizer)
    assert ids is not None
    found = infill(tokenizer, "There was", "cat.", ids)
    text = tokenizer.decode(found, skip_special_tokens=False)
    assert text.endswith("<|fim_prefix|>There was<|fim_suffix|>cat.<|fim_middle|>")


def test_a_misspelled_field_is_refused_with_the_nearest_name(server: Server) -> None:
    for route in ("completions", "chat"):
        for wrong, right in (("temprature", "temperature"), ("max_new_tokens", "max_tokens")):
            error = post(server, route, **{wrong: 1}).json()["error"]
            assert error["param"] == wrong
            assert f"did you mean {right}?" in error["message"]
    error = post(server, "chat", stream=True, stream_options={"include_usages": True}).json()["error"]
    assert error["param"] == "stream_options.include_usages"
    error = post(server, "chat", structured_outputs={"jsn": {}}).json()["error"]
    assert error["param"] == "structured_outputs.jsn"
    answer = httpx.post(f"{server.url}/detokenize", json={"token": [1]})
    assert answer.json()["error"]["param"] == "token"


def test_an_operator_may_let_unknown_fields_pass_which_are_named_still(start_server: StartServer) -> None:
    with start_server(unknown_fields="ignore", trust_request_chat_template=True) as server:
        answer = post(server, "chat", **{"temprature": 1, "evil\r\nname": 2})
        assert answer.status_code == 200
        assert answer.headers["ridgeline-ignored"] == "temprature"
        own = "{% for m in messages %}{{ m.content }}{% endfor %}"
        answer = post(server, "chat", chat_template=own, return_prompt_text=True)
        assert answer.json()["prompt_text"] == "Once upon"


def test_numbers_may_come_as_text_and_with_a_point(server: Server) -> None:
    plain = post(server, "completions", seed=5, top_k=3).json()["choices"]
    assert (
        post(server, "completions", max_tokens="3", temperature="0.0", seed="5", top_k=3.0).json()["choices"] == plain
    )
    for wrong in ("5x", "", "1e3", 5.5, True, "9" * 100):
        assert post(server, "completions", max_tokens=wrong).json()["error"]["param"] == "max_tokens"


def test_the_last_message_is_gone_on_with(server: Server) -> None:
    begun = [USER, {"role": "assistant", "content": "There was a "}]
    asked = {"messages": begun, "continue_final_message": True, "return_prompt_text": True}
    answer = post(server, "chat", **asked, echo=True).json()
    assert answer["prompt_text"].endswith("There was a ")
    assert answer["choices"][0]["message"]["content"].startswith("There was a ")
    stream = post(server, "chat", **asked, echo=True, stream=True).text
    assert '"content":"There was a "' in stream
    error = post(server, "chat", **asked, add_generation_prompt=True).json()["error"]
    assert error["param"] == "continue_final_message"
    assert post(server, "chat", chat_template="x").json()["error"]["param"] == "chat_template"


def test_a_prompt_is_cut_on_either_side(server: Server) -> None:
    def ids(**fields: Any) -> list[int]:
        found: list[int] = post(server, "completions", return_token_ids=True, **fields).json()["choices"][0][
            "prompt_token_ids"
        ]
        return found

    whole = ids(prompt=[7, 8, 9, 10, 11])
    assert ids(prompt=whole, truncate_prompt_tokens=2) == [10, 11]
    assert ids(prompt=whole, truncate_prompt_tokens=2, truncation_side="right") == [7, 8]
    assert ids(prompt=whole, truncate_prompt_tokens=-1) == whole
    text = ids()
    assert ids(truncate_prompt_tokens=len(text) - 1)[-1] == text[-1]
    assert len(ids(truncate_prompt_tokens=len(text) - 1)) == len(text) - 1
    room = server.api.service.facts().max_model_len
    assert post(server, "completions", truncate_prompt_tokens=room + 1).status_code == 400


def test_beams_are_those_of_the_offline_search(server: Server) -> None:
    from ridgeline import LLM
    from ridgeline.text.beams import BeamSearchParams

    asked = {"use_beam_search": True, "n": 3, "max_tokens": 6, "length_penalty": 0.5, "ignore_eos": True}
    told = post(server, "completions", **asked, return_token_ids=True).json()
    params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.5, ignore_eos=True)
    llm = LLM(dtype="float32")
    [found] = llm.beam_search([TEXT["prompt"]], params)
    assert [choice["token_ids"] for choice in told["choices"]] == [each.token_ids for each in found.outputs]
    assert [choice["text"] for choice in told["choices"]] == [each.text for each in found.outputs]
    assert told["usage"]["completion_tokens"] == 18
    assert len(post(server, "chat", **asked).json()["choices"]) == 3
    for wrong in ({"top_p": 0.5}, {"stop": ["x"]}, {"logprobs": 1}, {"n": 65}):
        [name] = wrong
        assert post(server, "completions", **(asked | wrong)).json()["error"]["param"] == name
    assert post(server, "completions", length_penalty=2).json()["error"]["param"] == "length_penalty"


def test_tokens_may_be_named_by_id_and_chunks_hold_several(server: Server) -> None:
    answer = post(server, "completions", logprobs=2, return_tokens_as_token_ids=True, return_token_ids=True).json()
    [choice] = answer["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert all(key.startswith("token_id:") for each in choice["logprobs"]["top_logprobs"] for key in each)
    asked = {"max_tokens": 9, "ignore_eos": True, "return_token_ids": True, "stream": True, "stream_interval": 4}
    lines = [line[6:] for line in post(server, "completions", **asked).text.splitlines() if line.startswith("data: {")]
    counts = [len(json.loads(line)["choices"][0]["token_ids"]) for line in lines]
    assert sum(counts) == 9
    assert all(count >= 4 for count in counts[1:-1])


def test_an_answer_has_nulls_and_the_bodys_request_id(server: Server) -> None:
    answer = post(server, "chat", request_id="mine.7")
    assert answer.headers["x-request-id"] == "mine.7"
    assert answer.json()["id"] == "chatcmpl-mine.7"
    assert answer.json()["prompt_logprobs"] is None
    assert answer.json()["prompt_token_ids"] is None
    assert post(server, "chat", request_id="a\r\nb").json()["error"]["param"] == "request_id"
    assert post(server, "completions").json()["choices"][0]["prompt_token_ids"] is None
    for asked in ({"logprobs": -2}, {"prompt_logprobs": -2}):
        [name] = asked
        assert post(server, "completions", **asked).json()["error"]["param"] == name
    assert post(server, "completions", suffix="the end.").json()["error"]["param"] == "suffix"


def test_what_a_schema_says_without_effect_is_named(server: Server) -> None:
    schema = {"properties": {"a": {"type": "string", "format": "regex"}, "b": {"format": "iri", "x-note": 1}}}
    said = "schema.format.regex, schema.x-note"
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert post(server, "chat", response_format=form).headers["ridgeline-ignored"] == said
    structured = {"json": json.dumps(schema)}
    assert post(server, "completions", structured_outputs=structured).headers["ridgeline-ignored"] == said
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</a>"}
    tagged = {"type": "structural_tag", "format": tag}
    assert post(server, "chat", response_format=tagged).headers["ridgeline-ignored"] == said
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}
    assert post(server, "chat", tools=[tool], tool_choice="required").headers["ridgeline-ignored"] == said
    assert "ridgeline-ignored" not in post(server, "chat", tools=[tool]).headers, "nothing is held to it"

"""llama.cpp's routes against what OpenAI's answer."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.serving.apis.llamacpp import completion
from ridgeline.serving.apis.llamacpp.answers import Predicted
from ridgeline.serving.apis.llamacpp.bodies import InfillBody, completion_of
from ridgeline.serving.apis.llamacpp.completion import Answer
from ridgeline.serving.generation import service
from ridgeline.serving.requests.validation import parse
from ridgeline.text import infill
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.weights.folder import EMBEDDED_MODEL
from tests.serving.conftest import MODEL, PATIENCE, Server, StartServer

TEXT = "def add(a, b):"
GREEDY: Any = {"temperature": 0, "n_predict": 12}
FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
REPOSITORY = ["<|repo_name|>", "<|file_sep|>"]
CITY: Any = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/{path}", json=body, timeout=PATIENCE)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The parts of a stream, which has no last word."""
    assert response.status_code == 200, response.text
    return [json.loads(event.removeprefix("data: ")) for event in response.text.strip().split("\n\n")]


def predicted(server: Server, path: str = "completion", **body: Any) -> Predicted:
    answer = post(server, path, **GREEDY | body)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=Predicted)


def completed(server: Server, **asked: Any) -> Any:
    asked = {"temperature": 0, "max_tokens": 12, "prompt": TEXT} | asked
    return server.client.completions.create(model=MODEL, **asked)


def test_a_completion_is_openais_whole_and_in_parts(server: Server) -> None:
    want = completed(server)
    answer = predicted(server, prompt=TEXT)
    assert answer.content == want.choices[0].text
    assert (answer.stop, answer.stop_type, answer.model, answer.prompt) == (True, "limit", MODEL, TEXT)
    assert (answer.tokens_predicted, answer.tokens_evaluated) == (12, want.usage.prompt_tokens)
    assert answer.tokens == []
    assert answer.generation_settings["temperature"] == 0  # type: ignore[index]
    times = answer.timings
    assert not isinstance(times, msgspec.UnsetType)
    assert (times.predicted_n, times.prompt_n + times.cache_n) == (12, want.usage.prompt_tokens)
    assert math.isclose(times.predicted_ms, 12 * times.predicted_per_token_ms)
    told = events(post(server, "completions", prompt=TEXT, stream=True, **GREEDY))
    parts = [msgspec.convert(part, type=Predicted) for part in told]
    assert "".join(part.content for part in parts) == answer.content
    assert [part.stop for part in parts] == [False] * (len(parts) - 1) + [True]
    assert sum(len(part.tokens) for part in parts) == 12


def test_it_takes_what_the_other_route_takes(server: Server) -> None:
    drawn = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 1.0, "seed": 7}
    found = predicted(server, prompt=TEXT, repeat_penalty=1.1, stop=["\n\n"], n_predict=40, **drawn)
    extra = {"top_k": 20, "min_p": 0.01, "typical_p": 1.0, "repetition_penalty": 1.1}
    shared = {name: drawn[name] for name in ("temperature", "top_p", "seed")}
    want = completed(server, max_tokens=40, stop=["\n\n"], **shared, extra_body=extra)
    assert found.content == want.choices[0].text
    ids = server.api.tokenizer.encode(TEXT)
    told = predicted(server, prompt=ids, return_tokens=True)
    assert server.api.tokenizer.decode(told.tokens) == told.content == completed(server).choices[0].text
    assert told.prompt == server.api.tokenizer.decode(ids, skip_special_tokens=False)
    both = post(server, "completion", prompt=[TEXT, "x ="], **GREEDY).json()
    assert [each["index"] for each in both] == [0, 1]
    assert both[1]["content"] == completed(server, prompt="x =").choices[0].text
    parts = events(post(server, "completion", prompt=[TEXT, "x ="], stream=True, **GREEDY))
    assert "".join(part["content"] for part in parts if part["index"] == 1) == both[1]["content"]
    word = both[0]["content"].split()[1]
    stopped = predicted(server, prompt=TEXT, stop=[word])
    assert (stopped.stop_type, stopped.stopping_word) == ("word", word)
    assert word not in stopped.content


def test_no_token_is_shown_where_a_prompt_is_only_read(server: Server) -> None:
    for more in ({}, {"return_tokens": True, "n_probs": 1}):
        answer = predicted(server, prompt=TEXT, **GREEDY | {"n_predict": 0}, **more)
        assert (answer.content, answer.tokens, answer.tokens_predicted) == ("", [], 0)
    [part] = events(post(server, "completion", prompt=TEXT, stream=True, n_predict=0))
    assert (part["content"], part["stop"]) == ("", True)
    context = server.api.service.facts().max_model_len
    endless = predicted(server, prompt=[5] * (context - 20), n_predict=-1, temperature=0, ignore_eos=True)
    assert (endless.tokens_evaluated, endless.tokens_predicted) == (context - 20, 20)


def test_probabilities_are_openais(server: Server) -> None:
    want = completed(server, logprobs=2).choices[0].logprobs
    found = predicted(server, prompt=TEXT, n_probs=2).completion_probabilities
    assert not isinstance(found, msgspec.UnsetType)
    assert [each.token for each in found] == want.tokens
    assert [each.logprob for each in found] == pytest.approx(want.token_logprobs, abs=1e-3)
    assert [bytes(each.bytes).decode() for each in found] == want.tokens
    assert [len(each.top_logprobs) for each in found] == [2] * 12
    parts = events(post(server, "completion", prompt=TEXT, n_probs=2, stream=True, **GREEDY))
    assert sum(len(part.get("completion_probabilities", ())) for part in parts) == 12


def test_biases_come_in_every_form(server: Server) -> None:
    tokenizer = server.api.tokenizer
    [first] = tokenizer.encode(completed(server, max_tokens=1).choices[0].text, add_special_tokens=False)[:1]
    for bias in ([[first, False]], [[first, -1e9]], {str(first): -100}):
        assert predicted(server, prompt=TEXT, logit_bias=bias, return_tokens=True, n_predict=1).tokens != [first]
    text = " import"
    ids = tokenizer.encode(text, add_special_tokens=False)
    body = completion_of(tokenizer, parse(InfillBody, {"logit_bias": [[text, 5], [3, 2.5]]}), "x")
    assert body.logit_bias == dict.fromkeys(map(str, ids), 5.0) | {"3": 2.5}
    for huge in (10**400, -(10**400)):
        assert predicted(server, prompt=TEXT, logit_bias=[[3, huge]], n_predict=1).tokens_predicted == 1
    for wrong in (
        [[[3], 1]],
        [[3, [1]]],
        [[3, {}]],
        [[10**400, 1]],
        [[2.5, 1]],
        [3],
        [None],
        [[1]],
        [["a" * 300, 1]],
        [[1, True]],
        "x",
        [[1, None]],
        [[-1, 1]],
    ):
        answer = post(server, "completion", prompt=TEXT, logit_bias=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias"), wrong


@pytest.mark.parametrize("streamed", [False, True])
def test_large_answers_are_made_beside_the_loop_and_their_settings_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    where, made, last, as_dict = list[bool](), list[Any](), Answer._last, completion.asdict

    def watched(*given: Any, **more: Any) -> Predicted:
        where.append(asyncio._get_running_loop() is None)
        return last(*given, **more)

    monkeypatch.setattr(Answer, "_last", watched)
    monkeypatch.setattr(completion, "asdict", lambda params: made.append(params) or as_dict(params))
    monkeypatch.setattr(service, "INLINE_ENTRIES", 1000)
    biases = [[token, 0.5] for token in range(1000)]
    more = {"logit_bias": biases, "stream": streamed, "n_predict": 1}
    answer = post(server, "completion", prompt=[TEXT, "x =", "y ="], **GREEDY | more)
    told = [each for each in events(answer) if each["stop"]] if streamed else answer.json()
    assert [each["generation_settings"]["logit_bias"] for each in told] == [{str(i): b for i, b in biases}] * 3
    assert [each["generation_settings"]["n_predict"] for each in told] == [1] * 3
    assert (where, len(made)) == ([True] * 3, 1)


def test_forms_hold_the_answer(server: Server) -> None:
    drawn = {"temperature": 0.7, "seed": 3, "n_predict": 200}
    assert json.loads(predicted(server, prompt=TEXT, json_schema=CITY, **drawn).content)["city"] == "Oslo"
    assert predicted(server, prompt=TEXT, grammar='root ::= "yes" | "no"', **drawn).content in ("yes", "no")
    assert "not both" in post(server, "completion", prompt="x", json_schema=CITY, grammar="root ::= x").text


def test_what_means_nothing_here_is_left_out_by_name(server: Server) -> None:
    more = {"cache_prompt": True, "id_slot": -1, "samplers": ["top_k"], "dry_multiplier": 0.0, "brand_new": 1}
    answer = post(server, "completion", prompt=TEXT, **GREEDY, **more)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["ridgeline-ignored"].split(", ")) == {*more}
    assert post(server, "completion", prompt=TEXT, model="other").json()["error"]["code"] == "model_not_found"
    assert post(server, "completion").json()["error"]["param"] == "prompt"
    assert post(server, "completion", prompt=TEXT, n_predict="many").status_code == 400


def test_tokens_come_in_both_shapes(server: Server) -> None:
    tokenizer = server.api.tokenizer
    ids = tokenizer.encode("é = 1", add_special_tokens=False)
    assert post(server, "tokenize", content="é = 1").json() == {"tokens": ids}
    special = post(server, "tokenize", content="é = 1", add_special=True).json()["tokens"]
    assert special == tokenizer.encode("é = 1") == post(server, "tokenize", prompt="é = 1").json()["tokens"]
    pieces = post(server, "tokenize", content="é = 1", with_pieces=True).json()["tokens"]
    assert [each["id"] for each in pieces] == ids
    spelled = b"".join(p.encode() if isinstance(p := each["piece"], str) else bytes(p) for each in pieces)
    assert spelled.decode() == "é = 1"
    text = post(server, "detokenize", tokens=ids).json()
    assert text == {"prompt": "é = 1", "content": "é = 1"}
    assert post(server, "tokenize", content=5).json()["error"]["param"] == "content"
    long = "x" * (server.api.service.facts().max_model_len * 128 + 1)
    assert post(server, "tokenize", content=long).status_code == 400


def test_a_template_is_applied_as_to_chats(server: Server) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    shown = post(server, "v1/chat/completions/render", model=MODEL, messages=messages).json()
    assert post(server, "apply-template", messages=messages).json() == {"prompt": shown["prompt"]}
    assert post(server, "apply-template", messages=messages, brand_new=1).headers["ridgeline-ignored"] == "brand_new"


def test_the_server_tells_of_itself_and_not_of_others(server: Server) -> None:
    facts = server.api.service.facts()
    props = httpx.get(f"{server.url}/props", timeout=PATIENCE).json()
    assert props["default_generation_settings"]["n_ctx"] == facts.max_model_len
    assert (props["total_slots"], props["model_alias"]) == (facts.max_num_seqs, MODEL)
    assert props["chat_template"] == server.api.chat_template.source
    assert facts.folder not in json.dumps(props)
    slots = httpx.get(f"{server.url}/slots", timeout=PATIENCE).json()
    assert len(slots) == facts.max_num_seqs
    assert {frozenset(slot) for slot in slots} == {frozenset(("id", "n_ctx", "speculative", "is_processing"))}


def test_the_same_keys_open_it(start_server: StartServer) -> None:
    with start_server(api_key=["secret"]) as server:
        for path in ("completion", "infill", "embedding", "apply-template"):
            assert post(server, path).status_code == 401
        for path in ("props", "slots"):
            assert httpx.get(f"{server.url}/{path}", timeout=PATIENCE).status_code == 401
        found = httpx.get(f"{server.url}/props", headers={"Authorization": "Bearer secret"}, timeout=PATIENCE)
        assert found.status_code == 200


# ---- filling in the middle ------------------------------------------------------------------------------------------


@pytest.fixture
def filler(server: Server) -> Iterator[Server]:
    """A server whose tokenizer has the tokens, in place of three that nothing here writes."""
    backend = server.api.tokenizer.backend
    size = server.api.service.facts().vocab_size
    found = dict(zip(FIM, range(size - 3, size), strict=True))
    token_to_id = type(backend).token_to_id

    class Named:
        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

        def token_to_id(self, token: str) -> int | None:
            return found.get(token, token_to_id(backend, token))

    server.api.tokenizer.backend = Named()  # type: ignore[assignment]
    yield server
    server.api.tokenizer.backend = backend


def test_what_stands_between_is_that_of_a_suffix(filler: Server) -> None:
    want = completed(filler, prompt="x = ", suffix="\nprint(x)")
    found = predicted(filler, "infill", input_prefix="x =", prompt=" ", input_suffix="\nprint(x)")
    assert found.content == want.choices[0].text
    assert found.tokens_evaluated == want.usage.prompt_tokens
    assert found.truncated is False
    context = filler.api.service.facts().max_model_len
    long = predicted(filler, "infill", input_prefix="a " * context, input_suffix="b " * context, n_predict=4)
    assert (long.truncated, long.tokens_evaluated, long.tokens_predicted) == (True, context - 4, 4)
    extra = [{"filename": "one.py", "text": "y = 1"}]
    more = predicted(filler, "infill", input_prefix="x =", prompt=" ", input_suffix="\nprint(x)", input_extra=extra)
    assert more.tokens_evaluated > found.tokens_evaluated
    assert post(filler, "infill", input_extra=[{"filename": 5}]).json()["error"]["param"] == "input_extra"
    too_long = post(filler, "infill", input_extra=[{"text": "a" * (128 * context)}])
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


def test_a_model_without_tokens_for_it_says_so_in_one_sentence(server: Server) -> None:
    for path, body in (("infill", {"input_prefix": "x"}), ("v1/completions", {"prompt": "x", "suffix": "y"})):
        answer = post(server, path, **body)
        assert answer.status_code == 400
        assert "no tokens for filling in the middle" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(EMBEDDED_MODEL)
    found.backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in [*FIM, *REPOSITORY]])
    return found


@settings(deadline=None, max_examples=60)
@given(
    prefix=st.text("ab \n", max_size=60),
    suffix=st.text("ab \n", max_size=60),
    others=st.lists(st.tuples(st.text("fg", max_size=4), st.text("cd \n", max_size=30)), max_size=3),
    room=st.integers(8, 120),
)
def test_a_prompt_fits_and_keeps_what_is_next_to_the_gap(
    tokenizer: Tokenizer, prefix: str, suffix: str, others: list[tuple[str, str]], room: int
) -> None:
    marked = infill.marks(tokenizer)
    assert marked is not None
    ids, cut = infill.infill_within(tokenizer, prefix, suffix, marked, others, room)
    assert len(ids) <= room
    begin, hole, end = (ids.index(mark) for mark in marked)
    assert end == len(ids) - 1
    before = tokenizer.encode(prefix, add_special_tokens=False)
    after = tokenizer.encode(suffix, add_special_tokens=False)
    head, tail = ids[begin + 1 : hole], ids[hole + 1 : end]
    assert before[len(before) - len(head) :] == head
    assert after[: len(tail)] == tail
    whole, _ = infill.infill_within(tokenizer, prefix, suffix, marked, others, 10**6)
    assert cut == (len(whole) > len(ids))
    if cut and (len(head) < len(before) or len(tail) < len(after)):
        assert len(ids) == room, "all of the room is used before anything next to the gap is cut"
    if not others:
        assert whole == infill.infill(tokenizer, prefix, suffix, marked)
    else:
        text = tokenizer.decode(whole, skip_special_tokens=False)
        assert all(f"<|file_sep|>{name}\n{told}" in text for name, told in others)

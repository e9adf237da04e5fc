"""Logprobs of `/v1/completions`: every token has a name of its own, and its place in the text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import asdict

from ridgeline.core.plan.request import SamplingParams, TokenLogprobs
from ridgeline.serving.apis.openai.completion_logprobs import CompletionLogprobs
from ridgeline.serving.http.shapes import chat_logprobs
from ridgeline.text.detokenizer import Detokenizer
from ridgeline.text.outputs import CompletionOutput, Logprob, ScoredTokens
from ridgeline.text.tokenizer import Tokenizer
from tests.serving.conftest import MODEL, PATIENCE, Server
from tests.text.sample_tokenizers import FAMILIES, write_folder

PROMPT = "naïve = '😀é'  # 你好"


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp(request.param), FAMILIES[request.param]()))


def written(tokenizer: Tokenizer, ids: list[int], *, stop: str | None = None) -> list[CompletionOutput]:
    """The output after each token, and at its end: what streams see."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stop), [])
    text, seen = "", []
    for count, token_id in enumerate(ids, start=1):
        text += detokenizer.push(token_id)
        ended = detokenizer.stopped is not None
        reason = "stop" if ended else None
        seen.append(CompletionOutput(0, text, ids[:count], logprobs=scored(ids[:count]), finish_reason=reason))
        if ended:
            return seen
    text += detokenizer.finish()
    return [*seen, CompletionOutput(0, text, ids, logprobs=scored(ids), finish_reason="stop")]


def scored(ids: list[int], likeliest: Sequence[int] = (), logprobs: Mapping[int, float] | None = None) -> ScoredTokens:
    """The same entry for each token."""
    found, of = ScoredTokens(str), logprobs or dict.fromkeys(ids, -1.0)
    for each in ids:
        found.add(each, TokenLogprobs(of[each], 1, list(likeliest), [of[other] for other in likeliest]))
    return found


def told(tokenizer: Tokenizer, outputs: list[CompletionOutput]) -> list[dict[str, list[Any]]]:
    logprobs = CompletionLogprobs(tokenizer, 0, by_id=False, hidden=tokenizer.special_ids, bare=True)
    return [{name: list(column) for name, column in asdict(logprobs.take(output)).items()} for output in outputs]


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_a_token_lies_where_its_bytes_begin(tokenizer: Tokenizer, text: str) -> None:
    ids = [i for i in tokenizer.encode(text, add_special_tokens=False) if i not in tokenizer.special_ids]
    *_, last = outputs = written(tokenizer, ids)
    if "\ufffd" in last.text:
        return  # the text had some, or the vocabulary lacks the character
    [whole] = told(tokenizer, [last])
    data = b"".join(map(tokenizer.token_bytes, ids))
    dropped = len(data) - len(last.text.encode())  # a leading space, where there is one that has no text
    assert data[dropped:].decode() == last.text
    begins = 0
    for token_id, place in zip(ids, whole["text_offset"], strict=True):
        assert place == len(last.text.encode()[: max(begins - dropped, 0)].decode(errors="ignore"))
        begins += len(tokenizer.token_bytes(token_id))
    streamed = told(tokenizer, outputs)
    assert {name: [each for part in streamed for each in part[name]] for name in whole} == whole


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_token_lies_behind_the_text_that_a_stop_string_ends(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), min_size=1, max_size=30))
    text = written(tokenizer, ids)[-1].text
    start = data.draw(st.integers(0, max(len(text) - 1, 0)))
    outputs = written(tokenizer, ids, stop=text[start : start + data.draw(st.integers(1, 5))] or None)
    [whole], streamed = told(tokenizer, outputs[-1:]), told(tokenizer, outputs)
    places = whole["text_offset"]
    assert len(places) == len(outputs[-1].token_ids)
    assert places == sorted(places)
    assert max(places) <= len(outputs[-1].text)
    assert {name: [each for part in streamed for each in part[name]] for name in whole} == whole


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_token_of_a_place_has_a_name_of_its_own(tokenizer: Tokenizer, data: st.DataObject) -> None:
    everything = range(tokenizer.vocab_size + 3)
    halves = [i for i in everything if tokenizer.token_bytes(i)[:1] >= b"\x80"] or list(everything)
    same = [i for i in everything if tokenizer.token_bytes(i) in (b"", b" ", b"a")]
    ids = st.sampled_from([*everything, *halves * 2, *same * 40])
    likeliest = data.draw(st.lists(ids, min_size=1, max_size=20, unique=True))
    chosen = data.draw(st.one_of(st.sampled_from(likeliest), ids))
    logprobs = {token_id: -float(rank) for rank, token_id in enumerate([*likeliest, chosen])}
    entries = scored([chosen], likeliest, logprobs)
    output = CompletionOutput(0, "", [chosen], logprobs=entries, finish_reason="length")
    for by_id in (False, True):
        made = CompletionLogprobs(tokenizer, len(likeliest), by_id=by_id, hidden=frozenset(), bare=False).take(output)
        [name], [top] = made.tokens, made.top_logprobs
        assert sorted(top.values()) == sorted(logprobs.values())
        assert next(iter(top)) == name
        assert top[name] == made.token_logprobs[0] == logprobs[chosen]
    [made_chat] = chat_logprobs(tokenizer, [chosen], entries, len(likeliest)).content
    chat = to_builtins(made_chat)
    assert len(chat["top_logprobs"]) == len(likeliest)
    for each in [chat, *chat["top_logprobs"]]:
        data, token = bytes(each["bytes"]), each["token"]
        assert data == token.encode() or (not is_text(data) and data == codecs.escape_decode(token.encode())[0])


def is_text(data: bytes) -> bool:
    return data.decode(errors="ignore").encode() == data


def test_logprobs_share_their_texts(tokenizer: Tokenizer) -> None:
    """An answer may hold millions of them."""
    for token_id in range(tokenizer.vocab_size + 2):
        text = tokenizer.text_of(token_id)
        assert text == tokenizer.decode([token_id], skip_special_tokens=False)
        assert text is tokenizer.text_of(token_id)
    assert not hasattr(Logprob(-1.0), "__dict__")


def test_half_a_character_is_spelled_as_openai_spells_it(tmp_path: Path) -> None:
    byte_level = Tokenizer.from_folder(write_folder(tmp_path, FAMILIES["byte_level"]()))
    half = next(i for i in range(byte_level.vocab_size) if byte_level.token_bytes(i) == b"\xe2")
    output = CompletionOutput(0, "\ufffd", [half], logprobs=scored([half]), finish_reason="length")
    assert told(byte_level, [output])[0]["tokens"] == ["bytes:\\xe2"]
    [chat] = chat_logprobs(byte_level, [half], output.logprobs or [], 0).content
    assert (chat.token, chat.bytes) == ("\\xe2", [0xE2])


@pytest.fixture(scope="module")
def complete(server: Server) -> Callable[..., list[dict[str, Any]]]:
    """Answers of a server: the choice, or the choices of a stream's chunks."""

    def ask(**fields: Any) -> list[dict[str, Any]]:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 1.5, "seed": 3} | fields
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
        if not body.get("stream"):
            return [answer.json()["choices"][0]]
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: {")]
        return [json.loads(event)["choices"][0] for event in events]

    return ask


def test_an_echo_of_characters_of_several_bytes_has_right_places(
    server: Server, complete: Callable[..., list[dict[str, Any]]]
) -> None:
    [choice] = complete(echo=True, logprobs=5, return_token_ids=True)
    text, found, tokenizer = choice["text"], choice["logprobs"], server.api.tokenizer
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]][1:]  # the first stands before the text
    assert text.startswith(PROMPT)
    assert max(found["text_offset"]) <= len(text)
    assert any(token.startswith("bytes:") for token in found["tokens"])
    begins = 0
    for token_id, place in zip(ids, found["text_offset"][1:], strict=True):
        if begins < len(PROMPT.encode()):
            assert place == len(PROMPT.encode()[:begins].decode(errors="ignore"))
        begins += len(tokenizer.token_bytes(token_id))
    for top, token, own in zip(found["top_logprobs"], found["tokens"], found["token_logprobs"], strict=True):
        assert top is own is None or (len(top) in (5, 6) and top[token] == own)


def test_a_stream_that_a_stop_string_ends_has_the_places_of_the_whole(
    complete: Callable[..., list[dict[str, Any]]],
) -> None:
    [full] = complete(temperature=0, prompt="def fibonacci(n):")
    asked: dict[str, Any] = {"temperature": 0, "prompt": "def fibonacci(n):", "logprobs": 2, "stop": full["text"][8:20]}
    [whole] = complete(**asked)
    assert len(whole["text"]) == 8
    assert max(whole["logprobs"]["text_offset"]) == 8
    chunks = complete(**asked, stream=True)
    for name in ("tokens", "text_offset"):
        assert [each for chunk in chunks for each in chunk["logprobs"][name]] == whole["logprobs"][name]

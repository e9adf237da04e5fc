"""The edges of every field: the document shows them, a body keeps them, and so does the offline API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline import SamplingParams
from ridgeline.core.errors import InvalidRequest
from ridgeline.serving.errors import BadRequest, TooLong
from ridgeline.serving.generation.service import GenerationRequest
from ridgeline.serving.generation_defaults import GenerationDefaults
from ridgeline.serving.requests.bodies import ChatBody, CompletionBody, DetokenizeBody
from ridgeline.serving.requests.validation import _fitted, _params, _ruled, _token_id, parse
from ridgeline.text.requests import RequestLimits, make_requests

TEXT: dict[str, Any] = {"prompt": "hi"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
FACTS = SimpleNamespace(max_model_len=12, vocab_size=10, encodes=0)
FACE: Any = SimpleNamespace(
    defaults=GenerationDefaults(),
    service=SimpleNamespace(facts=lambda: FACTS),
    config=SimpleNamespace(request_timeout=5.0, queue_timeout=3.0),
    adapter=lambda model: None,
)

WHOLE = {
    "n": (1, 128),
    "best_of": (1, 128),
    "top_k": (-1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "logprobs": (-1, 2**31 - 1),  # -1 is the whole vocabulary
    "prompt_logprobs": (-1, 2**31 - 1),
    "prompt_logprobs_start": (0, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
}
REAL = {  # the least value that is taken, the largest one that is not below it, the largest, the least above it
    "temperature": (0.0, -1e-9, 3.4028234e38, 3.5e38),
    "top_p": (1e-9, 0.0, 1.0, 1.0000001),
    "min_p": (0.0, -1e-9, 1.0, 1.0000001),
    "typical_p": (1e-9, 0.0, 1.0, 1.0000001),
    "repetition_penalty": (1.2e-38, 1.1e-38, 3.4028234e38, 3.5e38),
    "presence_penalty": (-2.0, -2.0000001, 2.0, 2.0000001),
    "frequency_penalty": (-2.0, -2.0000001, 2.0, 2.0000001),
    "guidance_scale": (-100.0, -100.00001, 100.0, 100.00001),
}
EDGES = {name: (least, least - 1, most, most + 1) for name, (least, most) in WHOLE.items()} | REAL


def by_http(**fields: Any) -> SamplingParams:
    body = parse(CompletionBody, TEXT | fields)
    counts = {name: getattr(body, name) for name in ("max_tokens", "logprobs", "prompt_logprobs")}
    return _params(FACE, body, **counts)


@pytest.mark.parametrize("take", [SamplingParams, by_http])
@pytest.mark.parametrize("name", EDGES)
def test_a_number_may_be_at_its_edges_and_not_beyond(take: Callable[..., SamplingParams], name: str) -> None:
    """max_tokens 0 is another's business: an echo asks for none."""
    least, below, most, above = EDGES[name]
    other: dict[str, Any] = {} if name == "max_tokens" else {"max_tokens": None}
    for value in (least, most):
        assert getattr(take(**{name: value}, **other), name) == value
    for value in (below, above):
        with pytest.raises((BadRequest, InvalidRequest)) as refused:
            take(**{name: value}, **other)
        assert refused.value.param == name


@pytest.mark.parametrize("model", [CompletionBody, ChatBody])
def test_the_document_shows_the_ranges(model: type[CompletionBody | ChatBody]) -> None:
    fields = model.model_json_schema()["properties"]

    def shown(name: str) -> dict[str, float]:
        [number] = [each for each in fields[name]["anyOf"] if each["type"] in ("integer", "number")]
        return {key: value for key, value in number.items() if key not in ("type", "title")}

    inside, up_to = {"minimum": 0, "maximum": 1}, {"exclusiveMinimum": 0, "maximum": 1}
    assert {name: shown(name) for name in REAL} == {
        "temperature": {"minimum": 0},
        "top_p": up_to,
        "min_p": inside,
        "typical_p": up_to,
        "repetition_penalty": {"exclusiveMinimum": 0},
        "presence_penalty": {"minimum": -2, "maximum": 2},
        "frequency_penalty": {"minimum": -2, "maximum": 2},
        "guidance_scale": {"minimum": -100, "maximum": 100},
    }
    bounded = {"n", "best_of", "top_k", "prompt_logprobs", "prompt_logprobs_start", "seed"}
    for name in bounded:
        range_ = shown(name)
        assert (range_["minimum"], range_.get("maximum", range_.get("exclusiveMaximum", 0) - 1)) == WHOLE[name]
    assert shown("max_tokens") == {"minimum": 0 if model is CompletionBody else 1}
    assert shown("min_tokens") == {"minimum": 0}
    assert shown("priority") == {"minimum": -(2**31), "exclusiveMaximum": 2**31}
    prompts = CompletionBody.model_json_schema()["properties"]["prompt"]["anyOf"]
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    assert prompts[:2] == [{"type": "string"}, ids]
    assert prompts[2:] == [
        {"type": "array", "items": item, "minItems": 1, "maxItems": 512} for item in ({"type": "string"}, ids)
    ]


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"} | fields]}


LISTS: dict[str, tuple[int, type[Any], Callable[[int], dict[str, Any]]]] = {
    "prompt": (512, CompletionBody, lambda n: {"prompt": ["x"] * n}),
    "allowed_token_ids": (2**20, CompletionBody, lambda n: TEXT | {"allowed_token_ids": [7] * n}),
    "negative_prompt": (2**20, CompletionBody, lambda n: TEXT | {"negative_prompt": [7] * n}),
    "logit_bias": (1024, CompletionBody, lambda n: TEXT | {"logit_bias": {str(i): 1.0 for i in range(n)}}),
    "bad_words": (1024, CompletionBody, lambda n: TEXT | {"bad_words": ["x"] * n}),
    "bad_words.0": (1024, CompletionBody, lambda n: TEXT | {"bad_words": ["x" * n]}),
    "stop_token_ids": (64, CompletionBody, lambda n: TEXT | {"stop_token_ids": [7] * n}),
    "cache_salt": (256, CompletionBody, lambda n: TEXT | {"cache_salt": "x" * n}),
    "structured_outputs.choice": (4096, ChatBody, lambda n: CHAT | {"structured_outputs": {"choice": ["x"] * n}}),
    "messages": (4096, ChatBody, lambda n: {"messages": CHAT["messages"] * n}),
    "messages.0.role": (256, ChatBody, lambda n: message(role="x" * n)),
    "messages.0.content": (4096, ChatBody, lambda n: message(content=[{"type": "text"}] * n)),
    "messages.0.tool_calls": (256, ChatBody, lambda n: message(tool_calls=[{}] * n)),
    "tools": (256, ChatBody, lambda n: CHAT | {"tools": [{}] * n}),
    "documents": (4096, ChatBody, lambda n: CHAT | {"documents": [{}] * n}),
    "reasoning_effort": (256, ChatBody, lambda n: CHAT | {"reasoning_effort": "x" * n}),
    "tokens": (2**20, DetokenizeBody, lambda n: {"tokens": [7] * n}),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_or_a_text_may_be_as_long_as_this_and_no_longer(name: str) -> None:
    most, model, body = LISTS[name]
    parse(model, body(most))
    with pytest.raises(BadRequest) as refused:
        parse(model, body(most + 1))
    assert refused.value.param == name
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("name", "fits", "beyond"),
    [
        ("stop", ["x"] * 64, ["x"] * 65),
        ("stop", "x" * 1024, "x" * 1025),
        ("stop_token_ids", [0] * 56, [0] * 57),
        ("stop_token_ids", [0], [-1]),
        ("allowed_token_ids", [0], [-1]),
        ("bad_words", [[0]], [[-1]]),
        ("bad_words", ["x"] * 1024, ["x"] * 1025),
        ("logit_bias", dict.fromkeys(range(1024), 1.0), dict.fromkeys(range(1025), 1.0)),
        ("logit_bias", {0: 100}, {0: 100.001}),
        ("logit_bias", {0: -100}, {-1: -100}),
    ],
)
def test_offline_too_lists_have_lengths_and_ids_are_none_below_0(name: str, fits: Any, beyond: Any) -> None:
    assert getattr(SamplingParams(**{name: fits}), name) == fits
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{name: beyond})
    assert refused.value.param == name
    if len(fits) > 1:
        assert f" {len(fits)} " in str(refused.value), "it says how many may be"


def test_what_is_left_out_is_as_in_vllm() -> None:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "guidance_scale": 1.0}
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    none = ("best_of", "logit_bias", "allowed_token_ids", "bad_words", "stop", "stop_token_ids", "logprobs")
    none += ("logprob_token_ids", "repetition_detection", "prompt_logprobs", "seed", "negative_prompt")
    numbers = {"n": 1, "max_tokens": 16, "min_tokens": 0, "prompt_logprobs_start": 0}
    flags = {"ignore_eos": False, "include_stop_str_in_output": False, "skip_special_tokens": True, "detokenize": True}
    assert asdict(SamplingParams()) == neutral | penalties | dict.fromkeys(none) | numbers | flags
    assert by_http() == SamplingParams(max_tokens=None)


def test_completions_of_a_prompt_have_seeds_of_their_own_and_the_first_the_one_that_was_given() -> None:
    limits = RequestLimits(max_model_len=20, vocab_size=10, eos_ids=frozenset())

    def seeds(params: SamplingParams, seed: int) -> list[int]:
        return [request.seed for request in make_requests("x", [1, 2], params, limits, seed=seed)]

    several = seeds(SamplingParams(n=4), 7)
    assert several[0] == 7
    assert len(set(several)) == 4
    assert seeds(SamplingParams(n=2, best_of=4, seed=7), 3) == several
    assert not set(several) & set(seeds(SamplingParams(n=4), 8)), "one seed's are no other's"


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("logit_bias", {9: 1.0}, {10: 1.0}),
        ("stop_token_ids", [9], [3, 10]),
        ("allowed_token_ids", [9], [3, 10]),
        ("bad_words", [[9]], [[3], [3, 10]]),
        ("negative_prompt", [9], [3, 10]),
    ],
)
def test_rules_name_tokens_of_the_vocabulary(name: str, inside: Any, outside: Any) -> None:
    limits = RequestLimits(max_model_len=20, vocab_size=10, eos_ids=frozenset())
    other: dict[str, Any] = {"guidance_scale": 2.0} if name == "negative_prompt" else {}
    assert make_requests("x", [1, 2], SamplingParams(**{name: inside}, **other), limits, seed=0)
    with pytest.raises(
        InvalidRequest, match=rf"{name} names token id 10, outside the vocabulary \(0 to 9\)"
    ) as refused:
        make_requests("x", [1, 2], SamplingParams(**{name: outside}, **other), limits, seed=0)
    assert refused.value.param == name


def test_token_ids_have_32_bits() -> None:
    assert parse(DetokenizeBody, {"tokens": [0, 2**32 - 1]}).tokens == [0, 2**32 - 1]
    for wrong, at in (([5, 2**32], 1), ([-1, 5], 0), ([5, "x"], 1), ([5, True], 1)):
        with pytest.raises(BadRequest) as refused:
            parse(DetokenizeBody, {"tokens": wrong})
        assert refused.value.param == f"tokens.{at}"
    assert _token_id("0000000007") == 7
    for key in ("00000000007", "", "-1", "²", "1.0"):
        with pytest.raises(BadRequest) as refused:
            _token_id(key)
        assert refused.value.param == "logit_bias"


@pytest.mark.parametrize(
    ("params", "completions", "param"),
    [
        (SamplingParams(bad_words=[[7] * 1024] * 8), 2048, None),  # 2**13 ids, and 2**24 in all
        (SamplingParams(bad_words=[[7] * 1024] * 8), 2049, "bad_words"),
        (SamplingParams(bad_words=[*[[7] * 1024] * 8, [7]]), 1, "bad_words"),
        (SamplingParams(allowed_token_ids=[7] * 4096), 4096, None),
        (SamplingParams(allowed_token_ids=[7] * 4096), 4097, "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=[7] * 4095, bad_words=[[7]]), 4096, None),
        (SamplingParams(allowed_token_ids=[7] * 4095, bad_words=[[7], [8]]), 4096, "allowed_token_ids"),
    ],
)
def test_rules_of_many_ids_are_not_for_many_completions(
    params: SamplingParams, completions: int, param: str | None
) -> None:
    if param is None:
        assert asyncio.run(_ruled(FACE, params, completions)) is params
        return
    with pytest.raises(BadRequest) as refused:
        asyncio.run(_ruled(FACE, params, completions))
    assert refused.value.param == param
    ids = len(params.allowed_token_ids or ()) + sum(map(len, params.bad_words or ()))
    assert str(ids) in refused.value.message


def test_a_prompt_fits_with_what_is_wanted_behind_it() -> None:
    def ask(ids: list[int], wanted: int) -> Any:
        body = parse(CompletionBody, TEXT | {"priority": 3, "cache_salt": "own"})
        bare = GenerationRequest(id="name", prompt_token_ids=ids, params=SamplingParams())
        return _fitted(FACE, body, bare, "prompt", wanted)

    request = ask([0, 9] * 5, 2)
    assert (request.prompt_token_ids, request.priority, request.cache_salt) == ([0, 9] * 5, 3, "own")
    assert (request.timeout, request.queue_timeout) == (5.0, 3.0)
    with pytest.raises(TooLong, match=r"maximum context length is 12 .* 13 tokens \(10 in the prompt, 3 in the"):
        ask([0, 9] * 5, 3)
    with pytest.raises(BadRequest, match=r"token id 10, outside the vocabulary \(0 to 9\)"):
        ask([3, 10, 4], 1)
    with pytest.raises(BadRequest, match="the prompt is empty"):
        ask([], 1)

"""What a request may have reported of its output, and an output that ends because it repeats itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.core.plan import step as plan
from ridgeline.core.plan.request import RepetitionDetectionParams
from ridgeline.text import requests
from ridgeline.text.repetition import Repetition
from tests import tiny_models

PROMPT = {"prompt_token_ids": [5, 9, 3, 7]}
NAMED = [3, 11, 40]


@pytest.fixture(scope="module")
def every(text_model: Path) -> Iterator[LLM]:
    with LLM(text_model, device="cpu", max_logprobs=-1, block_size=4, debug_checks=True) as built:
        yield built


def expected(ids: Sequence[int], place: int) -> torch.Tensor:
    """The log-probabilities of the token at `place`, by transformers."""
    with torch.inference_mode():
        logits = tiny_models.build("llama")(torch.tensor([list(ids)])).logits
    return logits[0, place - 1].log_softmax(-1)


def test_named_tokens_are_reported_in_place_of_the_likeliest(every: LLM) -> None:
    named = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprob_token_ids=NAMED)
    likeliest = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2)
    first, second = every.generate([PROMPT, PROMPT], [named, likeliest])
    ids = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    for place, entry in enumerate(first.outputs[0].logprobs or [], len(first.prompt_token_ids)):
        oracle = expected(ids, place)
        assert set(entry) == {*NAMED, ids[place]}
        assert next(iter(entry)) == ids[place]
        assert entry[ids[place]].rank == 1
        for token, told in entry.items():
            assert told.logprob == pytest.approx(oracle[token].item(), abs=1e-4)
            assert told.rank is None or token == ids[place]
    assert [len(entry) for entry in second.outputs[0].logprobs or []] == [2, 2, 2]


def test_all_of_the_vocabulary_is_reported(every: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    beside = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1)
    for wide in (plan.WIDE, 20):  # in columns of all rows, and apart
        monkeypatch.setattr(plan, "WIDE", wide)
        output, other = every.generate([PROMPT, PROMPT], [params, beside])
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        entries = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
        for place, entry in enumerate(entries):
            if place:
                oracle = expected(ids, place)
                assert entry is not None
                assert sorted(entry) == list(range(len(oracle)))
                told = torch.tensor([entry[token].logprob for token in range(len(oracle))])
                assert torch.allclose(told, oracle, atol=1e-4)
                assert sorted(each.rank or 0 for each in entry.values()) == list(range(1, len(oracle) + 1))
        assert [len(entry) for entry in other.outputs[0].logprobs or []] == [1, 1]


def test_logprobs_have_bounds(every: LLM, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="which asks for all"):
        llm.generate(PROMPT, SamplingParams(logprobs=-1))
    with pytest.raises(InvalidRequest, match="at most 20"):
        llm.generate(PROMPT, SamplingParams(logprobs=21))
    with pytest.raises(InvalidConfig, match="or -1 for all"):
        LLM("nowhere", max_logprobs=-2)
    monkeypatch.setattr(requests, "MOST_REPORTED", 100)
    with pytest.raises(InvalidRequest, match="more than 100"):
        every.generate(PROMPT, SamplingParams(logprobs=30, max_tokens=4))
    with pytest.raises(InvalidRequest, match="more than 100"):
        every.generate(PROMPT, SamplingParams(prompt_logprobs=30, max_tokens=1))
    every.generate(PROMPT, SamplingParams(logprobs=20, max_tokens=20))


@pytest.mark.parametrize("ids", [[], list(range(129)), [-1], ["a"], 5, [1 << 40]])
def test_named_tokens_that_cannot_be_are_refused(llm: LLM, ids: object) -> None:
    with pytest.raises(InvalidRequest, match="logprob_token_ids"):
        llm.generate(PROMPT, SamplingParams(logprob_token_ids=ids))  # type: ignore[arg-type]


def by_definition(tokens: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Whether the tokens end with a pattern, min_count times over."""
    lengths = range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
    return any(
        len(tokens) >= size * params.min_count
        and list(tokens[-size * params.min_count :]) == list(tokens[-size:]) * params.min_count
        for size in lengths
    )


def test_a_repetition_is_found_where_it_is_complete() -> None:
    rng = random.Random(1)
    found = 0
    for low, high, count in itertools.product((0, 2, 3), (3, 5), (2, 3, 4)):
        params = RepetitionDetectionParams(min_pattern_size=low, max_pattern_size=high, min_count=count)
        for _ in range(20):
            tokens, detector = [rng.randrange(2) for _ in range(40)], Repetition(params)
            told = [detector.take(token) for token in tokens]
            assert told == [by_definition(tokens[: end + 1], params) for end in range(40)]
            found += any(told)
    assert found > 100


def test_an_output_that_repeats_itself_ends(llm: LLM) -> None:
    asked = {"max_pattern_size": 1, "min_count": 3}
    repeating = SamplingParams(
        temperature=0,
        max_tokens=20,
        ignore_eos=True,
        allowed_token_ids=[7],
        repetition_detection=asked,  # type: ignore[arg-type]
    )
    (output,) = llm.generate(PROMPT, repeating)
    (completion,) = output.outputs
    assert completion.token_ids == [7, 7, 7]
    assert (completion.finish_reason, completion.stop_reason) == ("repetition", "repetition_detected")
    assert completion.text == llm.get_tokenizer().decode([7, 7, 7])
    (output,) = llm.generate(PROMPT, repeating.replace(min_tokens=6))
    assert output.outputs[0].token_ids == [7] * 6
    (output,) = llm.generate(PROMPT, repeating.replace(max_tokens=3))
    assert output.outputs[0].finish_reason == "length"
    (output,) = llm.generate(PROMPT, repeating.replace(detokenize=False))
    assert output.outputs[0].finish_reason == "repetition"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_pattern_size": 3},
        {"max_pattern_size": 3, "min_count": 1},
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": 1 << 20, "min_count": 2},
        {"max_pattern": 3},
        {"max_pattern_size": -1},
        5,
    ],
)
def test_a_repetition_that_cannot_be_looked_for_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="repetition_detection"):
        SamplingParams(repetition_detection=wrong)  # type: ignore[arg-type]

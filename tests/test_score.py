"""`LLM.score` against transformers, and what of it runs: a context once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequest
from ridgeline.text.continuations import continued
from tests import tiny_models

CONTEXTS = [[5], list(range(10, 61)), [9] * 30 + [3, 4]]
CONTINUATIONS = [[[7], [8, 9, 10]], [[11, 12], [13], [14] * 40, [11, 12, 15]], [[200, 201, 202]]]


def opened(folder: Path, **settings: object) -> LLM:
    options = {"dtype": "float32", "device": "cpu", "debug_checks": True, "block_size": 4, **settings}
    return LLM(folder, max_num_batched_tokens=24, max_num_seqs=4, skip_tokenizer_init=True, **options)


def as_prompts(contexts: list[list[int]]) -> list[dict]:
    return [{"prompt_token_ids": context} for context in contexts]


@pytest.mark.parametrize("family", ["llama", "mixed", "gpt2"])
def test_scores_are_transformers(family: str, tiny_model: Callable[[str], Path]) -> None:
    """float32 on logits of order ten: 1e-4 is a hundred roundings."""
    model = tiny_models.build(family)
    with torch.inference_mode():
        greedy = [tiny_models.greedy(family, context, 3) for context in CONTEXTS]
    asked = [[*each, likeliest, [*likeliest[:2], 4]] for each, likeliest in zip(CONTINUATIONS, greedy, strict=True)]
    with opened(tiny_model(family)) as llm:
        found = llm.score(as_prompts(CONTEXTS), asked, use_tqdm=False)
    for context, continuations, scores in zip(CONTEXTS, asked, found, strict=True):
        for continuation, score in zip(continuations, scores, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
            assert score.token_ids == continuation
            assert score.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
            assert score.logprob == pytest.approx(expected.sum().item(), abs=1e-4 * len(continuation))
            assert score.is_greedy == (logits.argmax(-1).tolist() == continuation)
        assert scores[-2].is_greedy


def test_a_shared_context_runs_once(tiny_model: Callable[[str], Path]) -> None:
    """60 tokens in blocks of 4, ten continuations: the context's 14 full blocks before its last token run once."""
    context, continuations = list(range(10, 70)), [[100 + n, 7] for n in range(10)]
    with opened(tiny_model("llama")) as llm:
        ran, step = [], llm.engine.step

        def counting() -> object:
            events = step()
            ran.append(llm.engine.last_plan.num_tokens)
            return events

        llm.engine.step = counting  # type: ignore[method-assign]
        llm.score(as_prompts([context]), [continuations], use_tqdm=False)
    assert sum(ran) == 60 + 2 + 9 * (60 - 56 + 2)


def test_prompt_logprobs_from_a_start_are_those_without_one(tiny_model: Callable[[str], Path]) -> None:
    prompt = as_prompts([list(range(10, 61))])
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    with opened(tiny_model("mixed")) as llm:
        [whole] = llm.generate(prompt, params, use_tqdm=False)
        [tail] = llm.generate(prompt, params.replace(prompt_logprobs_start=33), use_tqdm=False)
    assert tail.num_cached_tokens == 32
    assert tail.outputs[0].token_ids == whole.outputs[0].token_ids
    assert tail.prompt_logprobs[:33] == [None] * 33
    for mine, its in zip(tail.prompt_logprobs[33:], whole.prompt_logprobs[33:], strict=True):
        assert {t: e.rank for t, e in mine.items()} == {t: e.rank for t, e in its.items()}
        assert [e.logprob for e in mine.values()] == pytest.approx([e.logprob for e in its.values()], abs=1e-5)


@pytest.mark.parametrize(
    "continuations", [None, "text", [], [[]], [[[]]], [["text"]], [[[True]]], [[5]], [[[5]], [[6]]], [[[10**6]]]]
)
def test_what_cannot_be_scored_is_refused(continuations: object, tiny_model: Callable[[str], Path]) -> None:
    with opened(tiny_model("llama")) as llm:
        with pytest.raises(InvalidRequest) as raised:
            llm.score(as_prompts([[5, 6]]), continuations)  # type: ignore[arg-type]
        assert not llm.engine.has_work
    assert str(raised.value).count(".") <= 4
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("prompt", "continuation", "empty"), [([], [7], "prompt"), ([5], [], "continuation")])
def test_of_a_prompt_and_its_continuation_the_one_without_tokens_is_named(
    prompt: list[int], continuation: list[int], empty: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"the {empty} has no token of its own"):
        continued((None, prompt), continuation, None)

"""Allowed tokens, bad words and best-of, on the real worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidRequest
from tests import tiny_models
from tests.driving import ask, rig
from tests.test_token_masks import Alternating

PROMPT = [5, 6, 7, 8, 9, 10]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def opened(folder: Path) -> LLM:
    return LLM(folder, dtype="float32", device="cpu", debug_checks=True, block_size=4, skip_tokenizer_init=True)


def tokens(llm: LLM, params: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    [result] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return result.outputs[0].token_ids


def without_words(words: list[list[int]], prompt: list[int], count: int) -> list[int]:
    """What transformers generates greedily when these words are bad."""
    ids = torch.tensor([prompt])
    processor = transformers.NoBadWordsLogitsProcessor(words)
    with torch.inference_mode():
        found = tiny_models.build("qwen3").generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=[processor],
        )
    return found[0, len(prompt) :].tolist()


def test_bad_words_never_come_as_in_transformers(tiny_model: Callable[[str], Path]) -> None:
    """Words made of what the model would say: of one token, of several, begun in the prompt, and of a prefix alone."""
    with opened(tiny_model("qwen3")) as llm:
        free = tokens(llm, GREEDY)
        for words in (
            [[free[0]]],
            [[PROMPT[-2], PROMPT[-1], free[0]], free[2:4], free[6:9]],
            [[free[3]], [free[4], 300], free[7:12], [301, free[8]]],
        ):
            found = tokens(llm, GREEDY.replace(bad_words=words))
            assert found == without_words(words, PROMPT, 16)
            assert found != free


def test_only_allowed_tokens_come_and_the_likeliest_of_them(tiny_model: Callable[[str], Path]) -> None:
    allowed, oracle = [3, 50, 51, 200], tiny_models.build("qwen3")
    with opened(tiny_model("qwen3")) as llm:
        found = tokens(llm, GREEDY.replace(allowed_token_ids=allowed, bad_words=[[51]]))
        drawn = tokens(llm, GREEDY.replace(temperature=9.0, allowed_token_ids=allowed))
    with torch.inference_mode():
        logits = oracle(torch.tensor([PROMPT + found])).logits[0, len(PROMPT) - 1 : -1]
    left = torch.tensor([3, 50, 200])
    assert found == left[logits[:, left].argmax(1)].tolist()
    assert set(drawn) <= set(allowed)
    assert len(set(drawn)) > 1


def test_next_to_no_typical_mass_leaves_the_token_that_tells_what_is_expected(
    tiny_model: Callable[[str], Path],
) -> None:
    """Its information is the nearest to the entropy, as in transformers."""
    with opened(tiny_model("qwen3")) as llm:
        found = tokens(llm, SamplingParams(typical_p=1e-6, max_tokens=12, ignore_eos=True))
    with torch.inference_mode():
        scores = tiny_models.build("qwen3")(torch.tensor([PROMPT + found])).logits[0, len(PROMPT) - 1 : -1]
    kept = transformers.TypicalLogitsWarper(1e-6)(torch.tensor([PROMPT]), scores).isfinite()
    assert kept.sum(1).tolist() == [1] * 12
    assert kept.int().argmax(1).tolist() == found


def test_rules_hold_beside_a_mask(tiny_model: Callable[[str], Path]) -> None:
    with rig(tiny_model("qwen3")) as own:
        ruled = ask("x", PROMPT, mask=Alternating(), allowed_token_ids=[4, 6, 7], bad_words=[[7, 4]], max_tokens=12)
        odd = ask("y", PROMPT, mask=Alternating(), allowed_token_ids=[4, 6], max_tokens=12)
        outcomes = own.run(ruled, odd)
        assert outcomes["x"].tokens[1::2] == [7] * 6
        assert set(outcomes["x"].tokens[2::2]) == {6}, "4 after 7 is a bad word"
        assert outcomes["y"].finish_reason == "error", "no odd token is allowed"
        assert outcomes["y"].error == "the token mask failed: it allows no token."


def test_the_best_of_several_are_the_likeliest_of_all(tiny_model: Callable[[str], Path]) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=6, ignore_eos=True, seed=3)
    with opened(tiny_model("llama")) as llm:
        ask_for = [{"prompt_token_ids": PROMPT}]
        [every] = llm.generate(ask_for, params.replace(n=8, logprobs=0), use_tqdm=False)
        [best] = llm.generate(ask_for, params.replace(n=3, best_of=8), use_tqdm=False)
        with pytest.raises(InvalidRequest, match="streamed"):
            llm.stream(ask_for[0], params.replace(best_of=2))
    ranked = sorted(every.outputs, key=lambda output: -output.cumulative_logprob)
    assert [output.token_ids for output in best.outputs] == [output.token_ids for output in ranked[:3]]
    assert [output.index for output in best.outputs] == [0, 1, 2]
    assert [output.logprobs for output in best.outputs] == [None] * 3, "nobody asked for them"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"best_of": 0}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "temperature": 0}, "best_of"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"typical_p": 1.1}, "typical_p"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": 5}, "allowed_token_ids"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"bad_words": [5]}, "bad_words"),
        ({"bad_words": [[True]]}, "bad_words"),
    ],
)
def test_wrong_parameters_are_named(wrong: dict, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**wrong)
    assert raised.value.param == param


def test_rules_that_do_not_fit_the_model_are_refused(tiny_model: Callable[[str], Path]) -> None:
    with opened(tiny_model("qwen3")) as llm:
        for wrong in ({"allowed_token_ids": [10**6]}, {"bad_words": [[5, 10**6]]}, {"bad_words": ["text"]}):
            with pytest.raises(InvalidRequest) as raised:
                tokens(llm, GREEDY.replace(**wrong))
            assert raised.value.param in wrong

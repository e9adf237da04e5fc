"""Token masks on the real worker: they arrive between forward and sample, and bind their own row only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.plan.request import MASK_FAILED, Request
from ridgeline.core.plan.token_bits import packed, unpacked
from ridgeline.core.specs.model import OutputRules
from ridgeline.engine.masks import constrained, due
from ridgeline.engine.sequence import Sequence
from tests import tiny_models
from tests.driving import alone, ask, rig
from tests.engine.profiles import quick_settings
from tests.tiny_models import VOCAB

PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)


class Alternating:
    """Even and odd token ids in turn. `fault` is what goes wrong at token 2."""

    def __init__(self, fault: str = "") -> None:
        self.count = 0
        self.fault = fault

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == self.count % 2
        if self.fault == "accept" and self.count == 2:
            raise RuntimeError("the grammar broke")
        self.count += 1

    def allowed(self) -> np.ndarray:
        if self.count == 2 and self.fault in ("allowed", "nothing", "too short", "too long", "signed"):
            if self.fault == "allowed":
                raise RuntimeError("the grammar broke")
            if self.fault == "signed":
                return packed(np.ones(VOCAB, np.bool_)).view(np.int32)
            if self.fault == "nothing":
                return packed(np.zeros(VOCAB, np.bool_))
            return packed(np.ones(3 if self.fault == "too short" else VOCAB + 32, np.bool_))
        return packed(np.arange(VOCAB) % 2 == self.count % 2)


def parities(tokens: list[int]) -> list[int]:
    return [token % 2 for token in tokens]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_rows_obey_and_their_neighbours_are_as_alone(
    tiny_model: Callable[[str], Path], lookahead: int, temperature: float
) -> None:
    folder, options = tiny_model("qwen3"), {"max_tokens": 20, "temperature": temperature}
    free = [ask("a", PROMPT, seed=1, **options), ask("b", PROMPT[::-1], seed=2, logprobs=2, **options)]
    expected = {request.id: alone(folder, request) for request in free}
    with rig(folder) as own:
        masked = [
            ask(n, PROMPT, seed=i, mask=Alternating(), lookahead=lookahead, **options) for i, n in enumerate("xy")
        ]
        outcomes = own.run(free[0], masked[0], free[1], masked[1])
        assert {name: outcomes[name].tokens for name in "ab"} == expected
        assert [parities(outcomes[name].tokens) for name in "xy"] == [[0, 1] * 10] * 2
        assert own.errors == []


@pytest.mark.parametrize("fault", ["accept", "allowed", "nothing", "too short", "too long", "signed"])
def test_a_mask_that_fails_ends_its_own_request_only(tiny_model: Callable[[str], Path], fault: str) -> None:
    folder = tiny_model("qwen3")
    free = ask("a", PROMPT, max_tokens=10)
    expected = alone(folder, free)
    with rig(folder) as own:
        outcomes = own.run(free, ask("x", PROMPT, mask=Alternating(fault)), ask("y", PROMPT, mask=Alternating()))
        assert outcomes["x"].finish_reason == "error"
        assert str(outcomes["x"].error).startswith(MASK_FAILED)
        assert len(outcomes["x"].tokens) == 2 + (fault == "accept")
        assert outcomes["a"].tokens == expected
        assert parities(outcomes["y"].tokens) == [0, 1] * 4
        scheduler = own.engine.scheduler
        assert scheduler.cache.pool.free_pages == scheduler.cache.pool.num_pages


class Finishing:
    """A grammar that is complete after `length` tokens, and may stop before if `early`: then only `STOP` is left."""

    def __init__(self, length: int, early: bool) -> None:
        self.left, self.early = length, early

    def accept(self, token_id: int) -> None:
        assert token_id == STOP if self.left == 0 else token_id != STOP or self.early
        self.left -= 1

    def allowed(self) -> np.ndarray:
        tokens = np.arange(VOCAB)
        if self.left == 0:
            return packed(tokens == STOP)
        return packed((tokens != STOP) | self.early)


STOP = 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("length", "early", "min_tokens", "at_least", "at_most"),
    [(3, False, 6, 4, 4), (0, False, 6, 1, 1), (12, True, 6, 7, 13), (12, True, 0, 1, 1), (4, True, 4, 5, 5)],
    ids=["complete before min_tokens", "complete at once", "may stop early", "without min_tokens", "complete then"],
)
def test_min_tokens_holds_a_masked_request_off_stopping_until_nothing_else_is_left(
    tiny_model: Callable[[str], Path],
    length: int,
    early: bool,
    min_tokens: int,
    at_least: int,
    at_most: int,
    temperature: float,
) -> None:
    """A bias makes the stop the likeliest token wherever it may come."""
    options = {"min_tokens": min_tokens, "temperature": temperature, "logit_bias": {STOP: 100.0}, "max_tokens": 20}
    with rig(tiny_model("qwen3")) as own:
        masked = ask("x", PROMPT, mask=Finishing(length, early), stop_ids=frozenset([STOP]), seed=3, **options)
        outcome = own.run(masked, ask("free", PROMPT, seed=1))["x"]
    assert (outcome.finish_reason, outcome.error) == ("stop", None)
    assert outcome.tokens.index(STOP) == len(outcome.tokens) - 1
    assert at_least <= len(outcome.tokens) <= at_most


class Listed:
    """Allows what a list says, step by step."""

    def __init__(self, steps: list[set[int]]) -> None:
        self.steps = iter(steps)

    def accept(self, token_id: int) -> None:
        pass

    def allowed(self) -> np.ndarray:
        return packed(np.isin(np.arange(SMALL), list(next(self.steps))))


SMALL = 35  # tokens: more than a word, and not a multiple of one
few = st.sets(st.integers(0, SMALL - 1), min_size=1, max_size=6)


@quick_settings(300)
@given(
    own=st.none() | st.lists(few, min_size=8, max_size=8),
    allowed_ids=st.none() | few,
    bad=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=5),
    stops=st.frozensets(st.integers(0, SMALL + 3), max_size=3),
    min_tokens=st.integers(0, 6),
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    output=st.lists(st.integers(0, 5), min_size=7, max_size=7),
)
def test_rules_leave_what_sets_of_tokens_say(own, allowed_ids, bad, stops, min_tokens, prompt, output) -> None:
    request = ask(
        "x",
        prompt,
        mask=Listed(own) if own is not None else None,
        allowed_token_ids=list(allowed_ids) if allowed_ids is not None else None,
        bad_words=bad or None,
        stop_ids=stops,
        min_tokens=min_tokens,
    )
    ruled = constrained(request, SMALL)
    if own is None and allowed_ids is None and not bad:
        assert ruled is request
        return
    assert ruled.token_mask is not None
    assert ruled.params == request.params.replace(min_tokens=0), "what the mask does the device need not do"
    for step in range(8):
        known = [*prompt, *output[:step]]
        expected = set(range(SMALL)) if allowed_ids is None else set(allowed_ids)
        if own is not None:
            expected &= own[step]
        expected -= {word[-1] for word in bad if len(word) == 1 or known[1 - len(word) :] == word[:-1]}
        if step < min_tokens:
            expected = expected - stops or expected
        assert set(np.flatnonzero(unpacked(ruled.token_mask.allowed(), SMALL))) == expected
        if step < 7:
            ruled.token_mask.accept(output[step])


def test_a_models_rules_hold_for_every_output_and_its_last_token_is_its_own() -> None:
    """The last token comes against the grammar, which is not asked about it."""
    rules = OutputRules(bad_words=((4,), (1, 2)), last=(5,))

    def allowed(request: Request) -> list[set[int]]:
        mask, found = constrained(request, SMALL, rules).token_mask, list[set[int]]()
        assert mask is not None
        for token in (1, 3, 5):
            found.append(set(np.flatnonzero(unpacked(mask.allowed(), SMALL)).tolist()))
            mask.accept(token)
        return found

    free = set(range(SMALL)) - {4}
    assert allowed(ask("x", PROMPT, max_tokens=3)) == [free, free - {2}, {5}]
    assert allowed(ask("x", PROMPT, max_tokens=3, min_tokens=3, bad_words=[[3]])) == [free - {3}, free - {2, 3}, {5}]
    assert allowed(ask("x", PROMPT, max_tokens=3, ignore_eos=True)) == [free, free - {2}, free]
    assert allowed(ask("x", PROMPT, max_tokens=4)) == [free, free - {2}, free]
    held = ask("x", PROMPT, max_tokens=3, mask=Listed([{1, 2}, {2, 3}]))
    assert allowed(held) == [{1, 2}, {3}, {5}]


def test_masks_of_one_kind_are_prepared_together_and_one_failure_is_nobody_elses() -> None:
    asked: list[list[object]] = []

    class Together(Listed):
        @staticmethod
        def prepare(masks: Iterable[Together]) -> None:
            asked.append(list(masks))
            raise RuntimeError("one of them is broken")

    inner = [Together([{1}]), Listed([{2}]), Together([{3}]), Together([set()])]
    requests = [ask(str(n), PROMPT, mask=mask) for n, mask in enumerate(inner)]
    requests[1] = constrained(requests[1], SMALL)
    requests[2] = constrained(requests[2], SMALL)
    seqs = {row: Sequence(request, 1) for row, request in enumerate([*requests, ask("free", PROMPT)])}
    ended: list[str] = []
    found = due(seqs, lambda seq, error: ended.append(f"{seq.id}: {error}"))
    assert {row: np.flatnonzero(unpacked(bits, SMALL)).tolist() for row, bits in found.items()} == {
        0: [1],
        1: [2],
        2: [3],
    }
    assert ended == ["3: the token mask failed: it allows no token."]
    assert sorted(map(len, asked)) == [1, 2]
    assert {id(mask) for group in asked for mask in group} == {id(inner[0]), id(inner[2]), id(inner[3])}


def test_logprobs_of_masked_requests_are_those_before_the_mask(tiny_model: Callable[[str], Path]) -> None:
    with rig(tiny_model("qwen3")) as own:
        outcome = own.run(ask("x", PROMPT, mask=Alternating(), logprobs=1), ask("free", PROMPT))["x"]
    with torch.inference_mode():
        tokens = [*PROMPT, *outcome.tokens]
        scores = tiny_models.build("qwen3")(torch.tensor([tokens])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = [(token, scores[n, token].item()) for n, token in enumerate(outcome.tokens)]
    assert [token for token, _ in outcome.scored] == outcome.tokens
    assert [logprob for _, logprob in outcome.scored] == pytest.approx([logprob for _, logprob in expected], abs=1e-3)
    assert outcome.tokens != scores.argmax(1).tolist(), "the mask changed nothing"

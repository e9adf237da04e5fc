"""Reasoning within a request: its budget, and the mask that waits for its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.plan.request import Request, Thinking
from ridgeline.core.plan.token_bits import packed, unpacked
from ridgeline.engine.masks import constrained
from tests.driving import ask, rig
from tests.tiny_models import VOCAB

BEGIN, END, EOS = 60, (61, 62), 63
PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)
TOKENS = st.sampled_from([1, 2, 60, 61, 62])


class Only:
    """The mask of a text that may only be 20, 21, 22, …"""

    def __init__(self) -> None:
        self.next = 20

    def accept(self, token_id: int) -> None:
        assert token_id == self.next
        self.next += 1

    def allowed(self) -> np.ndarray:
        return packed(np.arange(VOCAB) == self.next)


def thinks(request: Request, budget: int | None, **known: object) -> Request:
    thinking = {"inside": True, "begins": ((BEGIN,),), "ends": (END,), "closing": END, "budget": budget} | known
    fields = {name: getattr(request, name) for name in request.__dataclass_fields__}
    return Request(**fields | {"thinking": Thinking(**thinking), "eos_ids": frozenset({EOS})})  # type: ignore[arg-type]


@given(tokens=st.lists(TOKENS, max_size=12), budget=st.none() | st.integers(0, 6), masked=st.booleans())
def test_a_budget_forces_the_end_and_the_mask_begins_there(tokens: list[int], budget: int | None, masked: bool) -> None:
    mask = constrained(thinks(ask("x", PROMPT, mask=Only() if masked else None), budget), VOCAB).token_mask
    if mask is None:
        assert budget is None
        assert not masked
        return
    output: list[int] = []
    for token in tokens:
        allowed = set(np.flatnonzero(unpacked(mask.allowed(), VOCAB)))
        end = next((n for n in range(1, len(output)) if tuple(output[n - 1 : n + 1]) == END), None)
        if end is not None:
            assert allowed == ({20 + len(output) - end - 1} if masked else set(range(VOCAB)))
        elif budget is not None and len(output) >= budget:
            assert allowed == {62 if output[-1:] == [61] else 61}
        else:
            assert allowed == set(range(VOCAB)) - ({EOS} if masked else set())
        output.append(token if token in allowed else min(allowed))
        mask.accept(output[-1])


@given(tokens=st.lists(TOKENS, max_size=8), masked=st.booleans(), begins=st.sampled_from([((60,),), ((60, 1),)]))
def test_reasoning_may_begin_in_the_output(
    tokens: list[int], masked: bool, begins: tuple[tuple[int, ...], ...]
) -> None:
    request = thinks(ask("x", PROMPT, mask=Only() if masked else None), 1, inside=False, begins=begins)
    mask, output = constrained(request, VOCAB).token_mask, list[int]()
    assert mask is not None
    length = len(begins[0])
    for token in tokens:
        allowed = set(np.flatnonzero(unpacked(mask.allowed(), VOCAB)))
        known = tuple(output[:length])
        if known == begins[0]:
            after = tuple(output[length:])
            if not after:
                assert allowed == set(range(VOCAB)) - ({EOS} if masked else set())
            elif END not in (after[:2], after[1:3]):
                assert allowed == {62 if after[-1] == 61 else 61}
        elif masked and output and known == begins[0][: len(output)]:
            assert allowed == {begins[0][len(output)]}
        elif masked:
            assert allowed == {20 + len(output)} | ({60} if not output else set())
        output.append(token if token in allowed else min(allowed))
        mask.accept(output[-1])


@pytest.mark.parametrize("budget", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_budgets_hold_on_the_device_with_plans_ahead(
    tiny_model: Callable[[str], Path], budget: int, temperature: float
) -> None:
    options = {"max_tokens": 9, "temperature": temperature}
    with rig(tiny_model("qwen3")) as own:
        requests = [
            thinks(ask("free", PROMPT, seed=1, **options), budget),
            thinks(ask("masked", PROMPT, seed=2, mask=Only(), **options), budget),
            thinks(ask("ruled", PROMPT, seed=3, bad_words=[[1]], **options), budget),
            thinks(ask("opened", PROMPT, seed=4, mask=Only(), **options), budget, opening=(40, 41)),
        ]
        outcomes = own.run(*requests, ask("other", PROMPT))
        assert own.errors == []
    for name, before in (("free", 0), ("masked", 0), ("ruled", 0), ("opened", 2)):
        tokens = outcomes[name].tokens
        assert tuple(tokens[before + budget : before + budget + 2]) == END, name
        assert len(tokens) == 9
    assert outcomes["masked"].tokens[budget + 2 :] == list(range(20, 20 + 7 - budget))
    assert outcomes["opened"].tokens[:2] == [40, 41]

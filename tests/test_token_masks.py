"""Token masks on the real worker: they arrive between forward and sample, and bind their own row only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.driving import alone, ask, rig
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
        if self.count == 2 and self.fault in ("allowed", "nothing", "too short"):
            if self.fault == "allowed":
                raise RuntimeError("the grammar broke")
            return np.zeros(VOCAB if self.fault == "nothing" else 3, np.bool_)
        return np.arange(VOCAB) % 2 == self.count % 2


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


@pytest.mark.parametrize("fault", ["accept", "allowed", "nothing", "too short"])
def test_a_mask_that_fails_ends_its_own_request_only(tiny_model: Callable[[str], Path], fault: str) -> None:
    folder = tiny_model("qwen3")
    free = ask("a", PROMPT, max_tokens=10)
    expected = alone(folder, free)
    with rig(folder) as own:
        outcomes = own.run(free, ask("x", PROMPT, mask=Alternating(fault)), ask("y", PROMPT, mask=Alternating()))
        assert outcomes["x"].finish_reason == "error"
        assert len(outcomes["x"].tokens) == 2 + (fault == "accept")
        assert outcomes["a"].tokens == expected
        assert parities(outcomes["y"].tokens) == [0, 1] * 4
        scheduler = own.engine.scheduler
        assert scheduler.cache.pool.free_pages == scheduler.cache.pool.num_pages

"""A planted slowdown of 5 % is called, and no difference is not, in every one of 20 trials."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.noise import compare, in_turn

TRIALS = 20


class NoisyMachine:
    """Times around one second: 1.5 % lognormal noise, one run in fifteen 10-60 % too long, a slow drift of 4 %."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.runs = 0

    def run(self, work: float) -> float:
        self.runs += 1
        drift = 1 + 0.04 * np.sin(self.runs / 25) + 0.0003 * self.runs
        outlier = 1 + (self.random.random() < 1 / 15) * self.random.uniform(0.1, 0.6)
        return float(work * drift * outlier * self.random.lognormal(0, 0.015))


def verdicts(measure: Callable[[int, float], str], work: float) -> list[str]:
    return [measure(trial, work) for trial in range(TRIALS)]


def simulated(trial: int, work: float) -> str:
    machine = NoisyMachine(trial)
    return compare(*in_turn(lambda: machine.run(1.0), lambda: machine.run(work), 40), paired=True).verdict


@pytest.mark.parametrize(("work", "verdict"), [(1.05, "slower"), (1.0, "no difference"), (1 / 1.05, "faster")])
def test_simulated_noise(work: float, verdict: str) -> None:
    assert verdicts(simulated, work) == [verdict] * TRIALS


def real(_: int, work: float) -> str:
    """200 products of small matrices, or 5 % more, in CPU time of this thread."""
    matrix = np.random.default_rng(0).random((24, 24))

    def run(times: int) -> float:
        started = time.thread_time()
        for _ in range(times):
            matrix @ matrix
        return time.thread_time() - started

    return compare(*in_turn(lambda: run(200), lambda: run(round(200 * work)), 60), paired=True).verdict


@pytest.mark.timing
@pytest.mark.parametrize(("work", "verdict"), [(1.05, "slower"), (1.0, "no difference")])
def test_real_noise_of_this_cpu(work: float, verdict: str) -> None:
    assert verdicts(real, work) == [verdict] * TRIALS


def test_a_difference_below_the_threshold_is_none_and_known_to_be() -> None:
    a = np.random.default_rng(1).lognormal(0, 0.01, 400)
    small = compare(a, a * 1.01, threshold=0.02, paired=True)
    assert (small.verdict, small.sure) == ("no difference", True)
    assert compare(a, a * 1.01, threshold=0.005, paired=True).verdict == "slower"


def test_noise_too_large_for_an_answer_is_said() -> None:
    random = np.random.default_rng(2)
    found = compare(random.lognormal(0, 0.3, 6), random.lognormal(0, 0.3, 6))
    assert (found.verdict, found.sure) == ("no difference", False)
    assert "too noisy" in str(found)


def test_unpaired_sides_may_differ_in_length() -> None:
    random = np.random.default_rng(3)
    assert compare(random.lognormal(0, 0.01, 50), random.lognormal(0.1, 0.01, 30)).verdict == "slower"


@pytest.mark.parametrize(
    ("a", "b", "paired", "word"),
    [
        ([1.0] * 4, [1.0] * 9, False, "at least 5"),
        ([1.0] * 5, [1.0] * 6, True, "as many"),
        ([1.0] * 5, [1.0] * 4 + [0.0], False, "above 0"),
        ([1.0] * 5, [1.0] * 4 + [float("nan")], False, "finite"),
    ],
)
def test_samples_that_allow_no_verdict_are_refused(a: list, b: list, paired: bool, word: str) -> None:
    with pytest.raises(InvalidConfig, match=word):
        compare(a, b, paired=paired)


def test_in_turn_alternates_who_goes_first() -> None:
    order: list[str] = []
    in_turn(lambda: order.append("a") or 1.0, lambda: order.append("b") or 1.0, 3)
    assert "".join(order[2:]) == "abbaab"

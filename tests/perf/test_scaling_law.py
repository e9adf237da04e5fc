"""A fitted scaling law recovers the constants that its data was made with, and splits a budget as its optimum says."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.scaling_law import Run, ScalingLaw, errors, fit
from ridgeline_bench.scripts.scaling_laws import told

CHINCHILLA = ScalingLaw(1.69, 406.4, 0.34, 410.7, 0.28)  # Hoffmann et al., equation 10
SIZES = [(n, d) for n in (1e6, 4e6, 16e6, 64e6) for d in (1e7, 5e7, 2.5e8, 1e9)]


def runs_of(law: ScalingLaw, noise: float = 0.0, seed: int = 0) -> list[Run]:
    draw = random.Random(seed)
    return [Run(n, d, law.loss(n, d) * (1 + draw.uniform(-noise, noise))) for n, d in SIZES]


@pytest.mark.parametrize(
    "law", [CHINCHILLA, ScalingLaw(1.2, 20.0, 0.2, 3000.0, 0.5), ScalingLaw(0.5, 900, 0.6, 50, 0.2)]
)
def test_the_constants_of_made_data_are_recovered(law: ScalingLaw) -> None:
    found = fit(runs_of(law))
    assert found.error < 1e-4
    assert (found.floor, found.alpha, found.beta) == pytest.approx((law.floor, law.alpha, law.beta), rel=0.02)
    assert (found.a, found.b) == pytest.approx((law.a, law.b), rel=0.15)


def test_noise_of_half_a_percent_leaves_predictions_of_larger_models_within_one() -> None:
    for seed in range(3):
        found = fit(runs_of(CHINCHILLA, noise=0.005, seed=seed))
        larger = [Run(n, d, CHINCHILLA.loss(n, d)) for n in (1.3e8, 2.6e8) for d in (1e9, 2e9)]
        assert max(errors(found, larger)) < 0.01


@settings(max_examples=5, deadline=None)
@given(st.floats(0.5, 3), st.floats(0.1, 1.0), st.floats(0.1, 1.0))
def test_no_other_split_of_a_budget_has_less_loss(floor: float, alpha: float, beta: float) -> None:
    law = ScalingLaw(floor, 300.0, alpha, 500.0, beta)
    parameters, tokens = law.best(1e18)
    assert 6 * parameters * tokens == pytest.approx(1e18)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert law.loss(parameters * factor, tokens / factor) > law.loss(parameters, tokens)


def test_chinchillas_own_constants_give_its_optimum() -> None:
    """By hand: G = (0.34 · 406.4 / (0.28 · 410.7))^(1 / 0.62) = 1.345, N = G (C / 6)^(0.28 / 0.62)."""
    parameters, tokens = CHINCHILLA.best(5.76e23)
    assert parameters == pytest.approx(1.345 * (5.76e23 / 6) ** (0.28 / 0.62), rel=1e-3)
    assert tokens == pytest.approx(5.76e23 / 6 / parameters)


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([Run(1e6, 1e7, 3.0)] * 9, "9 runs of 1 sizes and 1 lengths"),
        ([*runs_of(CHINCHILLA)[:-1], Run(1e6, 1e7, float("nan"))], "numbers above 0"),
    ],
)
def test_runs_that_cannot_decide_a_law_are_refused(runs: list[Run], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        fit(runs)


@pytest.mark.parametrize(("a", "b", "idle"), [(0.0, 2.0, "parameters"), (2.0, 0.0, "tokens")])
def test_a_law_without_a_gain_by_one_of_both_has_no_best_split(a: float, b: float, idle: str) -> None:
    with pytest.raises(InvalidConfig, match=f"no gain by {idle}"):
        ScalingLaw(1.0, a, 0.3, b, 0.3).best(1e18)
    table, said = told(ScalingLaw(1.0, a, 0.3, b, 0.3), [Run(1e6, 1e6, 3.0)], [])
    assert table.row_count == 1
    assert f"no gain by {idle}" in said[-1]

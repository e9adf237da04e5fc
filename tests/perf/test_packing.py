"""Bin packing against trying everything, and spot devices against a simulation."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.hardware import find
from ridgeline.perf.packing import items_of, need_of, packed, shares
from ridgeline.perf.planner import Deployment, Plan
from ridgeline.perf.spot import SpotTerms, compared
from tests.perf.models import spec

SMALL = Deployment(model=spec("qwen3-0.6b"), hardware=find("H200"), input=1024, output=256)


def fewest(needs: list[int], size: int) -> int:
    """By trying every assignment."""
    for count in range(1, len(needs) + 1):
        for places in product(range(count), repeat=len(needs)):
            sums = [0] * count
            for need, place in zip(needs, places, strict=True):
                sums[place] += need
            if max(sums) <= size:
                return count
    return 0


@given(st.lists(st.integers(1, 10), min_size=1, max_size=6), st.integers(10, 20))
def test_a_packing_is_one_and_the_fewest(needs: list[int], size: int) -> None:
    found = packed(needs, size)
    assert sorted(number for device in found.devices for number in device) == list(range(len(needs)))
    assert all(sum(needs[number] for number in device) <= size for device in found.devices)
    assert found.proven
    assert len(found.devices) == fewest(needs, size) >= found.fewest


def test_where_best_fit_is_not_enough() -> None:
    """7 + 3, 6 + 4, 6 + 3 + 1, 5 + 5, 5 + 3 + 2 fill five devices to the last byte."""
    needs = [7, 6, 6, 5, 5, 5, 4, 3, 3, 3, 2, 1]
    assert len(packed(needs, 10).devices) == 5 == -(-sum(needs) // 10)
    many = packed([6.0] * 20, 10)
    assert (len(many.devices), many.fewest, many.proven) == (20, 12, False)
    with pytest.raises(InvalidConfig, match="a model needs"):
        packed([11], 10)


def test_a_models_need_is_what_the_plan_says() -> None:
    plan = Plan(SMALL)
    assert need_of(SMALL, 8) == plan.weights + plan.activations + 8 * plan.kv_per_request
    assert [item.name for item in items_of([("a", SMALL, 2), ("b", SMALL, 1)], 8)] == ["a", "a", "b"]
    with pytest.raises(InvalidConfig, match="divide this model with --tp"):
        need_of(SMALL, plan.max_requests + 1)
    assert shares([20.0, 60.0], 120.0, 160.0) == [pytest.approx(0.1875), pytest.approx(0.5625)]


def test_spot_serves_as_long_as_a_simulation_says() -> None:
    terms, draw = SpotTerms(price=1.0, interruptions=0.5, lost=400.0), random.Random(0)
    found = compared(terms, price=3.0, devices=4, tokens_per_second=1000.0, request=20.0)
    runs = [min(draw.expovariate(0.5 / 3600) for _ in range(4)) for _ in range(20_000)]
    assert found.serving == pytest.approx(sum(runs) / (sum(runs) + 400.0 * len(runs)), rel=0.01)
    assert found.on_demand == pytest.approx(3 * 4 / 3600 / 1000 * 1e6)
    assert found.repeated == 0, "a request of 20 s ends within the notice"
    at_limit = SpotTerms(price=1.0, interruptions=found.pays_below, lost=400.0)
    same = compared(at_limit, price=3.0, devices=4, tokens_per_second=1000.0, request=20.0)
    assert same.cost == pytest.approx(same.on_demand)
    long = compared(terms, price=3.0, devices=4, tokens_per_second=1000.0, request=600.0)
    assert (long.repeated, long.serving) == (300.0, pytest.approx(1 / (1 + 4 * 0.5 * 700 / 3600)))
    with pytest.raises(InvalidConfig, match="spot interruptions must be at least 0"):
        SpotTerms(price=1.0, interruptions=-1.0)

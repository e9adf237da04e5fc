"""What follows from experts' counts, against counts made one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.perf.experts import capacity, dropped, imbalance, utilization


def test_imbalance() -> None:
    assert imbalance([5, 5, 5, 5]) == 1
    assert imbalance([20, 0, 0, 0]) == 4
    assert imbalance([0, 0]) == 0


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.sampled_from([1, 16, 64, 128]))
def test_utilization_counts_the_rows_of_tiles(counts: list[int], tile: int) -> None:
    rows = 0
    for count in counts:
        while count > 0:  # one tile after the other
            rows, count = rows + tile, count - tile
    assert utilization(counts, tile) == pytest.approx(sum(counts) / rows if rows else 1)
    assert utilization(counts, 1) == 1


@given(st.data(), st.sampled_from([0.5, 1.0, 1.25, 2.0]))
def test_what_a_capacity_drops(data: st.DataObject, factor: float) -> None:
    """Tokens come one after the other, and an expert that is full takes no more of them."""
    experts, used, tokens = 6, 2, data.draw(st.integers(1, 30))
    choices = data.draw(st.lists(st.permutations(range(experts)), min_size=tokens, max_size=tokens))
    room = -(-int(factor * 100) * tokens * used // (100 * experts))
    assert capacity(factor, tokens, experts, used) == room
    taken, lost = [0] * experts, 0
    for chosen in choices:
        for expert in chosen[:used]:
            lost += taken[expert] >= room
            taken[expert] += taken[expert] < room
    counts = np.bincount([expert for chosen in choices for expert in chosen[:used]], minlength=experts)
    assert dropped(counts, room) == lost


def test_a_capacity_is_not_rounded_up_for_a_float_s_sake() -> None:
    assert capacity(1.1, 100, 11, 1) == 10  # 1.1 · 100 / 11 is 10.000000000000002

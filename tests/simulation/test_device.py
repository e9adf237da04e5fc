"""The simulated device against the clock: steps run one after the other, and tokens are those that traffic says."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine.cache.prefix import chain_hashes, root_hash
from ridgeline.simulation.clock import VirtualClock
from ridgeline.simulation.figures import Spread
from ridgeline.simulation.tally import Tally
from ridgeline.simulation.traffic import Piece, Prompts

pieces = st.lists(st.builds(Piece, st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=8)


def test_the_clock_never_goes_back() -> None:
    clock = VirtualClock()
    clock.advance(2.0)
    assert clock() == 2.0
    with pytest.raises(AssertionError):
        clock.advance(1.0)


@given(st.lists(pieces, min_size=1, max_size=6), st.sampled_from([1, 4, 16]))
def test_hashes_of_pieces_are_those_of_their_tokens(prompts: list[list[Piece]], size: int) -> None:
    known = Prompts(size, root_hash(""))
    for prompt in prompts:
        tokens = known.tokens(prompt)
        assert len(tokens) == sum(piece.tokens for piece in prompt)
        whole = tokens[: len(tokens) // size * size]
        assert list(known.hashes(prompt)) == list(chain_hashes(root_hash(""), whole, size))


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200), st.sampled_from([1, 50, 90, 99, 100]))
def test_a_tally_knows_percentiles_within_a_thousandth(times: list[float], percent: int) -> None:
    one, many = Tally(), Tally()
    for each in times:
        one.add(each)
        many.add(each, 3)
    exact = sorted(times)[max(0, math.ceil(len(times) * percent / 100) - 1)]
    assert one.percentile(percent) == pytest.approx(exact, rel=1.1e-3)
    assert many.percentile(percent) == pytest.approx(exact, rel=1.1e-3)
    assert one.mean == pytest.approx(sum(times) / len(times))


def test_a_spread_takes_the_least_value_that_enough_do_not_exceed() -> None:
    found = Spread.of(array("d", [0.001 * n for n in range(1, 101)]))
    assert (found.p50, found.p90, found.p99) == pytest.approx((50, 90, 99))
    assert Spread.of(array("d")).p99 == 0.0

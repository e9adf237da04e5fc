"""The simulation of sums over many ranks: every form gives the sum, in the time that its formula says."""

from __future__ import annotations

import pytest

from ridgeline_bench.scripts.sum_forms import FAST, FORMS, SLOW, parents, ring, seconds, tree, two_levels, two_trees

ALPHA, BETA = FAST


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("ranks", "hosts"), [(2, 1), (4, 2), (6, 2), (8, 1), (12, 4)])
def test_every_form_gives_every_rank_the_sum(form: str, ranks: int, hosts: int) -> None:
    messages = FORMS[form](ranks, 3e5, hosts)
    assert seconds(messages, ranks, hosts) > 0
    with pytest.raises(AssertionError, match="not the sum"):
        seconds([message for message in messages if message.target != ranks - 1], ranks, hosts)


def test_a_sum_on_one_host_takes_what_formulas_say() -> None:
    for ranks in (2, 4, 8):
        for nbytes in (8e3, 64e6):
            turns = 2 * (ranks - 1)
            assert seconds(ring(ranks, nbytes), ranks) == pytest.approx(turns * (ALPHA + nbytes / ranks * BETA))
    small = 1.0
    assert seconds(tree(8, small), 8) == pytest.approx(2 * 3 * ALPHA, rel=1e-3), "three levels up, and down"
    assert seconds(tree(64, small), 64) == pytest.approx(2 * 6 * ALPHA, rel=1e-3)
    large = 1e9
    assert seconds(tree(8, large), 8) > 2.9 * large * BETA
    assert 2 * large * BETA < seconds(two_trees(8, large), 8) < 2.4 * large * BETA


def test_half_of_the_ranks_are_leaves_of_either_tree() -> None:
    for ranks in (4, 8, 32):
        assert set(range(ranks)) - set(parents(ranks).values()) == set(range(0, ranks, 2))


def test_on_two_levels_only_parts_leave_a_host() -> None:
    nbytes, ranks, hosts = 1e9, 16, 2
    crossing = sum(m.nbytes for m in two_levels(ranks, nbytes, hosts) if m.source // 8 != m.target // 8)
    assert crossing == pytest.approx(8 * 2 * nbytes / 8), "of each of 8 ranks a part goes there, and as much back"
    assert seconds(two_levels(ranks, nbytes, hosts), ranks, hosts) == pytest.approx(
        14 * nbytes / 8 * FAST.beta + 2 * nbytes / 16 * SLOW.beta, rel=0.01
    )

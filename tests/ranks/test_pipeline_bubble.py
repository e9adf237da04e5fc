"""The stages of a pipeline stand still as long as the formula says, and no longer."""

from __future__ import annotations

import pytest

pytest.importorskip("msgspec")

from ridgeline_bench.scripts.pipeline_bubble import bench

SECONDS = 0.06  # that a stage sleeps for a part, which a loaded machine changes little


@pytest.mark.timing
def test_stages_work_as_long_as_the_formula_says() -> None:
    with bench(2, SECONDS) as made:
        made.full(1)
        shares = [made.alone(1), made.alone(2), made.alone(6), made.full(1), made.full(2)]
    assert [share.formula for share in shares] == [pytest.approx(f) for f in (1 / 2, 2 / 3, 6 / 7, 1 / 2, 1.0)]
    for share in shares:
        assert 0.8 * share.formula < share.measured < 1.04 * share.formula, share

"""Steps after the device ran out of memory: half of what failed, never less than a request needs, and back in time."""

from __future__ import annotations

import numpy as np

from ridgeline.core.plan.step import Feature, Rows, StepPlan
from ridgeline.engine.pace import GOOD_STEPS, Pace


def failed(tokens: int) -> StepPlan:
    """A plan of one row."""
    ones = np.ones(1, np.int32)
    return StepPlan(1, Rows(ones, ones, ones, tokens * ones, ones, 0, Feature.NONE, 0), tokens * ones)


def after(pace: Pace, good_steps: int) -> tuple[int, int]:
    for _ in range(good_steps):
        pace.went_well()
    return pace.tokens, pace.rows


def test_a_step_that_fails_is_halved_and_doubles_each_time_enough_went_well() -> None:
    pace = Pace(100, 12)
    assert after(pace, 3 * GOOD_STEPS) == (100, 12), "as configured, however well it goes"
    assert pace.shrink(failed(80))
    assert (pace.tokens, pace.rows) == (40, 12)
    assert pace.shrink(failed(11))
    assert (pace.tokens, pace.rows) == (5, 5), "a row has a token at least"
    assert after(pace, GOOD_STEPS - 1) == (5, 5)
    assert after(pace, 1) == (10, 10)
    assert after(pace, GOOD_STEPS) == (20, 12)
    assert after(pace, GOOD_STEPS) == (40, 12)
    assert after(pace, GOOD_STEPS - 1) == (40, 12)
    assert pace.shrink(failed(40))
    assert after(pace, GOOD_STEPS - 1) == (20, 12), "counted anew after each failure"
    assert after(pace, 1) == (40, 12)
    assert after(pace, 2 * GOOD_STEPS) == (100, 12)


def test_no_step_is_too_small_for_the_rows_that_run_together() -> None:
    pace = Pace(64, 8)
    assert not pace.shrink(failed(1)), "half a token cannot be"
    assert (pace.tokens, pace.rows) == (64, 8)
    pace.keep_room(2)
    assert not pace.shrink(failed(2))
    assert pace.shrink(failed(3))
    assert (pace.tokens, pace.rows) == (2, 2)
    pace.keep_room(1)
    assert not pace.shrink(failed(2)), "some request still runs two"
    small = Pace(64, 8)
    assert small.shrink(failed(2))
    assert (small.tokens, small.rows) == (1, 1)
    small.keep_room(2)
    assert (small.tokens, small.rows) == (2, 2)

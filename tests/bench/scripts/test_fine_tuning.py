"""Where the time of a step of fine-tuning goes, from the spans of its kernels."""

from __future__ import annotations

import pytest

from ridgeline_bench.scripts.fine_tuning import of_spans


def test_the_time_between_kernels_is_that_in_which_none_runs() -> None:
    """Kernels of two streams run at once, and a gap is counted only where both are idle."""
    spans = [(30.0, 50.0, "b"), (0.0, 10.0, "a"), (5.0, 20.0, "b"), (100.0, 110.0, "a")]
    found = of_spans(spans, steps=1, count=1)
    assert found["step"] == pytest.approx(0.110)
    assert found["all"] == pytest.approx(0.055)  # 10 + 15 + 20 + 10 us: more than what is covered
    assert found["between"] == pytest.approx(0.060)
    assert (found["gaps"], found["longest_us"], found["launches"]) == (2, [50.0, 10.0], 4)
    assert found["kernels"] == [{"name": "b", "ms": pytest.approx(0.035), "share": pytest.approx(35 / 110), "count": 2}]

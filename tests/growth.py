"""A check that work takes time in proportion to the length of what it is given, on a machine however busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TIMES = 16  # the long text is so many times as long as the short one
SLACK = 3  # times the proportional time; the square would take TIMES times that
NOTHING = 0.0005  # seconds; less is not told apart from this


def processor_seconds(work: Callable[[T], object], given: T) -> float:
    start = time.process_time()
    work(given)
    return time.process_time() - start


def check_growth(make: Callable[[int], T], work: Callable[[T], object], size: int, about: object = "") -> None:
    """Assert that work on `make(TIMES * size)` takes at most SLACK * TIMES the processor time of `make(size)`. What
    is made does not count."""
    short, long = make(size), make(TIMES * size)
    least = max(min(processor_seconds(work, short) for _ in range(3)), NOTHING)
    for _ in range(3):  # other processes may have had the caches
        took = processor_seconds(work, long)
        if took <= SLACK * TIMES * least:
            return
        least = max(least, processor_seconds(work, short))
    raise AssertionError(f"{about}: {took:.3f} s of {TIMES} times what takes {least:.4f} s")

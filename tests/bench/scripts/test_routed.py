"""The prompts with which rules of the router are measured, and the processor time that is read of a process."""

from __future__ import annotations

import os
import time

from ridgeline_bench.scripts import routed


def test_shared_prompts_begin_in_a_dozen_ways_and_random_ones_in_none() -> None:
    shared = routed.prompts("shared", 60, 1)
    beginnings = {each[: routed.SHARED] for each in shared}
    assert len(set(shared)) == 60
    assert 6 <= len(beginnings) <= routed.BEGINNINGS
    assert all(len(each) == routed.SHARED for each in beginnings)
    random = routed.prompts("random", 60, 1)
    assert len({each[:16] for each in random}) == 60
    assert routed.prompts("random", 60, 1) == random
    assert routed.prompts("random", 60, 2) != random


def test_rules_are_compared_over_both_orders() -> None:
    """Whatever runs second is a tenth slower; the rules are alike."""
    rates = [("round-robin", 0, 10.0), ("prefix", 0, 9.0), ("prefix", 1, 20.0), ("round-robin", 1, 18.0)]
    lines = [{"kind": "random", "rule": r, "round": n, "requests_per_second": x} for r, n, x in rates]
    assert abs(routed.of_round_robin([*lines, {"kind": "cost"}], "random", "prefix") - 1) < 1e-9


def test_processor_time_is_that_of_the_process() -> None:
    before, own = routed.cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() - own < 0.2:
        pass
    assert 0.1 < routed.cpu_seconds(os.getpid()) - before < 0.5

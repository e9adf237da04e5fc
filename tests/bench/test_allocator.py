"""The allocator's rules by hand, and curves of a trace that is written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline_bench.profile.allocations import Moment, fragments, thinned, timeline
from ridgeline_bench.scripts.allocator.model import (
    MIB,
    CachingModel,
    Knobs,
    OutOfMemory,
    block_bytes,
    segment_bytes,
)
from ridgeline_bench.scripts.allocator.page import (
    calls_table,
    rules_table,
    server_table,
    sizes_table,
    step_table,
)
from ridgeline_bench.scripts.allocator.rules import model_lines
from ridgeline_bench.scripts.allocator.scenarios import SCENARIOS, SETTINGS, walk


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (33 * MIB + 1, 33 * MIB + 512, 34 * MIB),
    ],
)
def test_requests_are_rounded(size: int, block: int, segment: int) -> None:
    assert (block_bytes(size), segment_bytes(block_bytes(size))) == (block, segment)


def test_four_steps_to_the_next_power_of_two() -> None:
    assert block_bytes(1200, 4) == 1536, "up to 4 * 512 bytes all are multiples of 512"
    assert [block_bytes(n * MIB, 4) // MIB for n in (16, 17, 20, 21, 31)] == [16, 20, 20, 24, 32]


def test_a_freed_block_waits_for_the_stream_that_uses_it() -> None:
    model = CachingModel()
    model.allocate("x", 32 * MIB)
    model.use("x")
    model.free("x")
    assert (model.held().allocated, model.held().free) == (0, 0)
    assert model.held().requested == 32 * MIB, "as torch counts it"
    model.allocate("too early", 32 * MIB)
    model.synchronize()
    assert (model.held().free, model.mallocs) == (0, 2), "torch asks the stream's event when it needs memory"
    model.allocate("in its place", 32 * MIB)
    assert model.mallocs == 2


def test_scenarios_end_with_nothing_in_use_or_say_so() -> None:
    for name, scenario in SCENARIOS.items():
        for knobs in SETTINGS.values():
            found = walk(CachingModel(knobs), scenario.events)
            end = found.held[-1]
            assert end.reserved == end.allocated + end.free, name
            assert found.peak_requested <= found.peak_allocated <= found.peak_reserved, name


def test_what_each_setting_saves() -> None:
    """MiB that are held at the peak, which a GPU must find again (docs/allocator.md)."""

    def held(scenario: str, setting: str) -> int:
        return walk(CachingModel(SETTINGS[setting]), SCENARIOS[scenario].events).peak_reserved // MIB

    assert [held("growing", name) for name in SETTINGS] == [9600, 9600, 4620, 1100]
    assert [held("tenant", name) for name in SETTINGS] == [512, 280, 512, 280]


def test_free_segments_go_back_when_memory_is_short() -> None:
    model = CachingModel(Knobs(limit=100 * MIB))
    model.allocate("a", 40 * MIB)
    model.allocate("b", 50 * MIB)
    model.free("a")
    model.allocate("c", 48 * MIB)
    assert (model.frees, model.retries, model.reserved) == (1, 1, 98 * MIB)
    with pytest.raises(OutOfMemory, match="c2 wants"):
        model.allocate("c2", 10 * MIB)


def event(action: str, size: int, addr: int = 0, us: int = 0, line: int = 1) -> dict[str, object]:
    frames = [
        {"filename": "/x/torch/nn.py", "line": 9, "name": "f"},
        {"filename": "/x/a.py", "line": line, "name": "g"},
    ]
    return {"action": action, "size": size, "addr": addr, "time_us": us, "frames": frames}


def test_a_trace_becomes_a_curve_with_what_made_its_peak() -> None:
    trace = [
        event("segment_alloc", 100, us=5),
        event("alloc", 30, 1, 6, line=3),
        event("alloc", 50, 2, 7, line=4),
        event("free_requested", 30, 1, 8),
        event("free_completed", 30, 1, 8),
        event("alloc", 10, 3, 9, line=4),
        event("free_completed", 7, 99, 9),
        event("segment_free", 100, us=10),
    ]
    found = timeline(trace, allocated=7, reserved=20)
    assert found.moments[0] == Moment(0, 7, 20)
    assert found.moments[-1] == Moment(5, 60, 20)
    assert found.peak == Moment(2, 87, 120)
    assert found.at_peak == {"a.py:4 g": 50, "a.py:3 g": 30, "before": 7}
    assert found.churn == 90
    assert found.calls["alloc"] == 3


def test_a_thin_curve_keeps_its_peaks() -> None:
    moments = [Moment(n, n * 7919 % 1000, n) for n in range(5000)]
    thin = thinned(moments, 50)
    assert len(thin) < 160
    assert max(m.allocated for m in thin) == max(m.allocated for m in moments)
    assert thin[0] == moments[0]
    assert thin[-1] == moments[-1]


def test_free_blocks_are_unused_or_cached() -> None:
    def segment(*blocks: tuple[str, int, int]) -> dict[str, object]:
        made = [{"state": state, "size": size, "requested_size": asked} for state, size, asked in blocks]
        used = sum(size for state, size, _ in blocks if state == "active_allocated")
        return {"allocated_size": used, "total_size": sum(size for _, size, _ in blocks), "blocks": made}

    of_a_graph = segment(("inactive", 50, 0)) | {"segment_pool_id": (0, 3)}
    used, idle = segment(("active_allocated", 60, 50), ("inactive", 40, 0)), segment(("inactive", 50, 0))
    found = fragments([used, idle, of_a_graph])
    assert (found.unused, found.cached, found.graphs, found.largest, found.padding) == (40, 50, 50, 50, 10)
    assert found.fragmentation == 0.2


def test_tables_of_the_page_are_made_of_stored_lines() -> None:
    found = [line | {"workload": "allocator rules", "microseconds": 12.4} for line in model_lines()]
    assert "| growing | `native` | 768 | 9,600 |  |  |  | 12 |" in rules_table(found)
    step = {
        "workload": "allocator of a training step", "processes": 2, "setting": "", "share": 0.0, "sent": 0,
        "peak_allocated": 30e9, "peak_reserved": 40e9, "seconds": 0.5, "losses_apart": 0.0,
    }  # fmt: skip
    half = step | {"share": 0.5, "peak_reserved": 30e9, "sent": 10e9, "seconds": 0.6}
    assert "| 2 | `native` | 50% | 30.0 | 30.0 | 25% | 10.0 | 600 | 0 |" in step_table([step, half])


def test_the_page_has_the_tables_of_what_is_stored() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/allocator.md").read_text()
    stored = (root / "benchmarks/results/h200-allocator.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in stored]
    for table in (rules_table, sizes_table, calls_table, server_table, step_table):
        assert table(lines) in page

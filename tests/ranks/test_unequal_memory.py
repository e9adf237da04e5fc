"""Ranks with unequal memory take the smallest cache, and the shortest context, that any of them has room for."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.assembly.device import _agreed
from ridgeline.worker.memory import MemoryReport
from tests.engine.layouts import layout_of
from tests.parallel.threads import ThreadAxis, on_ranks


def test_the_smallest_cache_wins() -> None:
    layout = layout_of(((None, 2),), 4, 1)

    def agree(axis: ThreadAxis) -> MemoryReport:
        pages, longest = [(50, 64), (30, 90), (40, 48)][axis.rank]
        report = MemoryReport(
            weights=10 + axis.rank,
            activations=1,
            kv_cache=pages * layout.page_bytes,
            layout=replace(layout, num_pages=pages),
            max_model_len=longest,
            max_chunk=8,
        )
        return _agreed(report, axis)

    for rank, report in enumerate(on_ranks(3, agree)):
        assert (report.layout.num_pages, report.max_model_len) == (30, 48)
        assert report.kv_cache == 30 * layout.page_bytes
        assert report.weights == 10 + rank

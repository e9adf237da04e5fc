"""The prediction of copies that overlap kernels, by hand; on a GPU what comes back from pieces is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ridgeline_bench.scripts.host_copies import Parts, Pipeline, main

ROOT = Path(__file__).parents[2]


def test_pieces_hide_all_but_the_longest_part() -> None:
    parts = Parts(to=3.0, kernel=4.0, back=2.0)
    assert [parts.overlapped(pieces) for pieces in (1, 2, 4)] == [9.0, 6.5, 5.25]
    assert parts.overlapped(1_000_000) == pytest.approx(4.0, rel=1e-5)


def test_what_is_printed_without_a_gpu_is_arithmetic(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["host_copies", "--quick", "--megabytes", "550", "--pieces", "1", "3"])
    main()
    one = 3 * 550 * 2**20 / 55e9  # three parts at 55 GB/s
    assert capsys.readouterr().out.split() == (
        f"1 pieces {1e3 * one:.2f} ms predicted 3 pieces {1e3 * (one / 3 + one * 2 / 9):.2f} ms predicted".split()
    )


@pytest.mark.gpu
def test_pieces_on_three_streams_give_what_one_piece_gives() -> None:
    assert Pipeline(1 << 22, pinned=True).right()


def test_the_page_s_table_is_what_was_measured() -> None:
    """Milliseconds of each number of pieces, as docs/host.md shows them."""
    lines = [json.loads(line) for line in (ROOT / "benchmarks/results/h100-host-copies.jsonl").read_text().splitlines()]
    timed = {(line["memory"], line["pieces"]): line for line in lines if "pieces" in line}
    rows = [
        f"| {pieces} | {1e3 * one['seconds']:.1f} | {1e3 * one['predicted']:.1f} | {1e3 * other['seconds']:.1f} |"
        for (memory, pieces), one in timed.items()
        if memory == "page-locked" and (other := timed["pageable", pieces])
    ]
    page = (ROOT / "docs/host.md").read_text()
    assert len(rows) == 6
    assert [row for row in rows if row not in page] == []

"""Work that holds the interpreter's lock gains nothing from a second thread; work that gives it back does."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.core.cores import available
from ridgeline_bench.scripts.interpreter_lock import Held, calls, kinds, lateness, main


@pytest.mark.parametrize(("gain", "share"), [(2.0, 0.0), (1.0, 1.0), (1.6, 0.25), (0.9, 1.0), (2.1, 0.0)])
def test_the_share_follows_from_the_gain_of_a_second_thread(gain: float, share: float) -> None:
    assert Held("", 1.0, gain, 0.0).share == pytest.approx(share)


def test_a_lock_that_is_held_is_seen_and_one_that_is_given_back_too() -> None:
    """The two ends, made of waiting, so that busy cores do not count: a lock of our own, and none."""
    lock = threading.Lock()

    def holds() -> None:
        with lock:
            time.sleep(0.002)

    def gain(work: Callable[[], object]) -> float:
        return calls(work, 2, 0.15) / calls(work, 1, 0.15)

    # One of ten, where other processes take the cores in between
    assert any(gain(holds) < 1.3 for _ in range(10))
    assert any(gain(lambda: time.sleep(0.002)) > 1.5 for _ in range(10))


def test_a_loop_is_late_by_what_holds_the_lock() -> None:
    """One call of compiled code that keeps the lock delays the loop by about its whole time."""
    started = time.thread_time()
    sum(range(2_000_000))
    alone = time.thread_time() - started
    assert lateness(lambda: sum(range(2_000_000)), 0.3) >= alone / 2


@pytest.mark.skipif(available() < 2, reason="two threads show nothing on one core")
def test_every_kind_of_work_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["interpreter_lock", "--seconds", "0.02"])
    main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row[:24].strip() for row in rows] == list(kinds())


def test_the_page_s_table_is_what_was_measured() -> None:
    root = Path(__file__).parents[2]
    lines = map(json.loads, (root / "benchmarks/results/interpreter-lock-cpu.jsonl").read_text().splitlines())
    page = (root / "docs/host.md").read_text()
    for line in lines:
        held = Held(line["kind"], line["rate"], line["gain"], line["late"])
        share = f"{held.share:.0%}".replace("%", " %")
        figures = [f"{held.rate:,.0f}", f"{held.gain:.2f}\N{MULTIPLICATION SIGN}", share, f"{1e3 * held.late:.1f}"]
        assert f"| {' | '.join([held.kind, *figures])} |" in page

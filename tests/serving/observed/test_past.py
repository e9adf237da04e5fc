"""The last hour of the figures: what the file keeps, how several engines add up, and what a page is told."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.serving.generation.sums import summed
from ridgeline.serving.http import operator
from ridgeline.serving.observed import past
from ridgeline.serving.observed.past import AT, COLUMNS, COUNTERS, PERIOD, POINTS, Past
from ridgeline.serving.processes import engine_host
from ridgeline.transport.messages import Stats
from tests.serving.conftest import PATIENCE, Server, StartServer, engine_in_a_thread
from tests.serving.observed.figures import stats


def unpacked(told: dict[str, Any]) -> np.ndarray:
    """The rows as they were before differences were taken."""
    return np.cumsum(np.array(told["rows"], np.int64).reshape(-1, COLUMNS), axis=0)


def test_an_hour_is_kept_in_a_file_of_fixed_size(tmp_path: Path) -> None:
    book = Past(str(tmp_path / "engine"))
    for second in range(2 * 3600 + 7):
        book.note(stats(1000.0 + second, tokens=second))
    [file] = tmp_path.iterdir()
    assert file.stat().st_size <= POINTS * (COLUMNS + 1) * 8 < 1_000_000
    points = Past(str(tmp_path / "engine")).read()
    assert len(points) == POINTS
    assert points[-1, AT] == 1000 * (1000 + 2 * 3600 + 6)
    assert (np.diff(points[:, AT]) == 1000 * PERIOD).all()
    tokens = past.FIXED + COUNTERS.index("generation_tokens")
    assert (points[:, tokens] == points[:, AT] // 1000 - 1000).all()


def test_what_is_old_or_half_written_is_left_out(tmp_path: Path) -> None:
    book = Past(str(tmp_path / "engine"))
    for at in (10.0, 12.0, 14.0, 14.0 + PERIOD * POINTS):  # the last one lies where the third was
        book.note(stats(at))
    assert book.read()[:, AT].tolist() == [1000 * (14 + PERIOD * POINTS)]
    book.note(stats(16.0 + PERIOD * POINTS))
    with open(tmp_path / "engine.past", "r+b") as file:  # as a reader finds it between two halves of a write
        file.seek(8 * (COLUMNS + 1) * (8 % POINTS))
        file.write(np.int64(1).tobytes())
    assert book.read()[:, AT].tolist() == [1000 * (14 + PERIOD * POINTS)]


def test_without_a_file_or_room_for_it_there_is_no_past(tmp_path: Path) -> None:
    missing = Past(str(tmp_path / "nowhere" / "engine"))
    missing.note(stats(10.0))
    assert missing.read().shape == (0, COLUMNS)
    (tmp_path / "engine.past").write_bytes(b"short")
    assert Past(str(tmp_path / "engine")).read().shape == (0, COLUMNS)


times = st.lists(st.integers(1, 60), min_size=1, max_size=12, unique=True).map(sorted)


@given(engines=st.lists(st.tuples(times, st.integers(0, 3)), min_size=1, max_size=3))
def test_several_engines_add_up_as_their_newest_figures_do(
    tmp_path_factory: pytest.TempPathFactory, engines: list[tuple[list[int], int]]
) -> None:
    """At each moment the sum is that which `summed` makes of what every engine had said last."""
    folder = tmp_path_factory.mktemp("past")
    said: list[list[Stats]] = []
    for number, (slots, running) in enumerate(engines):
        said.append(
            [stats(PERIOD * slot + number / 8, tokens=slot * 10, running=running, first=slot) for slot in slots]
        )
        book = Past(str(folder / f"engine-{number}"))
        for each in said[-1]:
            book.note(each)
    found = past.together([Past(str(folder / f"engine-{number}")).read() for number in range(len(engines))])
    begun = max(each[0].at // PERIOD for each in said)
    slots = sorted({one.at // PERIOD for each in said for one in each if one.at // PERIOD >= begun})
    assert len(found) == len(slots)
    for row, slot in zip(found, slots, strict=True):
        newest = [max((s for s in each if s.at // PERIOD <= slot), key=lambda s: s.at) for each in said]
        lives = [len(said) == 1 or PERIOD * (slot + 1) - one.at <= 15 + PERIOD for one in newest]
        whole = summed(list(zip(newest, lives, strict=True)))
        assert row.tolist() == past._row(whole)


def test_a_page_is_told_differences_in_little_time_and_few_bytes(tmp_path: Path) -> None:
    """A busy hour of two engines, as the first answer brings it."""
    draws = np.random.default_rng(0)
    for number in range(2):
        rows = np.zeros((POINTS, COLUMNS + 1), np.int64)
        rows[:, :COLUMNS] = draws.integers(0, 2000, (POINTS, COLUMNS)).cumsum(0)
        rows[:, AT] = rows[:, -1] = np.arange(10**7, 10**7 + 2000 * POINTS, 2000)
        rows.tofile(tmp_path / f"engine-{number}.past")

    def answer() -> bytes:
        return msgspec.json.encode(past.told([Past(str(tmp_path / f"engine-{n}")).read() for n in range(2)], 0.0))

    spent = []
    for _ in range(5):
        before = time.thread_time()
        told = answer()
        spent.append(time.thread_time() - before)
    assert len(told) < 1_000_000
    assert min(spent) < 0.1  # a fifth of that on a machine with nothing else to do
    expected = past.together([Past(str(tmp_path / f"engine-{n}")).read() for n in range(2)])
    assert (unpacked(json.loads(told)) == expected).all()
    late = past.told([expected], expected[-3, AT] / 1000)
    assert (unpacked(late) == expected[-2:]).all()


# ---- the real thing -------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points that come often."""
    monkeypatch.setattr(past, "PERIOD", 0.1)
    monkeypatch.setattr(engine_host, "STATS_PERIOD", 0.05)
    monkeypatch.setattr(engine_host, "IDLE_WAIT", 0.02)
    monkeypatch.setattr(operator, "HOLE", 0.25)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def past_of(server: Server, **params: float) -> list[list[int]]:
    told = httpx.get(f"{server.url}/dashboard/data", params=params, timeout=PATIENCE).json()
    return [] if told["past"] is None else unpacked(told["past"]).tolist()


@pytest.mark.usefixtures("quick")
def test_the_past_is_the_same_for_every_api_server_and_outlives_the_engine(
    tmp_path: Path, start_server: StartServer
) -> None:
    socket = tmp_path / "engine"
    tokens = past.FIXED + COUNTERS.index("generation_tokens")
    with engine_in_a_thread(socket), start_server(engine=socket) as first:
        body = {"prompt": "x", "max_tokens": 7, "ignore_eos": True}
        assert httpx.post(f"{first.url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
        wait_until(lambda: [row[tokens] for row in past_of(first)][-1:] == [7])
        with start_server(engine=socket) as second:  # which has come later
            one, other = past_of(first), past_of(second)
            assert other[: len(one)] == one
            assert other[0][tokens] == 0
        newest = httpx.get(f"{first.url}/dashboard/data", timeout=PATIENCE).json()["figures"]["at"]
        assert past_of(first, since=newest) == [], "a page that knows it is not told again"
        assert past_of(first, since=other[3][AT] / 1000)[0] == other[4], "one that was hidden is told what it missed"
    with engine_in_a_thread(socket), start_server(engine=socket) as third:
        wait_until(lambda: len({row[past.STARTED] for row in past_of(third)}) == 2)
        assert past_of(third)[: len(other)] == other
        assert past_of(third)[-1][tokens] == 0
        assert os.listdir(tmp_path).count("engine.past") == 1


def test_points_of_one_time_are_one(tmp_path: Path) -> None:
    """The engine tells its figures more often than points are kept."""
    book = Past(str(tmp_path / "engine"))
    for at in np.arange(10.0, 20.0, 0.25):
        book.note(stats(float(at)))
    assert book.read()[:, AT].tolist() == [10_000, 12_000, 14_000, 16_000, 18_000]

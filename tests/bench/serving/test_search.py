"""The search for the most load under an objective finds it wherever it lies, and says what it takes for granted."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ridgeline.cli.bench import app
from ridgeline_bench.results import read
from ridgeline_bench.serving import search
from ridgeline_bench.serving.figures import Point, Slo, point
from ridgeline_bench.serving.outcome import Outcome
from ridgeline_bench.serving.run import Run
from ridgeline_bench.serving.search import EXACT, FARTHEST, Found, Search, next_rate, share
from tests.bench.serving.scripted_server import ScriptedServer

SEARCH = Search(Slo.parse("ttft=100"))


def outcome(index: int, ttft: float, error: str = "") -> Outcome:
    return Outcome(
        index=index,
        due=0,
        free=0,
        sent=0,
        end=1,
        asked_tokens=1,
        moments=[ttft],
        counts=[1],
        output_tokens=1,
        error=error,
    )


def made(rate: float, late: int, of: int = 200, failed: int = 0) -> Point:
    """A point at which some of the requests come too late, and some fail."""
    outcomes = [outcome(n, 0.2 if n < late else 0.05, "HTTP 429" if n >= of - failed else "") for n in range(of)]
    return point(rate, Run(outcomes, 0.0), SEARCH.slo)


def searched(capacity: float, first: float) -> list[Point]:
    """The points of a search on a server that meets the objective up to a rate."""
    return list(SEARCH.points(first, lambda rate: made(rate, 0 if rate <= capacity else 200)))


@given(st.floats(0.05, 2000.0), st.floats(0.5, 64.0))
def test_the_highest_rate_is_found_to_five_percent_wherever_the_search_begins(capacity: float, first: float) -> None:
    points = searched(capacity, first)
    found = Found.of(points, SEARCH)
    if first / FARTHEST < capacity < first * 2**9:
        assert found.best is not None
        assert capacity / (EXACT * 1.01) <= found.best.rate <= capacity < found.missing
    twice = len(points) - len({p.rate for p in points})
    assert twice == (found.best is not None and found.missing <= EXACT * found.best.rate), "the upper bound alone"


@given(st.floats(0.01, 1000.0), st.floats(1.06, 8.0))
def test_the_next_rate_lies_between_those_that_are_known(meeting: float, factor: float) -> None:
    assert meeting < next_rate(meeting, meeting * factor) < meeting * factor


def test_a_rate_meets_if_at_most_one_request_in_a_hundred_misses_and_failures_miss() -> None:
    assert share(made(1.0, late=3)) == pytest.approx(0.985)
    assert SEARCH.meets(made(1.0, late=2))
    assert not SEARCH.meets(made(1.0, late=3))
    assert not SEARCH.meets(made(1.0, late=0, failed=3))


def test_a_rate_that_meets_above_one_that_misses_is_not_the_answer() -> None:
    found = Found.of([made(1.0, 0), made(2.0, 200), made(4.0, 0)], SEARCH)
    assert found.best is not None
    assert (found.best.rate, found.missing) == (1.0, 2.0)
    sentence = found.sentence("ttft=100")
    assert "99 % of the requests meet ttft=100 at up to 1 requests/s" in sentence
    assert "2 requests/s miss it" in sentence
    assert "Rates above one that misses are taken to miss too." in sentence
    assert "ended before" in sentence


def test_a_search_ends_with_the_time_and_where_nothing_meets() -> None:
    left = iter([made(1.0, 0), None])
    points = list(SEARCH.points(1.0, lambda rate: next(left)))
    assert [p.rate for p in points] == [1.0]
    assert "no rate was seen to miss it" in Found.of(points, SEARCH).sentence("ttft=100")
    hopeless = searched(0.0, 1.0)
    assert hopeless[-1].rate <= 1.01 / FARTHEST
    assert Found.of(hopeless, SEARCH).best is None
    assert "no rate was found" in Found.of(hopeless, SEARCH).sentence("ttft=100")


def test_a_miss_by_chance_does_not_bound_the_answer() -> None:
    asked: list[float] = []

    def measure(rate: float) -> Point:
        asked.append(rate)
        by_chance = rate == 16 and asked.count(16) == 1
        return made(rate, 200 if rate > 40 or by_chance else 0)

    points = list(SEARCH.points(8.0, measure))
    found = Found.of(points, SEARCH)
    assert found.best is not None
    assert 40 / (EXACT * 1.01) <= found.best.rate <= 40 < found.missing
    assert asked.count(16) == asked.count(found.missing) == 2
    assert len(set(asked)) == len(asked) - 2


class Queue(ScriptedServer):
    """A server that works on one request at a time, 100 ms each: others wait."""

    free = 0.0

    def _script(self, body: dict[str, Any]) -> dict[str, Any]:
        now = time.monotonic()
        self.free = max(now, self.free) + 0.1
        return {"wait": self.free - now, "pieces": [(1, 0.0)]}


@pytest.mark.dealt
def test_the_command_finds_what_a_queue_can_bear_and_stores_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "EXACT", 1.5)  # fewer rates
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    # Of 10 requests at an even rate r the last waits 9 (0.1 - 1 / r) + 0.1 s, which is 0.6 s at 22.5/s
    out = tmp_path / "r.jsonl"
    with Queue() as server:
        done = CliRunner().invoke(app, [
            "serve", "--url", server.url, "--rate", "16", "--num-requests", "10", "--burstiness", "inf",
            "--input-len", "4", "--output-len", "1", "--warmup", "0", "--search-slo", "ttft=600", "--out", str(out),
        ])  # fmt: skip
    assert done.exit_code == 0, done.output
    records = read([out])
    name = "serve completions 4>1 most within ttft=600"
    (most,) = (r for r in records if r.workload == name and r.metric == "requests")
    assert 4 <= most.value <= 23
    assert most.value < most.options["missing"] < math.inf
    assert len({r.workload for r in records if r.metric == "ttft p99"}) >= 2
    assert f"at up to {most.value:g} requests/s" in done.stderr


def test_a_search_in_which_no_rate_meets_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "FARTHEST", 2)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Queue() as server:
        done = CliRunner().invoke(app, [
            "serve", "--url", server.url, "--rate", "50", "--num-requests", "3", "--input-len", "4",
            "--output-len", "1", "--warmup", "0", "--search-slo", "ttft=1",
        ])  # fmt: skip
    assert done.exit_code == 1
    assert "no rate was found at which 99 % of the requests meet ttft=1; 25 requests/s miss it." in done.stderr

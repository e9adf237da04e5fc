"""The README's chart shows what benchmarks/results holds, and it was drawn from that."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest

from ridgeline_bench.scripts import readme_chart

RECORDS = [json.loads(line) for line in readme_chart.RESULTS.read_text().splitlines()]
TPOT = ("W2", "tpot")


def record(engine: str, value: float, date: str, *, dirty: bool = False, commit: str = "") -> dict[str, Any]:
    machine = {"gpu": "G", "driver": "1", "torch": "2", "triton": "3", "commit": commit or date, "dirty": dirty}
    workload, metric = TPOT
    fields = {"workload": workload, "metric": metric, "value": value, "limit": 2.0, "better": "lower"}
    return {"engine": engine, "version": "9", "model": "m", "machine": machine, "date": date, **fields}


@pytest.mark.parametrize("theme", list(readme_chart.THEMES))
def test_the_checked_in_picture_is_that_of_the_results(theme: str) -> None:
    picture = (readme_chart.IMAGES / f"vllm-{theme}.svg").read_text()
    described = re.search(r"<dc:description>(.*?)</dc:description>", picture, re.DOTALL)
    assert described, "a picture without a description"
    wanted = readme_chart.description(readme_chart.runs(RECORDS))
    assert html.unescape(described[1]) == wanted, "run: python -m ridgeline_bench.scripts.readme_chart"


def test_every_workload_of_both_engines_is_in_the_picture() -> None:
    for run in readme_chart.runs(RECORDS):
        limited = {(r["workload"], r["metric"]) for r in RECORDS if r["limit"] and r["model"] == run.model}
        assert limited == readme_chart.WORKLOADS.keys()
        assert list(run.times) == list(readme_chart.WORKLOADS.values())


def test_the_newest_clean_comparison_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme_chart, "MODELS", {"m": "M"})
    records = [
        *(record(engine, value, "2026-01-01") for engine, value in (("ridgeline", 4.0), ("vllm", 8.0))),
        *(record(engine, value, "2026-01-02") for engine, value in (("vllm", 10.0), ("ridgeline", 2.5))),
        *(record(engine, 1.0, "2026-01-03", dirty=True) for engine in ("ridgeline", "vllm")),
        record("ridgeline", 1.0, "2026-01-04"),  # alone, so it is no comparison
    ]
    (run,) = readme_chart.runs(records)
    assert run.commit == "2026-01-02"
    name = readme_chart.WORKLOADS[TPOT]
    assert (run.ours[name], run.theirs[name], run.times[name]) == pytest.approx((0.8, 0.2, 4.0))


def test_the_readme_says_what_the_picture_shows() -> None:
    readme = " ".join((readme_chart.ROOT / "README.md").read_text().split())
    chosen = readme_chart.runs(RECORDS)
    times = [run.times for run in chosen]
    every = [factor for each in times for factor in each.values()]
    assert f"ahead in {sum(factor > 1 for factor in every)} of {len(every)} figures" in readme

    def span(*beginnings: str) -> str:
        found = [f for each in times for name, f in each.items() if name.startswith(beginnings)]
        return f"{min(found):.2f} to {max(found):.2f} times"

    assert f"a decode step is {span('decode')} as fast as vLLM's" in readme
    assert f"mixed requests have {span('256 mixed')} the throughput" in readme
    assert f"shared prefix {span('512')}" in readme
    long = span("prefill, 1 × 8", "prefill, 1 × 3", "prefill, 8 × 8")  # noqa: RUF001
    assert f"Long prefills are close: {long} as fast" in readme

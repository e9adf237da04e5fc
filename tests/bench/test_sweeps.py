"""Sweeps over cuts of GPU kernels: what a run loses by a cut that dies, and a walk of every sweep's jobs on a CPU."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sweep_coded import CodedSweep
from benchmarks.sweep_experts import Experts
from benchmarks.sweep_fp8 import Fp8
from benchmarks.sweep_grouped import Grouped
from benchmarks.sweep_grouped_quantized import GroupedQuantized
from benchmarks.sweep_kv import KV
from benchmarks.sweep_latent import Latents
from benchmarks.sweep_linear import Linear
from benchmarks.sweep_scans import Scans
from benchmarks.sweeping import Job, Sweep, short
from benchmarks.sweeping_runs import run, show, work
from ridgeline.kernels.launch import INTERPRETED
from tests.bench.toy_sweep import Toy

TOY = Path(__file__).parent / "toy_sweep.py"


@pytest.mark.parametrize(
    ("kind", "flags"),
    [(Fp8, ""), (Grouped, ""), (GroupedQuantized, ""), (CodedSweep, ""), (CodedSweep, "--cuts W4 Q4_K"),
     (Experts, ""), (KV, "--cuts"),
     *(pytest.param(kind, "", marks=pytest.mark.thorough) for kind in (Linear, Scans, Latents))],
    ids=lambda x: getattr(x, "__name__", x),
)  # fmt: skip
def test_a_dry_run_walks_every_job(
    kind: type[Sweep], flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], interpreted: None
) -> None:
    run(kind, ["--dry", "--json", str(tmp_path / "lines"), *flags.split()])
    shown = capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert len(lines) > 30
    assert all(line["value"] > line["limit"] > 0 and line["dry"] for line in lines)
    assert {line["workload"] for line in lines} == {kind.workload}
    assert "FAILED" not in shown
    assert all(f"{line['model']:14s} {line['metric']:11s}" in shown for line in lines)


@pytest.fixture
def interpreted() -> None:
    if not INTERPRETED:
        pytest.skip("rounds on a CPU, in Triton's interpreter")


def toy() -> tuple[Any, list[Job]]:
    sweep = Toy(argparse.Namespace(dry=False), "cuda")
    return sweep, sweep.jobs()


def test_a_cut_that_dies_or_hangs_loses_nothing_but_itself_and_its_like() -> None:
    sweep, jobs = toy()
    answers = dict(work(sweep, jobs, [sys.executable, str(TOY)], time.monotonic() + 300))
    said = {f"{job.case} {job.tokens} {short(job.cut)}": answer.get("failed", "") for job, answer in answers.items()}
    assert said == {
        "first 0 cut0/1": "",
        "first 1 cut1/1": "error 2.0",  # so that it is not launched with 2 tokens, where it would be deadly
        "first 3 cut0/1": "",
        "first 4 cut2/1": "the child died",  # so that no cut2 of any stages runs again, in any case
        "last 9 cut0/1": "",
        "last 9 cut1/1": "",  # which was wrong in another case
        "first 5 cut3/1": "no answer in 4 s",
        "first 6 cut4/1": "ValueError: of shapes",
    }


def test_nothing_is_begun_after_the_deadline() -> None:
    sweep, jobs = toy()
    assert list(work(sweep, jobs, ["false"], time.monotonic() - 1)) == []


def test_the_table_shows_the_fastest_cut_first_and_marks_the_chosen_one(capsys: pytest.CaptureFixture[str]) -> None:
    _, jobs = toy()
    slow, fast = (Job("case", "op", 8, cut=job.cut, chosen=i == 0) for i, job in enumerate((jobs[0], jobs[2])))
    facts = {"error": 0.001, "limit_us": 5.0, "flops": 1e9, "note": ""}
    show({slow: {"us": 20.0, **facts}, fast: {"us": 10.0, **facts}, jobs[3]: {"failed": "wrong"}})
    table = capsys.readouterr().out
    assert "2 of 3 right" in table
    assert "10.00 µs of     5.00 (50.0 %)    100 TFLOP/s" in table
    assert table.index(short(fast.cut)) < table.index(short(slow.cut) + "* 20.00")

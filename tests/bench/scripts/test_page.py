"""The page of experiments: its commands are taken by their scripts, and what it predicts is what the planner says."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer.main

from ridgeline.cli.bench import app
from ridgeline.perf.hardware import find
from ridgeline.perf.planner import Deployment, Plan
from ridgeline.weights.loader import read_model_config
from ridgeline_bench.scripts import asked
from ridgeline_bench.scripts.jobs import Job, read_jobs

QUEUE = Path(__file__).parents[3] / "benchmarks" / "experiments.txt"
PAGE = (Path(__file__).parents[3] / "docs" / "experiments.md").read_text()


class Asked(Exception):
    """The arguments were taken."""


@pytest.mark.parametrize("job", read_jobs(QUEUE), ids=lambda job: job.name)
def test_a_script_takes_the_arguments_of_its_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in job.command.split("&&"):
        python, flag, module, *arguments = shlex.split(command.replace("$OUT", "/tmp"))
        assert (python, flag) == ("python", "-m")
        if module == "ridgeline":
            assert arguments[:2] == ["bench", "serve"]
            typer.main.get_command(app).commands["serve"].make_context("serve", arguments[2:])  # type: ignore[attr-defined]
            continue
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        found = import_module(module)

        def taken(*places: object, **options: object) -> None:
            asked.asked(*places, **options)  # type: ignore[arg-type]  # it exits for what it does not know
            raise Asked

        monkeypatch.setattr(found, "asked", taken)
        with pytest.raises(Asked):
            found.main()


def test_the_page_explains_every_script_of_the_queue() -> None:
    scripts = {name for job in read_jobs(QUEUE) for name in re.findall(r"ridgeline_bench\.scripts\.\w+", job.command)}
    assert {name for name in scripts if name not in PAGE} == set()


@pytest.mark.parametrize(
    ("row", "tp", "dtype"), [("two H200s, bfloat16", 2, "bfloat16"), ("one H200, four bits", 1, "int4")]
)
def test_the_prediction_for_70b_is_the_planner_s(row: str, tp: int, dtype: str) -> None:
    spec = read_model_config(QUEUE.parent / "models" / "llama-70b").spec
    hardware = find("H200").attained()
    plan = Plan(Deployment(model=spec, hardware=hardware, input=1024, output=256, tp=tp, dtype=dtype))
    assert plan.best is not None
    alone, best = plan.point(1), plan.best
    cells = [
        row, f"{1e3 * alone.ttft:.0f} ms", f"{1e3 * alone.step:.1f} ms",
        f"{best.tokens_per_second:,.0f} ({best.batch} requests)", f"{best.tokens_per_second / tp:.0f}",
    ]  # fmt: skip
    assert f"| {' | '.join(cells)} |" in PAGE

"""The stored baseline of kernels' code and of the host's calls, and that what moves is noticed in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.step import StepPlan
from ridgeline.engine.scheduler import Scheduler
from ridgeline_bench.scripts import baseline
from ridgeline_bench.scripts.baseline import compared, gone, host_now, read, sampled, sentence

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]
STORE = ROOT / baseline.STORE


def test_a_sample_is_as_stored() -> None:
    """The gate itself: in a process of its own, since in this one kernels may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "ridgeline_bench.scripts.baseline"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "lines are as stored" in done.stdout


def test_the_baseline_has_every_architecture_and_says_what_it_was_stored_with() -> None:
    versions, lines = read(STORE)
    assert {"triton", "python", "numpy", "torch"} == set(versions)
    about = json.loads(STORE.read_text().splitlines()[0])
    assert about["date"]
    assert about["machine"]["commit"]
    kernels = [line for line in lines if line["kind"] == "kernel"]
    assert {line["name"].rpartition(" ")[2] for line in kernels} == {"sm_80", "sm_90", "sm_100", "sm_120", "gfx942"}
    assert len({line["name"] for line in lines}) == len(lines)
    assert len(sampled(lines, 6)) == 6
    assert sampled(lines, 10**6) == {line["name"] for line in kernels}


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: str) -> str | int | None:
    """What the command ends with, without compiling."""
    monkeypatch.setattr(sys, "argv", ["baseline", "--path", str(path), "--sample", "0", *arguments])
    try:
        baseline.main()
    except SystemExit as left:
        return left.code
    return 0


def stored(path: Path, versions: dict[str, str], *lines: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in ({"versions": versions}, *lines)))
    return path


def test_one_more_call_for_each_row_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = [dict(line) for line in host_now()]
    path = stored(tmp_path / "baseline.jsonl", baseline.versions(), *before)
    assert run(monkeypatch, path) == 0
    schedule = Scheduler.schedule

    def slower(self: Scheduler) -> StepPlan | None:
        for _ in range(64):
            abs(-1)
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", slower)
    said = str(run(monkeypatch, path))
    assert said.startswith("baseline: calls of a step are ")
    assert f" instead of {before[0]['value']:.1f}, and may move by " in said
    assert said.endswith("store it anew: python -m ridgeline_bench.scripts.baseline --whole --store")
    monkeypatch.undo()
    kept: list[object] = []

    def leaking(self: Scheduler) -> StepPlan | None:
        kept.extend(object() for _ in range(40))
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", leaking)
    assert "blocks of a step are " in str(run(monkeypatch, path))


def test_kernels_that_moved_are_named() -> None:
    def line(name: str, code: str = "a", registers: int = 40) -> dict[str, Any]:
        return {"kind": "kernel", "name": name, "code": code, "registers": registers, "spilled": 0, "shared": 0}

    before = [line(name) for name in ("one sm_90", "two sm_90", "three gfx942")]
    now = [line("one sm_90", "b"), line("two sm_90", "b", 44), line("four sm_90")]
    moved = compared(before, now) + gone([each["name"] for each in before], now)
    assert moved == [
        "the code of one sm_90 changed",
        "the code of two sm_90 changed (registers 40 to 44)",
        "four sm_90 is new",
        "three gfx942 is gone",
    ]
    assert "(registers 40 to 44); four sm_90 is new and 1 more. If that is meant" in sentence(moved)
    assert compared(before, before) == []


def test_other_versions_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = dict.fromkeys(baseline.versions(), "0")
    assert run(monkeypatch, stored(tmp_path / "other", others)) == 0
    said = capsys.readouterr().out
    assert "not compared: kernel (triton 0 then" in said
    assert "not compared: host (python 0 then" in said


def test_mistakes_are_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "is no baseline" in str(run(monkeypatch, tmp_path / "none"))
    assert "a sample cannot be stored" in str(run(monkeypatch, tmp_path / "none", "--store"))
    (tmp_path / "damaged").write_text("{}\n")
    with pytest.raises(InvalidConfig, match="store one with"):
        read(tmp_path / "damaged")

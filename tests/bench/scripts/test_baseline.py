"""The stored baseline of the host's calls, and that what moves is noticed in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.step import StepPlan
from ridgeline.engine.scheduler import Scheduler
from ridgeline_bench.scripts import baseline
from ridgeline_bench.scripts.baseline import host_now, read

ROOT = Path(__file__).parents[3]
STORE = ROOT / baseline.STORE


def test_a_step_is_as_stored() -> None:
    """The gate itself: in a process of its own, since in this one other modules are imported."""
    command = [sys.executable, "-W", "ignore", "-m", "ridgeline_bench.scripts.baseline"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "lines are as stored" in done.stdout or "not compared" in done.stdout


def test_the_baseline_says_what_it_was_stored_with() -> None:
    versions, lines = read(STORE)
    assert {"python", "numpy", "torch"} == set(versions)
    about = json.loads(STORE.read_text().splitlines()[0])
    assert about["date"]
    assert about["machine"]["commit"]
    assert [line["name"] for line in lines] == ["calls of a step", "blocks of a step"]


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: str) -> str | int | None:
    """What the command ends with."""
    monkeypatch.setattr(sys, "argv", ["baseline", "--path", str(path), *arguments])
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
    assert said.endswith("store it anew: python -m ridgeline_bench.scripts.baseline --store")
    monkeypatch.undo()
    kept: list[object] = []

    def leaking(self: Scheduler) -> StepPlan | None:
        kept.extend(object() for _ in range(40))
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", leaking)
    assert "blocks of a step are " in str(run(monkeypatch, path))


def test_other_versions_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = dict.fromkeys(baseline.versions(), "0")
    assert run(monkeypatch, stored(tmp_path / "other", others)) == 0
    said = capsys.readouterr().out
    assert "not compared: numpy 0 then" in said
    assert "python 0 then" in said


def test_mistakes_are_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "is no baseline" in str(run(monkeypatch, tmp_path / "none"))
    (tmp_path / "damaged").write_text("{}\n")
    with pytest.raises(InvalidConfig, match="store one with"):
        read(tmp_path / "damaged")

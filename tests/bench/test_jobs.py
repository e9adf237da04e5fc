"""A queue of jobs: each with GPUs of its own, ended after its time, not run again once it ended well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline_bench.scripts.jobs import Queue, read_jobs


def status(out: Path) -> dict[str, int]:
    return {line["name"]: line["status"] for line in map(json.loads, (out / "jobs.jsonl").read_text().splitlines())}


def test_jobs_run_beside_each_other_and_go_on_where_a_run_ended(tmp_path: Path) -> None:
    file = tmp_path / "jobs"
    file.write_text(
        "# a comment\n\n"
        "one 1 60 echo $CUDA_VISIBLE_DEVICES; while [ ! -e $OUT/two ]; do sleep 0.01; done\n"
        "two 1 60 echo $CUDA_VISIBLE_DEVICES; touch $OUT/two\n"
        "both 2 60 echo $CUDA_VISIBLE_DEVICES; test -e $OUT/again\n"
        "late 1 0.2 sleep 60 & sleep 60\n"
    )
    assert Queue(read_jobs(file), tmp_path, gpus=2, seconds=120).run() == 1
    assert {name: code == 0 for name, code in status(tmp_path).items()} == {
        "one": True, "two": True, "both": False, "late": False,
    }  # fmt: skip
    assert [(tmp_path / f"{name}.log").read_text() for name in ("one", "two", "both")] == ["0\n", "1\n", "0,1\n"]
    (tmp_path / "again").touch()
    file.write_text(file.read_text().replace("late 1 0.2 sleep 60 & sleep 60", "late 1 60 true"))
    assert Queue(read_jobs(file), tmp_path, gpus=2, seconds=120).run() == 0
    assert len((tmp_path / "jobs.jsonl").read_text().splitlines()) == 6, "one and two ran once"


def test_what_is_left_when_time_is_over_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "jobs"
    file.write_text("long 1 60 sleep 60\nnext 1 60 true\n")
    assert Queue(read_jobs(file), tmp_path, gpus=1, seconds=0.3).run() == 1
    assert "next: not started" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["one", "one 1 x true", "one 1 2"])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "jobs"
    file.write_text(f"{line}\n")
    with pytest.raises(SystemExit, match=r"jobs:1: a line is `name gpus seconds command`"):
        read_jobs(file)

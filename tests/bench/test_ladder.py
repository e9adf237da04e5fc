"""`ridgeline bench kernels --ladder`: without a GPU it has the least times, and a rung that is wrong gets no speed."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.kernels.gemm.ladder.rungs import RUNGS
from ridgeline_bench.ladder import RungTime
from ridgeline_bench.tables import rungs


def test_without_a_gpu_the_least_times_are_shown_and_nothing_is_stored(tmp_path: Path) -> None:
    out = tmp_path / "kernels.jsonl"
    command = ["bench", "kernels", "--ladder", "gemm", "--device", "cpu", "--out", str(out)]
    ran = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    assert all(rung.name in ran.output for rung in RUNGS)
    assert not out.exists() or out.read_text() == ""


def test_an_unknown_ladder_is_refused_by_name() -> None:
    ran = CliRunner().invoke(app, ["bench", "kernels", "--ladder", "stairs", "--device", "cpu"])
    assert ran.exit_code != 0
    assert "stairs" in ran.output + str(ran.exception)


def test_a_rung_that_is_wrong_has_no_speed() -> None:
    times = [RungTime("cuBLAS", 4096, 0, "", 200e-6), RungTime("some", 4096, 150e-6, "L2", 0.0, "3 of 9 are wrong")]
    table = rungs([*times, RungTime("other", 4096, 150e-6, "L2", 250e-6)])
    _, wrong, other = zip(*(list(column.cells) for column in table.columns), strict=True)
    assert "3 of 9" in wrong[2]
    assert wrong[3:5] == ("", "")
    assert other[3:5] == ("549.8", "80 %")

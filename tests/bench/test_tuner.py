"""The tuner, the check and the times of kernels: what is measured, kept and said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ridgeline.cli import kernels
from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.launch import INTERPRETED
from ridgeline.kernels.base.tuned import GpuKind
from ridgeline.kernels.gemm.plain.cases import LinearCase
from ridgeline.kernels.gemm.plain.choose import RowsPlan
from ridgeline.kernels.ops import OPS
from ridgeline.perf.search import SearchSettings, TrialOutcome
from ridgeline_bench.scripts import held_out_cuts
from ridgeline_bench.sweep import pairs as pairs_module
from ridgeline_bench.sweep import tools, tuning
from ridgeline_bench.sweep import tune as tuner
from ridgeline_bench.sweep.check import CheckOptions, answered, cases_to_check
from ridgeline_bench.sweep.children import answers
from ridgeline_bench.sweep.of_op import OpSweep
from ridgeline_bench.sweep.options import SweepOptions
from ridgeline_bench.sweep.pairs import Pair, dealt, found, tuned_pairs
from ridgeline_bench.sweep.tune import Tuned, TuneOptions, leading, line
from ridgeline_bench.sweep.tuning import Kept

H200 = GpuKind((9, 0), 132)
PAIR = Pair("linear", LinearCase(1, 256, 64))


class Graph:
    """What stands for a captured graph on a CPU: a launch, and the seconds that it takes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def replay(self) -> None:
        """Take no time."""


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cuts run in Triton's interpreter, with times by their warps."""
    if not INTERPRETED:
        pytest.skip("rounds on a CPU, in Triton's interpreter")

    def captured(self: Any, job: Any, calls: Any, least: float) -> tuple[Graph, int]:
        self.launch(job, calls[0])
        seconds = 9e-6 if job.cut is None else 1e-6 * (job.cut.warps + job.cut.programs + 1)
        return Graph(2 * seconds), 2

    monkeypatch.setattr(OpSweep, "captured", captured)
    monkeypatch.setattr(pairs_module, "device_seconds", lambda replay, times=1: replay.__self__.seconds)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(pairs_module, "DEVICE", "cpu")


def rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = OPS["linear"].cuts()
    assert cuts is not None
    assert cuts.tuning is not None
    few = cuts._replace(tuning=cuts.tuning._replace(kinds=(RowsPlan,)))
    monkeypatch.setattr(Pair, "cuts", few)


def test_a_pair_is_searched_checked_and_described(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_only(monkeypatch)
    answer = Tuned(PAIR, **tuner.answered(TuneOptions(settings=SearchSettings(repeats=3)), PAIR))
    assert answer.best is not None
    assert answer.cut is not None
    assert answer.cut["kind"] == "RowsPlan"
    assert answer.best["us"] == pytest.approx(answer.cut["warps"] + answer.cut["programs"] + 1)
    assert answer.before_us == pytest.approx(9.0)
    assert len(answer.trials) == 8
    kept = answer.kept()
    assert (kept["op"], kept["form"], kept["sizes"]) == ("linear", "", [1, 256, 64])
    record = line(answer, {"date": "today"})
    assert json.loads(json.dumps(record))["trials"][0]["outcome"] == "won"


def test_a_wrong_cut_is_no_candidate(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_only(monkeypatch)

    def check(self: Any, job: Any, given: Any) -> float:
        assert job.cut is None or job.cut.warps > 1, "error 2.0"
        return 0.5

    monkeypatch.setattr(OpSweep, "check", check)
    record, limit = found(PAIR, SearchSettings(measured=20, repeats=2))
    wrong = [trial for trial in record.trials if trial.candidate.cut is not None and trial.candidate.cut.warps == 1]
    assert wrong
    tried = [trial for trial in wrong if trial.outcome is not TrialOutcome.UNTRIED]
    assert tried
    assert all(trial.outcome is TrialOutcome.UNFIT and "error 2.0" in trial.reason for trial in tried)
    assert limit > 0
    assert record.best is not None
    assert record.best.candidate.cut.warps == 2


def test_pairs_are_many_and_their_classes_are_their_own() -> None:
    pairs = tuned_pairs()
    assert len(pairs) >= 100
    classes = [(pair.op, pair.tuning.shape(pair.case)) for pair in pairs]
    assert len(set(classes)) == len(classes)
    assert len({pair.op for pair in list(dealt(pairs))[:7]}) == 7


@pytest.mark.parametrize("name", sorted({pair.op for pair in tuned_pairs()}))
def test_drawn_shapes_have_cuts_that_the_model_ranks(name: str) -> None:
    random = Random(1)
    cuts = OPS[name].cuts()
    assert cuts is not None
    assert cuts.tuning is not None
    for _ in range(5):
        pair = Pair(name, cuts.tuning.drawn(random))
        first = leading(pair, TuneOptions())
        assert first[0].cut is None
        assert all(isinstance(job.cut, cuts.tuning.kinds) for job in first[1:])
        assert len(first) >= 2


def double(task: int) -> dict[str, Any]:
    if task == 2:
        raise RuntimeError("the device is lost")
    return {"twice": 2 * task}


@pytest.mark.thorough
def test_a_task_that_breaks_its_child_loses_nothing_but_itself() -> None:
    assert list(answers([1, 2, 3], double)) == [
        (1, {"twice": 2}),
        (2, {"failed": "RuntimeError: the device is lost"}),
        (3, {"twice": 6}),
    ]


def test_a_check_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    one = next(one for one in cases_to_check(CheckOptions(ops="rms_norm"), "cpu") if "torch" in one.ways)
    assert all(failed == "" for _, _, failed in answered(one)["ways"])
    module = __import__("ridgeline.kernels.small.norm.torch_ops", fromlist=["rms_norm"])
    right = module.rms_norm
    monkeypatch.setattr(module, "rms_norm", lambda *given: tuple(1.01 * x for x in right(*given)))
    failures = {way: failed for way, _, failed in answered(one)["ways"]}
    assert failures["torch"].startswith("error ")


def test_a_sweep_can_take_the_best_cuts_by_the_model_alone() -> None:
    sweep = OpSweep(SweepOptions(name="linear", best=3), "meta")
    case = LinearCase(8, 2048, 2048)
    cuts = OPS["linear"].cuts()
    assert cuts is not None
    assert cuts.cost is not None
    taken = [way for way in sweep.ways(case, timed=True) if isinstance(way, cuts.tuning.kinds)]  # type: ignore[union-attr]
    costs = sorted(cuts.cost(case, cut) for cut in cuts.candidates(case))
    assert [cuts.cost(case, cut) for cut in taken] == costs[:3]


def work(*given: Any) -> Any:
    raise AssertionError("this is minutes of work")


def test_a_file_that_cannot_be_written_is_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "check", work)
    with pytest.raises(FileNotFoundError):
        tools.run_check(CheckOptions(ops="rms_norm"), "cpu", tmp_path / "none" / "x.jsonl", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuning, "gpu_here", lambda: H200)
    monkeypatch.setattr(tuning, "tune", work)
    monkeypatch.setattr(tools, "bench", work)
    with pytest.raises(FileNotFoundError):
        tools.run_bench("linear", "", 0.0, tmp_path / "none" / "x.jsonl", "")
    own = tmp_path / "own.jsonl"
    with pytest.raises(FileNotFoundError):
        tuning.run(("linear",), "", TuneOptions(), Kept(own, tmp_path / "none" / "x.jsonl"))
    own.write_text("{}")
    with pytest.raises(InvalidConfig, match=r"own\.jsonl is no file of tuned cuts"):
        tuning.run(("linear",), "", TuneOptions(), Kept(own))


def test_no_shapes_are_compiled_where_nothing_can_be_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(held_out_cuts, "tune", work)
    assert held_out_cuts.main([]) == 2
    assert capsys.readouterr().err == "there is no GPU here to time cuts on.\n"


@pytest.mark.parametrize("verb", [("check", "rms_norm"), ("bench", "linear"), ("tune", "--compile-only")])
def test_without_triton_each_verb_says_so(verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    found = CliRunner().invoke(kernels.app, verb)
    assert isinstance(found.exception, InvalidConfig)
    assert "kernels need Triton, which is not installed here" in str(found.exception)


@pytest.mark.parametrize("module", ["named_kernels", "scripts.sanitized --kernels"])
def test_an_unknown_kernel_gives_one_sentence(module: str) -> None:
    command = [sys.executable, "-m", *f"ridgeline_bench.{module}".split(), "nosuch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("'nosuch' is no kernel; write LADDER:RUNG")
    assert done.stderr.count("\n") == 1


def test_held_out_shapes_are_drawn_by_a_seed_and_none_was_measured() -> None:
    pairs = held_out_cuts.drawn(21, 5)
    assert pairs == held_out_cuts.drawn(21, 5) != held_out_cuts.drawn(21, 6)
    assert not set(pairs) & set(tuned_pairs())
    assert len(set(pairs)) == 21
    assert {pair.op for pair in pairs} == {pair.op for pair in tuned_pairs()}


def test_a_shape_is_as_far_behind_as_what_runs_by_itself() -> None:
    trials = ({"candidate": {}, "outcome": "won", "us": 10.0}, {"candidate": None, "outcome": "slower", "us": 10.4})
    assert held_out_cuts.behind(Tuned(PAIR, trials=trials)) == pytest.approx(1.04)
    assert held_out_cuts.behind(Tuned(PAIR, failed="the child died")) == float("inf")
    assert held_out_cuts.summary([1.0, 1.04, 1.2]) == "2 of 3 shapes within 5 % of tuned, the worst 20.0 % behind"

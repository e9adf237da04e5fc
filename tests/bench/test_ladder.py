"""`ridgeline bench kernels --ladder`: without a GPU it has the least times, and a rung that is wrong gets no speed."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.cuda.carried import code_of
from ridgeline.kernels.gemm.ladder.endings import ENDINGS, EndingOperands, is_near
from ridgeline.kernels.gemm.ladder.rungs import RUNGS, Extras
from ridgeline.kernels.memory_bound.launches import MatrixShape
from ridgeline.kernels.memory_bound.run import codes
from ridgeline.kernels.memory_bound.rungs import BY_ROWS, KERNELS
from ridgeline_bench.ladders import bytes_page, page, runs
from ridgeline_bench.ladders.attention import QueriesKeysValues, WholeShape
from ridgeline_bench.ladders.gemm import EndingCall
from ridgeline_bench.ladders.memory_bound import MemoryOp, MemoryOperands, OpCall, libraries
from ridgeline_bench.ladders.reasons import REASONS
from ridgeline_bench.ladders.runs import LADDERS, RungTime
from ridgeline_bench.machine.probes import Bench
from ridgeline_bench.machine.timing import QUICK
from ridgeline_bench.tables import rungs


@pytest.mark.parametrize("name", LADDERS)
def test_without_a_gpu_the_least_times_are_shown_and_nothing_is_stored(name: str, tmp_path: Path) -> None:
    out = tmp_path / "kernels.jsonl"
    command = ["bench", "kernels", "--ladder", name, "--device", "cpu", "--out", str(out)]
    ran = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert ran.exit_code == 0, ran.output
    assert all(rung.name in ran.output for rung in import_module(f"{LADDERS[name].package}.rungs").RUNGS)
    assert not out.exists() or out.read_text() == ""


def test_an_unknown_ladder_is_refused_by_name() -> None:
    ran = CliRunner().invoke(app, ["bench", "kernels", "--ladder", "stairs", "--device", "cpu"])
    assert ran.exit_code != 0
    assert "stairs" in ran.output + str(ran.exception)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--ladder", "gemm", "--op", "none such"), "no rung's name contains 'none such'; the gemm ladder has naive"),
        (("--ladder", "gemm", "--cubins", "/none/such"), "--cubins must be a folder, got '/none/such'"),
        (("--cubins", "/none/such"), "give --ladder too"),
    ],
)
def test_flags_that_would_mean_nothing_are_refused(flags: tuple[str, ...], words: str) -> None:
    ran = CliRunner().invoke(app, ["bench", "kernels", *flags, "--device", "cpu"])
    assert ran.exit_code != 0
    assert words in ran.output + str(ran.exception)


def test_shares_are_of_the_library_in_the_same_run(tmp_path: Path) -> None:
    file = tmp_path / "times.jsonl"
    lines = [(rung, value, limit, date) for date, value in (("2026-11-01", 100.0), ("2026-11-02", 200.0))
             for rung, limit in (("cuBLAS", 0.0), ("naive" if date == "2026-11-01" else "wmma", 1.0))]  # fmt: skip
    with file.open("w") as out:
        for rung, value, limit, date in lines:
            record = {"workload": "ladder:gemm", "metric": f"4096³ [{rung}]", "value": value, "unit": "µs"}
            about = {"engine": "", "version": "", "date": f"{date}T00:00:00+00:00", "options": {"flops": 1e9}}
            out.write(json.dumps({**record, "limit": limit, **about}) + "\n")
    text = page.table(page.newest("gemm", file), page.fastest("gemm", file))
    assert "| `naive` | 10.0, 100 % |" in text
    assert "| `wmma` | 5.0, 100 % |" in text


def test_the_page_says_why_each_rung_differs_from_its_least_time() -> None:
    text = (Path(__file__).parents[2] / "docs" / "kernels" / "gemm-ladder.md").read_text()
    times = page.newest("gemm")
    assert list(REASONS) == [rung.name for rung in RUNGS]
    assert page.differences(times) in text
    assert page.table(times, page.fastest("gemm")) in text
    assert page.formats(times, page.fastest("gemm")) in text


def test_the_page_of_memory_bound_kernels_has_the_stored_times() -> None:
    text = (Path(__file__).parents[2] / "docs" / "kernels" / "memory-bound.md").read_text()
    times = page.newest(bytes_page.LADDER)
    assert [op for op in KERNELS if bytes_page.by_size(times, op) not in text] == []
    assert [op for op in BY_ROWS if bytes_page.by_length(times, op) not in text] == []
    assert bytes_page.loss(times) in text


def test_a_rung_that_is_wrong_has_no_speed_and_shares_are_of_the_best_library() -> None:
    def time(name: str, seconds: float, *, error: str = "", peer: bool = False) -> RungTime:
        return RungTime("gemm", name, "4096³", 2 * 4096**3, 0 if peer else 150e-6, "L2", seconds, error, peer)

    peers = [time("cuBLAS", 200e-6, peer=True), time("slow", 900e-6, peer=True)]
    table = rungs([*peers, time("some", 0.0, error="3 of 9 are wrong"), time("other", 250e-6)])
    *_, wrong, other = zip(*(list(column.cells) for column in table.columns), strict=True)
    assert "3 of 9" in wrong[2]
    assert wrong[3:5] == ("", "")
    assert other[3:5] == ("549.8", "80 %")


def test_the_check_of_attention_takes_right_results_alone() -> None:
    operands = QueriesKeysValues(WholeShape(batch=2, heads=4, groups=2, length=70, size=16), "cpu")
    q, k, v = operands.sets[0]

    def exact() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def changed(change: Callable[[torch.Tensor], object]) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            out = exact().clone()
            change(out)
            return out

        return call

    assert operands.fault(exact) == ""
    assert "wrong by" in operands.fault(changed(lambda out: out[1, 3, 60].neg_()))
    assert "not finite" in operands.fault(changed(lambda out: out[0, 2, 5].fill_(torch.nan)))


def test_the_check_of_endings_takes_right_results_alone() -> None:
    ending = next(each for each in ENDINGS if each.name == "bias-gelu-row-max")
    operands = EndingOperands(ending.dtype, 20, 16, 64)
    exact, _ = operands.exact(ending)

    def fault(off: float) -> str:
        def product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, extras: Extras) -> None:
            c.copy_(exact * (1 + off))
            operands.vectors["row_largest"].copy_(exact.abs().amax(1, keepdim=True))

        return EndingCall(product, operands, ending, torch.empty(20, 16, dtype=torch.bfloat16)).fault()

    assert fault(0.0) == ""
    assert fault(0.0) == "", "what was largest before does not matter"
    assert "not as near" in fault(0.02)


def test_a_result_in_fp8_is_as_large_as_the_format_allows() -> None:
    exact = torch.tensor([1.0, 1000.0, -1000.0], dtype=torch.float64)
    found = torch.tensor([1.0, 448.0, -448.0]).to(torch.float8_e4m3fn)
    assert is_near(found, exact, torch.zeros(3))
    assert not is_near(found, -exact, torch.zeros(3))


class Sums:
    """A problem of the CPU: sums of few and of many numbers. Its library and a rung are as fast as each other."""

    name, flops = "sums", 1.0

    def __init__(self) -> None:
        self.few, self.many = torch.rand(1000), torch.rand(3_000_000)

    def least(self) -> Iterator[tuple[str, float, str]]:
        yield from (
            ("slow", 1e-5, "memory"),
            ("elsewhere", 1e-6, "memory"),
            ("long", 2.0, "memory"),
            ("wrong", 1e-6, "L2"),
            ("alike", 1e-6, "L2"),
        )

    def operands(self, cubins: Path | None) -> Sums:
        return self

    @property
    def peers(self) -> dict[str, list[Callable[[], object]]]:
        return {"library": [self.few.sum] * 2}

    def rung(self, name: str) -> list[Callable[[], object]] | None:
        return None if name == "elsewhere" else [self.many.sum if name == "slow" else self.few.sum]

    def fault(self, call: Callable[[], object], rung: str = "") -> str:
        return "it is wrong" if rung == "wrong" else ""


def test_a_folder_without_a_rungs_machine_code_is_told_in_a_sentence(tmp_path: Path) -> None:
    class Carried(Sums):
        def rung(self, name: str) -> list[Callable[[], object]] | None:
            code_of(next(codes()), "sm_90", tmp_path, "made.by")
            return None

    with pytest.raises(InvalidConfig, match=r"is not there; make it where a CUDA compiler is: python -m made\.by"):
        list(runs._measured("gemm", Carried(), Bench.of(torch.device("cpu"), QUICK), None))


def test_rungs_that_are_near_a_library_take_turns_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "NEAR", 50.0)  # between 1 and the thousands of the slow one, on any machine
    cpu = torch.device("cpu")
    slow, wrong, library, alike = found = list(runs._measured("gemm", Sums(), Bench.of(cpu, QUICK), None))
    assert [each.rung for each in found] == ["slow", "wrong", "library", "alike"]
    assert (wrong.error, wrong.seconds) == ("it is wrong", 0.0)
    assert slow.seconds > library.seconds > 0
    assert [len(each.samples) for each in (slow, library, alike)] == [0, LADDERS["gemm"].rounds, LADDERS["gemm"].rounds]
    assert [each.rung for each in runs._measured("gemm", Sums(), Bench.of(cpu, QUICK), None, "ali")] == [
        "library",
        "alike",
    ]


@pytest.mark.parametrize("op", KERNELS)
def test_the_check_of_memory_bound_ops_takes_right_results_alone(op: str) -> None:
    problem = MemoryOp(op, MatrixShape(7, 64), op)
    operands = MemoryOperands(problem, device="cpu")
    for name, way in libraries(op).items():
        right = OpCall(name, partial(way, operands.sets[0], operands.outputs[0]))
        assert operands.fault(right) == "", name
        assert "are wrong" in operands.fault(OpCall(name, lambda right=right: right.output() * 1.05 + 1e-3))  # type: ignore[misc]


def test_shares_of_memory_bound_ops_are_of_a_copy() -> None:
    def time(name: str, seconds: float, *, peer: bool = False) -> RungTime:
        return RungTime("memory_bound", name, "softmax, 1 MB", 0.0, 0 if peer else 1e-6, "", seconds, "", peer, (), 2e6)

    table = rungs([time("copy", 2e-6, peer=True), time("torch", 1e-6, peer=True), time("softmax-online", 4e-6)])
    *_, own = zip(*(list(column.cells) for column in table.columns), strict=True)
    assert own[3:5] == ("500.0", "50 %")


@pytest.mark.parametrize("room", ["gemm.ladder", "memory_bound", "micro"])
def test_a_folder_for_machine_code_is_asked_for_in_one_sentence(
    room: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module(f"ridgeline.kernels.{room}.run", run_name="__main__")
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(
        f"name a folder for the machine code: python -m ridgeline.kernels.{room}.run"
    )

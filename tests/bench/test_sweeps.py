"""Sweeps over cuts of GPU kernels: what a run loses by a cut that dies, and a walk of every sweep's jobs on a CPU."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.attention.decode.cases import DecodeCase
from ridgeline.kernels.attention.paged.cases import AttentionCase
from ridgeline.kernels.base.case import OpCase
from ridgeline.kernels.base.launch import INTERPRETED
from ridgeline.kernels.gemm.fp8.cases import Fp8Case
from ridgeline.kernels.ops import OPS
from ridgeline_bench.sweep.of_op import OpSweep, tokens_of
from ridgeline_bench.sweep.options import SweepOptions, kind_of, loaded
from ridgeline_bench.sweep.runs import run, show, work
from ridgeline_bench.sweep.sweep import Job, short, tensors
from tests.bench.toy_sweep import Toy

PRODUCTS = ("fp8_linear", "coded_linear", "coded_norm_linear", "grouped_gate_up", "route")
SLOW = (
    "fp8_norm_linear",
    "grouped_down",
    "latent_attention",
    "expanded_attention",
    "linear_attention",
    "delta_attention",
    "gated_delta",
    "wkv",
    "selective_scan",
    "paged_attention",
)


@pytest.mark.parametrize(
    "name",
    [*PRODUCTS, "causal_conv", "ssd", "rms_norm",
     *(pytest.param(name, marks=pytest.mark.thorough) for name in SLOW)],
)  # fmt: skip
def test_a_dry_run_walks_every_job(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], interpreted: None
) -> None:
    run(loaded(kind_of(name)), SweepOptions(name=name, dry=True), tmp_path / "lines")
    shown = capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert len(lines) > 5
    assert all(line["value"] > line["limit"] > 0 and line["dry"] for line in lines)
    assert len({line["workload"] for line in lines}) == 1
    assert "FAILED" not in shown
    assert all(f"{line['model']:14s} {line['metric']:11s}" in shown for line in lines)


@pytest.fixture
def interpreted() -> None:
    if not INTERPRETED:
        pytest.skip("rounds on a CPU, in Triton's interpreter")


def toy() -> tuple[Any, list[Job]]:
    sweep = Toy(SweepOptions(), "cuda")
    return sweep, sweep.jobs()


@pytest.mark.dealt
def test_a_cut_that_dies_or_hangs_loses_nothing_but_itself_and_its_like() -> None:
    sweep, jobs = toy()
    answers = dict(work(sweep, jobs, time.monotonic() + 300))
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
    assert list(work(sweep, jobs, time.monotonic() - 1)) == []


def test_the_table_shows_the_fastest_cut_first_and_marks_the_chosen_one(capsys: pytest.CaptureFixture[str]) -> None:
    _, jobs = toy()
    slow, fast = (Job("case", "op", 8, cut=job.cut, chosen=i == 0) for i, job in enumerate((jobs[0], jobs[2])))
    facts = {"error": 0.001, "limit_us": 5.0, "flops": 1e9, "note": ""}
    show({slow: {"us": 20.0, **facts}, fast: {"us": 10.0, **facts}, jobs[3]: {"failed": "wrong"}})
    table = capsys.readouterr().out
    assert "2 of 3 right" in table
    assert "10.00 µs of     5.00 (50.0 %)    100 TFLOP/s" in table
    assert table.index(short(fast.cut)) < table.index(short(slow.cut) + "* 20.00")


def test_a_sweep_that_does_not_exist_is_named() -> None:
    with pytest.raises(InvalidConfig, match=r"no sweep 'norms'; known: embedding, .*fp8_linear"):
        kind_of("norms")
    with pytest.raises(InvalidConfig, match="no sweep 'step_inputs'"):  # an op without cases
        kind_of("step_inputs")


def test_an_op_is_checked_by_its_outputs_and_by_the_states_that_it_leaves() -> None:
    sweep = OpSweep(SweepOptions(name="causal_conv", dry=True), "cpu")
    reference, job = sweep.of.reference, sweep.jobs()[0]

    def leaves_states(given: Any, states: Tensor, turns: Any) -> Tensor:
        return reference(given, states.clone(), turns)

    def doubled(given: Any, states: Tensor, turns: Any) -> Tensor:
        return 2 * reference(given, states, turns)

    for wrong in (leaves_states, doubled):
        sweep.functions, sweep.dry = {"wrong": lambda wrong=wrong: wrong}, False
        with pytest.raises(AssertionError, match="error"):
            sweep.check(job, sweep.arguments(job)[0])
    sweep.functions = {"right": lambda: reference}
    assert sweep.check(job, sweep.arguments(job)[0]) == 0.0


@pytest.mark.parametrize("name", ["gated_delta", "ssd", "causal_conv"])
def test_cases_are_compiled_with_few_tokens(name: str) -> None:
    """Those with marks stay as they are, since each row has one."""
    cases = OPS[name].cases()
    assert [case.reduced() for case in cases.small] == list(cases.small)
    assert max(sum(case.reduced().rows) for case in (*cases.real, *cases.swept)) <= 15_000  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [*PRODUCTS[:-1], "grouped_down", "fp8_norm_linear", "w8a8_linear"])
def test_arguments_of_large_weights_are_made_without_memory(name: str) -> None:
    """So that hundreds of cuts can be listed and compiled on any machine."""
    sweep = OpSweep(SweepOptions(name=name), "meta")
    forms = {job.form: job for job in sweep.jobs() if job.timed}  # the largest case of each format is the last one
    for job in forms.values():
        [(given, _)] = sweep.arguments(job)
        found = tensors(tuple(given))
        assert found
        assert all(x.is_meta for x in found)
        assert sum(x.nbytes for x in found) > 4 << 20


def test_every_format_has_cuts_and_is_checked_within_its_own_tolerance() -> None:
    sweep = OpSweep(SweepOptions(name="grouped_down"), "meta")
    cuts: dict[str, set[type]] = {}
    for job in sweep.jobs():
        cuts.setdefault(job.form, set()).update({type(job.cut)} if job.ours else ())
    assert {form: {kind.__name__ for kind in kinds} for form, kinds in cuts.items()} == {
        "": {"Stream", "Tiles", "Rows", "SharedRows"}, "MXFP4": {"Stream", "Widened"},
        "fp8": {"Stream", "Tiles", "Rows"}, "fp8-block": {"Stream", "Tiles", "Rows"},
            "W4": {"Stream"}, "MXFP8": {"Stream", "Widened", "Rows"},
    }  # fmt: skip
    slack = {job.form: sweep.case_of(job).slack for job in sweep.jobs() if job.timed}
    assert slack["fp8"] == slack["fp8-block"] > 1 << 22 > slack["MXFP4"]


def test_a_product_that_leaves_out_a_block_is_wrong_and_one_that_does_not_round_is_right() -> None:
    """The tolerance of FP8 is a quarter of a standard deviation, which a block of the longest sums exceeds."""
    sweep = OpSweep(SweepOptions(name="fp8_linear"), "cpu")
    case, job = Fp8Case(8, 14_336, 512), Job("down", "fp8_linear", 8)
    sweep.real_cases["down"] = case
    x_TI, weight, bias_O = case.inputs(torch.bfloat16, torch.device("cpu"))
    want, without = sweep.of.reference(x_TI, weight, bias_O), x_TI.clone()
    without[:, :128] = 0
    exact = weight._replace(format=replace(weight.format, activations=None))
    assert sweep.error(job, [sweep.of.reference(without, weight, bias_O)], [want]) > 1
    assert sweep.error(job, [sweep.of.reference(x_TI, exact, bias_O)], [want]) < 1


@pytest.mark.parametrize(
    ("name", "case"),
    [("decode_attention", DecodeCase(lengths=(70, 9, 1), head_dim=32, rotary_dim=32, cache=torch.float8_e4m3fn)),
     ("paged_attention", AttentionCase(rows=((20, 70), (1, 9)), head_dim=32, cache=torch.int8))],
)  # fmt: skip
def test_cuts_over_caches_of_8_bits_are_right(name: str, case: OpCase, interpreted: None) -> None:
    sweep = OpSweep(SweepOptions(name=name, dry=True), "cpu")
    sweep.dry, sweep.real_cases["short"] = False, case
    for cut in (None, *sweep.cuts.candidates(case)[:1]):  # type: ignore[union-attr]
        job = Job("short", name, tokens_of(case), case.form, cut)
        error = sweep.check(job, sweep.arguments(job)[0])
        assert error is not None
        assert 0 < error < 1

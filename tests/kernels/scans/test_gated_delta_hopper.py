"""The Hopper kernel of the gated delta rule, run blind, against the recurrence; and the choice of plans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.kernels.base import aot
from ridgeline.kernels.base.launch import INTERPRETED
from ridgeline.kernels.scans.gated_delta import hopper_chunks, hopper_states, op, triton
from ridgeline.kernels.scans.gated_delta.cases import DeltaCase
from ridgeline.kernels.scans.gated_delta.plan import Gpu, Plan, choose
from tests.kernels.gemm.blind import launch
from tests.kernels.scans.recurrent import assert_other_blocks_are_left_alone, ran, spoiled

CPU = torch.device("cpu")


class Blind:
    """A kernel that is launched as Triton's are."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.runs = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, num_warps: int, maxnreg: int = 0, **named: Any) -> None:
            names = self.kernel.fn.__code__.co_varnames
            given = dict(zip(names, arguments, strict=False)) | named
            assert num_warps == given.get("C", 64) // 16
            self.runs.append(given["RUN"])
            launch(self.kernel, grid, **{name: box_of(x) for name, x in given.items()})

        return run


def box_of(x: Any) -> Any:
    """Return the fields of a descriptor that the simulated copy engine needs."""
    if not isinstance(x, TensorDescriptor):
        return x
    return SimpleNamespace(x=x.base, block_shape=tuple(x.block_shape), dtype=x.base.dtype, layout=None)


CASES = [
    DeltaCase((5, 1, 0, 300, 2), value_heads=2, heads=1, key_width=64, value_width=64, marks=(2, 1, 0, 64, 0),
            fresh=(0, 3), padding=3),
    DeltaCase((290, 65), value_heads=1, heads=1, key_width=64, value_width=128, marks=(200, 0), alike=0.9),
]  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.skipif(not INTERPRETED, reason="the other kernels are interpreted")
@pytest.mark.parametrize(
    ("case", "columns", "segment", "part"),
    [
        pytest.param(case, *plan, marks=pytest.mark.thorough if plan in slow else ())
        for case, slow in zip(CASES, ([(0, 0, 128), (64, 0, 0)], [(0, 128, 0), (64, 0, 64)]), strict=True)
        for plan in ((0, 0, 0), (64, 0, 0), (0, 128, 0), (64, 0, 64), (0, 0, 128))
    ],
    ids=str,
)
def test_kernel_run_blind(
    monkeypatch: pytest.MonkeyPatch, case: DeltaCase, columns: int, segment: int, part: int
) -> None:
    """Columns 0: as many as there are. In parts every launch but the first begins where another one ended."""
    blind = Blind(hopper_chunks.gated_delta_hopper_chunks)
    monkeypatch.setattr(hopper_chunks, "gated_delta_hopper_chunks", blind)
    inputs = case.inputs(torch.float16, CPU)
    plan = Plan(columns or 64, 4, 3, hopper=True, segment=segment, part=part, share=case.value_heads)
    if not columns and case.value_width == 128 and not segment:
        plan = plan._replace(columns=128)
    ours = ran(partial(triton.gated_delta, plan=plan), inputs)
    parts = plan.parts(inputs[2].num_tokens)
    assert parts > 1 or not part
    expected = [hopper_states.CARRIES, hopper_states.OUTPUTS] if segment else [hopper_states.ROWS] * parts
    assert blind.runs == expected
    assert_close(ours, op.delta_rule, inputs)
    if part:  # the same bits
        whole = ran(partial(triton.gated_delta, plan=plan._replace(part=0)), inputs)
        assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(ours, whole, strict=True))


@pytest.mark.skipif(not INTERPRETED, reason="the other kernels are interpreted")
def test_segments_of_two_warpgroups_run_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_chunks, "gated_delta_hopper_chunks", Blind(hopper_chunks.gated_delta_hopper_chunks))
    case = DeltaCase((270,), heads=1, value_heads=1, key_width=128, value_width=128, marks=(150,))
    inputs = case.inputs(torch.float16, CPU)
    plan = Plan(64, 4, 3, hopper=True, segment=128, carry_columns=128)
    assert_close(ran(partial(triton.gated_delta, plan=plan), inputs), op.delta_rule, inputs)


@pytest.mark.skipif(not INTERPRETED, reason="the other kernels are interpreted")
def test_nan_of_another_row_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine copies whole boxes, and the first row ends within one that the second begins in."""
    monkeypatch.setattr(hopper_chunks, "gated_delta_hopper_chunks", Blind(hopper_chunks.gated_delta_hopper_chunks))
    case = DeltaCase((70, 70), heads=1, value_heads=1, key_width=64, value_width=64)
    given, states, metadata = case.inputs(torch.float16, CPU)
    run = partial(triton.gated_delta, plan=Plan(64, 4, 3, hopper=True))
    clean, other = ran(run, (given, states, metadata)), ran(run, (spoiled(given, slice(70, None)), states, metadata))
    block = int(metadata.writes_R[0]) - 1
    assert torch.equal(other.out[:70], clean.out[:70])
    assert torch.equal(other.states[block], clean.states[block])


def assert_close(ours: Any, reference: Any, inputs: Any) -> None:
    epsilon = torch.finfo(torch.float16).eps
    for got, want in zip(ours, ran(reference, inputs), strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=2 * epsilon, atol=4 * epsilon, equal_nan=True)
    assert_other_blocks_are_left_alone(inputs[1], ours, inputs[2])


def test_long_rows_of_few_heads_are_divided_on_hopper() -> None:
    shape = (128, 128, torch.bfloat16, Gpu((9, 0), 132, 232_448))
    assert choose(1, 65_536, 8, *shape).segment > 0
    assert choose(1, 1024, 8, *shape).segment == 0
    assert choose(1, 65_536, 32, *shape) == choose(1, 8192, 32, *shape)
    assert choose(1, 65_536, 32, *shape).hopper
    assert not choose(1, 65_536, 32, 128, 128, torch.float32, Gpu((9, 0), 132, 232_448)).hopper
    assert not choose(1, 65_536, 32, 128, 128, torch.bfloat16, Gpu((8, 0), 132, 166_912)).hopper


def test_plans_on_hopper() -> None:
    """One prompt of many heads runs in parts, few heads in segments, many prompts by two warpgroups a program."""
    shape = (128, 128, torch.bfloat16, Gpu((9, 0), 132, 232_448))
    one, few, many = choose(1, 8192, 32, *shape), choose(1, 65_536, 8, *shape), choose(16, 8192, 32, *shape)
    assert all(plan.hopper for plan in (one, few, many))
    assert (one.columns, one.parts(8192)) == (64, 2)
    assert (few.carry_columns, few.segment > 0, few.parts(65_536)) == (128, True, 1)
    assert (many.columns, many.share, many.parts(8192)) == (128, 2, 1)
    assert choose(1, 1024, 32, *shape).parts(1024) == 1
    beside = choose(65, 8192 + 64, 32, *shape)  # a long prompt, and 64 requests that decode
    assert (beside.columns, beside.parts(8192 + 64)) == (64, 1)


@pytest.mark.dealt
def test_products_of_a_warpgroup_overlap() -> None:
    """The assembler runs products one by one, without a message, if a thread has too few registers: then it waits after
    each of them. Compiled in a process of its own: in this one kernels may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    command = [sys.executable, "-W", "ignore", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    for found in json.loads(run.stdout.splitlines()[0]):
        assert found["HGMMA"] >= 28 * found["warpgroups"]  # of 16 inputs each
        assert found["waits"] <= 6 * found["warpgroups"]
        assert found["copies"] >= 7  # two boxes for keys and queries each, one for everything else


def main() -> None:
    found = []
    for kernel in hopper_chunks.AOT[:2]:
        code = aot.nvidia_code(aot.build(kernel, "sm_90").asm["cubin"], True)[2]
        counts = {"HGMMA": "HGMMA", "waits": "WARPGROUP.DEPBAR", "copies": "UTMALDG"}
        found.append({k: code.count(name) for k, name in counts.items()} | {"warpgroups": kernel.constexprs["WIDE"]})
    print(json.dumps(found))


if __name__ == "__main__":
    main()

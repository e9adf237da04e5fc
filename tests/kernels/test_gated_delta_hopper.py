"""The Hopper kernel of the gated delta rule, run blind, against the recurrence; and the choice of plans."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.kernels.gated_delta import hopper_chunks, op, triton
from ridgeline.kernels.gated_delta.plan import Plan, choose
from ridgeline.kernels.launch import INTERPRETED
from tests.kernels.blind import launch
from tests.kernels.recurrent import assert_other_blocks_are_left_alone, ran

CPU = torch.device("cpu")


class Blind:
    """A kernel that is launched as Triton's are."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.runs = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, num_warps: int, **named: Any) -> None:
            names = self.kernel.fn.__code__.co_varnames
            given = dict(zip(names, arguments, strict=False)) | named
            assert num_warps == given["C"] // 16
            self.runs.append(given["RUN"])
            launch(self.kernel, grid, **given)

        return run


@pytest.mark.skipif(not INTERPRETED, reason="the other kernels are interpreted")
@pytest.mark.parametrize("segment", [0, 128])
@pytest.mark.parametrize(
    "case",
    [
        op.Case((5, 1, 0, 300, 2), value_heads=2, heads=1, key_width=64, value_width=64, marks=(2, 1, 0, 64, 0),
                fresh=(0, 3), padding=3),
        op.Case((290, 65), value_heads=1, heads=1, key_width=64, value_width=128, marks=(200, 0), alike=0.9),
    ],
    ids=str,
)  # fmt: skip
def test_hopper_kernel_run_blind(monkeypatch: pytest.MonkeyPatch, case: op.Case, segment: int) -> None:
    blind = Blind(hopper_chunks.gated_delta_hopper_chunks)
    monkeypatch.setattr(hopper_chunks, "gated_delta_hopper_chunks", blind)
    inputs = case.inputs(torch.float16, CPU)
    columns = 64 if segment else case.value_width
    plan = Plan(columns, columns // 16, 3, hopper=True, segment=segment)
    ours = ran(partial(triton.gated_delta, plan=plan), inputs, 7)
    exact = ran(op.gated_delta, inputs, 7)
    assert blind.runs == ([hopper_chunks.CARRIES, hopper_chunks.OUTPUTS] if segment else [hopper_chunks.ROWS])
    epsilon = torch.finfo(torch.float16).eps
    for got, want in zip(ours, exact, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=2 * epsilon, atol=4 * epsilon, equal_nan=True)
    assert_other_blocks_are_left_alone(inputs[7], ours, inputs[8])


def test_long_rows_of_few_heads_are_divided_on_hopper() -> None:
    shape = (128, 128, torch.bfloat16, (9, 0), 132, 232_448)
    assert choose(1, 65_536, 8, *shape).segment > 0
    assert choose(1, 1024, 8, *shape).segment == 0
    assert choose(1, 65_536, 32, *shape) == choose(1, 8192, 32, *shape)
    assert choose(1, 65_536, 32, *shape).hopper
    assert not choose(1, 65_536, 32, 128, 128, torch.float32, (9, 0), 132, 232_448).hopper
    assert not choose(1, 65_536, 32, 128, 128, torch.bfloat16, (8, 0), 132, 166_912).hopper

"""The kernels of Mamba-2 that load the products of c and b: that for Hopper run blind, the other one interpreted."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.kernels.base.launch import INTERPRETED
from ridgeline.kernels.scans.ssd import hopper_outputs, op, prompts
from ridgeline.kernels.scans.ssd.cases import SsdCase
from ridgeline.kernels.scans.ssd.choose import Cut
from ridgeline.kernels.scans.ssd.triton import ssd
from tests.kernels.gemm.blind import launch
from tests.kernels.scans.recurrent import assert_other_blocks_are_left_alone, ran, spoiled

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the other kernels are interpreted")
CPU = torch.device("cpu")
EPSILON = torch.finfo(torch.float16).eps
CASES = [
    SsdCase((5, 1, 0, 300, 2), 4, 2, 64, 64, marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    SsdCase((64, 65), 2, 1, 64, 64, marks=(0, 65), fresh=(1,), fast=30.0),
]


class Blind:
    """A kernel that is launched as Triton's are."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.runs = kernel, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, num_warps: int, **named: Any) -> None:
            assert num_warps == 4
            self.runs += 1
            launch(
                self.kernel, grid, **dict(zip(self.kernel.fn.__code__.co_varnames, arguments, strict=False)), **named
            )

        return run


def assert_is_the_recurrence(case: SsdCase, cut: Cut) -> None:
    """In float16 what products take in is rounded to 11 bits: c, the states, and twice what weighs a chunk's tokens."""
    given, states, metadata = case.inputs(torch.float16, CPU)
    inputs = spoiled(given, slice(int(metadata.start_R1[-1]), None)), states, metadata
    ours, exact = ran(partial(ssd, cut=cut), inputs), ran(op.ssd, inputs)
    for got, want in zip(ours, exact, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=4 * EPSILON, atol=4 * EPSILON, equal_nan=True)
    assert_other_blocks_are_left_alone(states, ours, metadata)


@pytest.mark.parametrize("segment", [2048, 128])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_hopper_kernel_run_blind(monkeypatch: pytest.MonkeyPatch, case: SsdCase, segment: int) -> None:
    """Rows of one segment and of several, and segments that end with a full chunk."""
    blind = Blind(hopper_outputs.ssd_hopper_outputs)
    monkeypatch.setattr(hopper_outputs, "ssd_hopper_outputs", blind)
    monkeypatch.setattr(prompts, "compute_capability", lambda device: (9, 0))
    assert_is_the_recurrence(case, Cut(segment=segment))
    assert blind.runs == 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shared_products_give_the_recurrence(case: SsdCase) -> None:
    assert_is_the_recurrence(case, Cut(32, segment=64, outputs="shared"))


def test_shapes_that_the_hopper_kernel_does_not_run_take_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "compute_capability", lambda device: (9, 0))
    for heads, groups, width, size, dtype, want in (
        (4, 2, 64, 128, torch.float16, "hopper"),
        (4, 4, 64, 128, torch.float16, "shared"),
        (4, 2, 32, 128, torch.float16, "shared"),
        (4, 2, 64, 256, torch.float16, "shared"),
        (4, 2, 64, 128, torch.float32, "shared"),
    ):
        given, _, _ = SsdCase((3,), heads, groups, width, size).inputs(dtype, CPU)
        assert prompts.settled(Cut(), given).outputs == want

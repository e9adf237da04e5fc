"""The gated delta rule, and its convolution and norm, against their recurrences in float64.

Tolerances: an output is rounded once to its dtype, and may be off by a few of its epsilons. What float32 arithmetic in
another order loses grows with the length of its sums; states and values are of order one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ridgeline.kernels.causal_conv import op as conv
from ridgeline.kernels.gated_delta import op as delta
from ridgeline.kernels.op import Op, Platform
from tests.kernels.recurrent import Ran, assert_other_blocks_are_left_alone, ran

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16]


def names(op: Op[Any]) -> list[str]:
    return [implementation.name for implementation in op.implementations]


def chosen(op: Op[Any], name: str, device: str) -> Callable[..., Any]:
    if name not in ("torch", "reference"):
        pytest.importorskip("triton")
    return op.choose(Platform.of(torch.device(device)), name)


def rounded(name: str, dtype: torch.dtype) -> float:
    """What products lose whose operands are rounded to 16 bits: states, values and changes are of order one, and the
    errors of a sum's terms have no common sign."""
    return 2.0**-17 if dtype == torch.float32 or name != "triton" else 2 * torch.finfo(dtype).eps


def assert_close(ours: Ran, theirs: Ran, slack: float, epsilons: float = 2) -> None:
    for got, want in zip(ours, theirs, strict=True):
        assert got.dtype == want.dtype
        tolerance = epsilons * torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance + slack, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", conv.CASES, ids=str)
@pytest.mark.parametrize("name", names(conv.CAUSAL_CONV))
def test_convolution(name: str, case: conv.Case, dtype: torch.dtype, device: str) -> None:
    inputs = case.inputs(dtype, torch.device(device))
    ours = ran(chosen(conv.CAUSAL_CONV, name, device), inputs, 3)
    assert_close(ours, ran(conv.causal_conv, inputs, 3), slack=2.0**-20)
    assert_other_blocks_are_left_alone(inputs[3], ours, inputs[4])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", delta.CASES, ids=str)
@pytest.mark.parametrize("name", names(delta.GATED_DELTA))
def test_gated_delta(name: str, case: delta.Case, dtype: torch.dtype, device: str) -> None:
    inputs = case.inputs(dtype, torch.device(device))
    ours = ran(chosen(delta.GATED_DELTA, name, device), inputs, 7)
    assert_close(ours, ran(delta.gated_delta, inputs, 7), slack=rounded(name, dtype))
    assert_other_blocks_are_left_alone(inputs[7], ours, inputs[8])

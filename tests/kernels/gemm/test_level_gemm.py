"""Linear maps whose weights are int8 levels: references against float64, implementations against references.

Tolerances: sums in float32 lose I · 2**-24 of terms of order one. An int8 implementation rounds the sum before it adds
the bias: 4 epsilons of the dtype. Sums of products of levels are exact, so w8a8 differs by roundings of the result.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.int8 import cases
from ridgeline.kernels.gemm.int8 import op as int8

CPU, HERE = torch.device("cpu"), Platform(device_type="cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    *(pytest.param(int8.INT8_LINEAR, case, id=f"int8-{case}") for case in cases.CASES),
    *(pytest.param(int8.W8A8_LINEAR, case, id=f"w8a8-{case}") for case in cases.W8A8_CASES),
]


def rounded(x_TI: Tensor) -> Tensor:
    """Each token as a whole number of steps of its largest over 127. Halves are told from less in float32."""
    step_T1 = x_TI.abs().amax(1, keepdim=True).float() / 127
    steps_TI = (x_TI.float() / step_T1 + 128.5).to(torch.uint8).double() - 128
    assert ((x_TI.double() / step_T1.double() - steps_TI).abs() <= 0.5 + 2.0**-16).all()
    return steps_TI * step_T1.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_the_reference_is_the_formula(op: Any, case: Any, dtype: torch.dtype) -> None:
    x_TI, levels, bias_O = case.inputs(dtype, CPU)
    level_OI, scale_O, _ = levels
    weight_OI = (level_OI.double() * scale_O.double()[:, None])[:, : case.in_width]
    want_TO = (rounded(x_TI) if op is int8.W8A8_LINEAR else x_TI.double()) @ weight_OI.T
    want_TO = want_TO if bias_O is None else want_TO + bias_O.double()
    got_TO = op.reference(x_TI, levels, bias_O)
    assert got_TO.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got_TO.double(), want_TO, rtol=2 * eps, atol=4 * eps + case.in_width * 2.0**-24)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_implementations_equal_the_reference(op: Any, case: Any, dtype: torch.dtype) -> None:
    inputs = case.inputs(dtype, CPU)
    given = copy.deepcopy(inputs)
    ran = 0
    for implementation in op.implementations:
        if implementation.supports(HERE):
            got_TO, eps = implementation.load()(*inputs), torch.finfo(dtype).eps
            tolerance = {"rtol": 4 * eps, "atol": 4 * eps + case.in_width * 2.0**-24}
            torch.testing.assert_close(got_TO, op.reference(*inputs), **tolerance)
            ran += 1
    assert ran or op is int8.W8A8_LINEAR
    for now, before in zip((inputs[0], *inputs[1][:2]), (given[0], *given[1][:2]), strict=True):
        assert torch.equal(now, before)
    assert inputs[2] is None or torch.equal(inputs[2], given[2])


@pytest.mark.skipif(not int8.has_vnni(HERE), reason="no VNNI")
def test_packed_levels_multiply_like_levels() -> None:
    from ridgeline.kernels.gemm.int8.onednn import pack, w8a8_linear

    x_TI, levels, bias_O = cases.W8A8_CASES[2].inputs(torch.float32, CPU)
    packed = levels._replace(level_OI=pack(levels.level_OI))
    assert packed.stored.is_mkldnn
    assert torch.equal(w8a8_linear(x_TI, packed, bias_O), w8a8_linear(x_TI, levels, bias_O))
    for packed_or_not in (packed, levels):
        torch.testing.assert_close(int8.w8a8_linear(x_TI, packed_or_not, bias_O), w8a8_linear(x_TI, levels, bias_O))

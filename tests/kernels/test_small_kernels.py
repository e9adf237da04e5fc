"""The small Triton kernels (norms, activations, rotary with cache writes) against the plain references.

Tolerances as in test_plain_ops.py: a few epsilons of the output's dtype. In the interpreter a cast to bfloat16
truncates, so one rounding is worth one epsilon instead of a half.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.op import Platform
from ridgeline.kernels.rotary import op as rotary

pytest.importorskip("triton")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def assert_close(ours: Tensor, theirs: Tensor, epsilons: float, slack: float = 0) -> None:
    """Within `epsilons` of the dtype, relative above one; slack: what float32 arithmetic may lose, in 2**-24."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    tolerance = epsilons * torch.finfo(ours.dtype).eps
    torch.testing.assert_close(
        ours.double(), theirs.double(), rtol=tolerance, atol=tolerance + slack * 2.0**-24, equal_nan=True
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", rotary.FUSED_CASES, ids=str)
@pytest.mark.parametrize("name", [implementation.name for implementation in rotary.ROPE_KV.implementations])
def test_rope_kv(name: str, case: rotary.FusedCase, dtype: torch.dtype, device: str) -> None:
    """Caches start as NaN, so what a kernel writes beside its places shows; the null block holds no promise."""
    inputs = case.inputs(dtype, torch.device(device))
    ours, theirs = list(inputs), list(inputs)
    for copies in (ours, theirs):
        both = torch.stack((inputs[6], inputs[7]), 1)  # keeps the strides of two views of one allocation
        copies[6], copies[7] = both[:, 0], both[:, 1]
    q_THD = rotary.ROPE_KV.choose(Platform.of(torch.device(device)), name)(*ours)
    assert q_THD.is_contiguous()
    # sums of products of normal numbers: rounding an operand by half an epsilon moves the result by at most 5 halves
    assert_close(q_THD, rotary.ROPE_KV.reference(*theirs), 8)
    for place in (6, 7):
        assert_close(ours[place][1:], theirs[place][1:], 8)
    assert torch.equal(ours[0], inputs[0])

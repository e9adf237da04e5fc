"""Heads' linear maps, and those whose bits do not depend on the tokens beside them."""

from __future__ import annotations

import pytest
import torch

from ridgeline.kernels.gemm.heads import torch_ops
from ridgeline.kernels.gemm.heads.cases import CASES, HeadLinearCase
from ridgeline.kernels.gemm.heads.op import head_linear

pytest.importorskip("triton")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_are_multiplied_by_their_own_matrices(case: HeadLinearCase, dtype: torch.dtype, device: str) -> None:
    from ridgeline.kernels.gemm.heads.batch_invariant import head_linear as invariant

    x_THI, weight_HOI = case.inputs(dtype, torch.device(device))
    exact = torch.einsum("thi,hoi->tho", x_THI.double(), weight_HOI.double())
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    rows = torch_ops.head_linear(x_THI, weight_HOI)
    assert rows.is_contiguous()
    for found in (head_linear(x_THI, weight_HOI), rows, invariant(x_THI, weight_HOI)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=atol)


@pytest.mark.parametrize("device", DEVICES)
def test_bits_do_not_depend_on_the_tokens_beside(device: str) -> None:
    from ridgeline.kernels.gemm.heads.batch_invariant import head_linear as invariant

    x_THI, weight_HOI = CASES[2].inputs(torch.bfloat16, torch.device(device))
    together = invariant(x_THI, weight_HOI)
    for token in (0, 63, 64, 69):
        assert torch.equal(invariant(x_THI[token : token + 1], weight_HOI)[0], together[token])


def test_gradients_go_through() -> None:
    x_THI, weight_HOI = CASES[3].inputs(torch.float32, torch.device("cpu"))
    x_THI.requires_grad_()
    torch_ops.head_linear(x_THI, weight_HOI).sum().backward()
    assert x_THI.grad is not None
    torch.testing.assert_close(x_THI.grad, weight_HOI.sum(1).expand_as(x_THI))

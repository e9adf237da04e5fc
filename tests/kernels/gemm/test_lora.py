"""Products of adapters: every token gets its own adapter's, and those without one keep their bits.

Sums of I products of order one, in another order, differ by I * 2**-24; in bfloat16 the inner product and the result
are rounded (2**-8 each).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.gemm.lora import torch_ops
from ridgeline.kernels.gemm.lora.cases import CASES, LoraCase
from ridgeline.kernels.gemm.lora.op import by_adapter, lora, tiles

pytest.importorskip("triton")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def exact(case: LoraCase, y_TO: Tensor, x_TI: Tensor, down_AKI: Tensor, up_AOR: Tensor) -> Tensor:
    """Compute the result row by row, in float64, from the case's own list of rows."""
    y_TO, x_TI, token = y_TO.double(), x_TI.double(), 0
    for adapter, count in case.rows:
        for t in range(token, token + count) if adapter else ():
            rank, first = case.ranks[adapter - 1], 0
            for part, outputs in enumerate(case.parts):
                down_RI = down_AKI[adapter - 1, part * case.most :][:rank].double()
                up_OR = up_AOR[adapter - 1, first : first + outputs, :rank].double()
                y_TO[t, first : first + outputs] += up_OR @ (down_RI @ x_TI[t])
                first += outputs
        token += count
    return y_TO


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_token_gets_the_products_of_its_adapter(case: LoraCase, dtype: torch.dtype, device: str) -> None:
    from ridgeline.kernels.gemm.lora.triton import lora as by_triton

    y_TO, x_TI, factors, step = case.inputs(dtype, torch.device(device))
    wanted = exact(case, y_TO, x_TI, factors.down_AKI, factors.up_AOR)
    epsilon = case.in_width * 2.0**-24 if dtype == torch.float32 else 3 * 2.0**-8
    base_T = torch.tensor([not adapter for adapter, count in case.rows for _ in range(count)] + [True] * case.padding)
    for way in (lora, torch_ops.lora, by_triton):
        found = y_TO.clone()
        way(found, x_TI, factors, step)
        torch.testing.assert_close(found.double(), wanted, rtol=epsilon, atol=8 * epsilon)
        assert torch.equal(found[base_T.to(device)], y_TO[base_T.to(device)])


@pytest.mark.parametrize("device", DEVICES)
def test_bits_do_not_depend_on_the_tokens_beside(device: str) -> None:
    from ridgeline.kernels.gemm.lora.triton import lora as by_triton

    case = CASES[3]
    y_TO, x_TI, factors, step = case.inputs(torch.float32, torch.device(device))
    together = y_TO.clone()
    by_triton(together, x_TI, factors, step)
    for token, adapter in ((0, 1), (19, 1), (25, 3), (46, 1)):
        alone = y_TO[token : token + 1].clone()
        row = torch.zeros(1, dtype=torch.int32, device=device), torch.tensor([0, 1], dtype=torch.int32, device=device)
        own_S = torch.tensor([adapter], dtype=torch.int32, device=device)
        by_triton(alone, x_TI[token : token + 1], factors, by_adapter(*row, own_S, 1, 3))
        assert torch.equal(alone[0], together[token])


def test_tokens_are_sorted_by_adapter_and_those_without_one_come_last() -> None:
    slots, starts = torch.tensor([2, 0, 1], dtype=torch.int32), torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    found = by_adapter(slots, starts, torch.tensor([0, 1, 2], dtype=torch.int32), 8, 2)
    assert found.order_T.tolist() == [3, 4, 5, 0, 1, 2, 6, 7]  # slot 1, slot 2, slot 0, and padding
    assert found.start_A1.tolist() == [0, 3, 5]


def test_a_tile_has_outputs_of_one_part() -> None:
    assert tiles((130, 20)) == [(0, 0, 128), (0, 128, 130), (1, 130, 150)]

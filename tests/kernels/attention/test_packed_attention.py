"""Packed bidirectional attention: the reference against torch's attention in float64, row by row, and implementations
against the reference.

Tolerances are those of tests/kernels/small/test_plain_ops.py, in units of the dtype's epsilon: weights are rounded to
it before the second product, and values of order one are averaged.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ridgeline.kernels.attention.packed.cases import CASES, PackedCase
from ridgeline.kernels.attention.packed.cost import packed_attention_cost
from ridgeline.kernels.attention.packed.op import PACKED_ATTENTION, LoadedRows, PackedRows
from ridgeline.kernels.base.op import Platform

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_torchs_attention_of_each_row(case: PackedCase) -> None:
    q, k, v, rows, scale, window, bias = case.inputs(torch.float64, torch.device("cpu"))
    got = PACKED_ATTENTION.reference(q, k, v, rows, scale, window, bias)
    for first, end in zip(rows.start_R1[:-1], rows.start_R1[1:], strict=True):
        if first == end:
            continue
        at = torch.arange(end - first)
        mask = torch.zeros(len(at), len(at), dtype=torch.float64)
        if bias is not None:
            middle = bias.shape[1] // 2
            mask = torch.stack([torch.stack([bias[:, middle + j - i] for j in at], 1) for i in at], 1)
        if window is not None:
            mask = mask.masked_fill((at - at[:, None]).abs() >= window, -torch.inf)
        one = (x[None, first:end].transpose(1, 2) for x in (q, k, v))
        want = F.scaled_dot_product_attention(*one, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
        assert got[first:end].numpy() == pytest.approx(want.numpy(), abs=1e-5)  # the reference computes in float32


@pytest.mark.few(18)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", [each.name for each in PACKED_ATTENTION.implementations])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_implementations_give_what_the_reference_does(
    case: PackedCase, implementation: str, dtype: torch.dtype, device: str
) -> None:
    if (implementation, device, dtype) == ("triton", "cpu", torch.bfloat16):
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16")
    inputs = case.inputs(dtype, torch.device(device))
    run = PACKED_ATTENTION.choose(Platform.of(torch.device(device)), implementation)
    got, want = (x.float().cpu().numpy() for x in (run(*inputs), PACKED_ATTENTION.reference(*inputs)))
    assert got.shape == want.shape
    assert got == pytest.approx(want, abs=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("implementation", [each.name for each in PACKED_ATTENTION.implementations])
def test_a_rows_result_does_not_see_its_neighbours(implementation: str) -> None:
    q, k, v, _, scale, *_ = PackedCase((40,), 2, 2, 16).inputs(torch.float32, torch.device("cpu"))
    run = PACKED_ATTENTION.choose(Platform(device_type="cpu"), implementation)
    alone = run(q[7:25], k[7:25], v[7:25], PackedRows.of(np.array([18])), scale)
    k, v = k.clone(), v.clone()
    for x in (k, v):
        x[:7] = x[25:] = torch.nan
    beside = run(q, k, v, PackedRows.of(np.array([7, 18, 15])), scale)
    assert torch.equal(beside[7:25].nan_to_num(9), alone) or torch.allclose(beside[7:25], alone, atol=1e-6)
    assert not beside[7:25].isnan().any()


@pytest.mark.parametrize("implementation", [each.name for each in PACKED_ATTENTION.implementations])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_loaded_anew_give_what_others_do(implementation: str, device: str) -> None:
    """Tables stay where they are, and their lines behind the newest rows do nothing."""
    q, k, v, _, scale, *_ = PackedCase((300,), 2, 2, 16).inputs(torch.float32, torch.device(device))
    run = PACKED_ATTENTION.choose(Platform.of(torch.device(device)), implementation)
    rows = LoadedRows(300, 7, 200)
    assert rows.longest == 200
    run(q, k, v, rows, scale)
    tables = [each.data_ptr() for each in rows.derived.values()]
    for lengths in ([200, 100], [1, 1, 1, 1, 1, 95, 200], [60] * 5):
        assert rows.holds(np.array(lengths))
        rows.load(np.array(lengths))
        assert torch.equal(run(q, k, v, rows, scale), run(q, k, v, PackedRows.of(np.array(lengths)), scale))
    assert [each.data_ptr() for each in rows.derived.values()] == tables
    for lengths in ([201, 99], [300], [40] * 7, [38] * 8):
        assert not rows.holds(np.array(lengths))


def test_the_cost_counts_the_pairs_that_are_seen() -> None:
    for lengths, window in (((5, 0, 9), None), ((5, 9, 1), 3), ((4,), 4), ((4,), 9)):
        pairs = sum(
            window is None or abs(query - key) < window
            for length in lengths
            for query in range(length)
            for key in range(length)
        )
        cost = packed_attention_cost(lengths, num_heads=3, num_kv_heads=1, head_dim=8, itemsize=2, window=window)
        assert cost.flops == 4 * 8 * 3 * pairs
        assert cost.bytes == 2 * sum(lengths) * (3 + 1) * 8 * 2

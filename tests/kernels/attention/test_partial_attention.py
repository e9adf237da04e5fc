"""Attention to a part of the keys, and the sums by which parts are added up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.kernels.attention.paged.cases import CASES, WIDE_CASES, AttentionCase
from ridgeline.kernels.attention.paged.op import AttentionShape, Softmax
from ridgeline.kernels.attention.paged.partial import (
    MERGE_ATTENTION,
    PARTIAL_ATTENTION,
    merge_attention,
    partial_attention,
)
from ridgeline.kernels.attention.paged.schedule import make_schedule
from ridgeline.kernels.base.op import Platform
from tests.kernels.attention.test_attention import DEVICES, dense, tolerance
from tests.kernels.unseen import spoiled

CAUSAL = [case for case in CASES if not case.pictures]
PLAIN = [replace(case, sinks=False) for case in (*CAUSAL, *WIDE_CASES[2:3], *WIDE_CASES[6:7]) if case.window is None]
# A row's first queries may see nothing of a rank's keys, and the whole row too
BEHIND = (
    AttentionCase(rows=((3, 2), (1, 0), (1, 5), (2, 1)), num_heads=8),
    AttentionCase(rows=((70, 69), (1, 40), (33, 90), (1, 0)), alibi=True),
    AttentionCase(rows=((1, 400), (1, 0), (1, 33)), num_heads=8, num_kv_heads=1, softcap=3.0),
)


def taken(case: AttentionCase, name: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    q_THD, *caches, batch = case.inputs(torch.float32, torch.device(device))
    options = {k: v for k, v in case.options(torch.float32, torch.device(device)).items() if k != "window"}
    attend = PARTIAL_ATTENTION.choose(Platform.of(torch.device(device)), name)
    return attend(q_THD, *spoiled(case, caches, batch), batch, **options)


@pytest.mark.parametrize("case", PLAIN[:7], ids=str)
def test_the_reference_is_attention_to_these_keys(case: AttentionCase) -> None:
    """And one sink more, of which the sum tells how much it takes."""
    out_THD, lse_TH = taken(case, "reference", "cpu")
    sinks_H = torch.linspace(-1, 3, case.num_heads)
    assert (out_THD.double() - dense(case, torch.float32)).abs().max() <= tolerance(torch.float32)
    together = merge_attention(out_THD[None], lse_TH[None], sinks_H)
    share_TH = torch.sigmoid(lse_TH - sinks_H)
    assert torch.allclose(together, out_THD * share_TH[..., None], atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*PLAIN, *BEHIND], ids=str)
def test_triton_equals_the_reference(case: AttentionCase, device: str) -> None:
    out_THD, lse_TH = taken(case, "triton", device)
    expected_THD, expected_TH = taken(case, "reference", device)  # inputs are drawn where they are needed
    sees_TH = expected_TH > -torch.inf
    assert torch.equal(lse_TH > -torch.inf, sees_TH)
    assert not sees_TH.all() or case not in BEHIND
    assert (lse_TH - expected_TH)[sees_TH].abs().max() <= 1e-5 * (1 + expected_TH[sees_TH].abs().max())
    assert (out_THD - expected_THD)[sees_TH].abs().max() <= tolerance(torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_hopper_kernel_tells_the_sums_too(head_dim: int) -> None:
    """Of long rows beside short ones, one of which sees nothing with its first query."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is written for Hopper")
    rows = ((700, 699), (1, 300), (300, 2500), (2, 1), (129, 129))
    case = AttentionCase(rows=rows, num_heads=8, num_kv_heads=2, head_dim=head_dim, block_size=64)
    q_THD, k, v, batch = case.inputs(torch.bfloat16, torch.device("cuda"))
    shape = AttentionShape(num_tokens=len(q_THD), tokens_each=0, num_heads=8, num_kv_heads=2, cache_NGPD=k)
    made = make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, shape)
    assert made.hopper is not None
    attend = PARTIAL_ATTENTION.choose(Platform.of(torch.device("cuda")), "triton")
    out_THD, lse_TH = attend(q_THD, k, v, replace(batch, schedule=made), Softmax(0.1))
    expected_THD, expected_TH = partial_attention(q_THD, k, v, batch, Softmax(0.1))
    sees_TH = expected_TH > -torch.inf
    assert torch.equal(lse_TH > -torch.inf, sees_TH)
    assert (lse_TH - expected_TH)[sees_TH].abs().max() <= 1e-3
    assert (out_THD - expected_THD)[sees_TH].abs().max() <= tolerance(torch.bfloat16)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_queries_that_see_nothing_at_all_get_zeros_and_what_is_no_number_stays_none(name: str) -> None:
    merge = MERGE_ATTENTION.choose(Platform(device_type="cpu"), name)
    lse_NTH = torch.tensor([[[-torch.inf], [0.0], [1.0]], [[-torch.inf], [torch.nan], [-torch.inf]]])
    out_NTHD = torch.full((2, 3, 1, 4), torch.nan)
    out_NTHD[0, 2] = 3
    out_THD = merge(out_NTHD, lse_NTH)
    assert (out_THD[0] == 0).all()
    assert out_THD[1].isnan().all()
    assert (out_THD[2] == 3).all(), "an undefined output without a part in the sum"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("parts", "heads", "width"), [(2, 32, 128), (8, 3, 80), (3, 5, 16)])
def test_triton_merges_as_the_reference(parts: int, heads: int, width: int, sinks: bool, device: str) -> None:
    """Parts as they lie in one message, logarithms behind the heads."""
    packed = torch.randn(parts, 7, heads, width + 1)
    out_NTHD, lse_NTH = packed[..., :width], 5 * packed[..., width]
    lse_NTH[torch.rand(lse_NTH.shape) < 0.3] = -torch.inf
    sinks_H = torch.randn(heads) if sinks else None
    want = merge_attention(out_NTHD.double(), lse_NTH.double(), None if sinks_H is None else sinks_H.double())
    merge = MERGE_ATTENTION.choose(Platform.of(torch.device(device)), "triton")
    moved = packed.to(device)
    got = merge(moved[..., :width], lse_NTH.to(device), None if sinks_H is None else sinks_H.to(device))
    assert (got.cpu().double() - want).abs().max() <= tolerance(torch.float32)


def test_a_window_begins_where_the_row_says() -> None:
    """Each further query sees one key less; with a window of all of them it is attention with that window."""
    case = AttentionCase(rows=((5, 40), (1, 33)), window=12)
    q_THD, k, v, batch = case.inputs(torch.float32, torch.device("cpu"))
    first_R = torch.tensor([length - new - case.window + 1 for new, length in case.rows])
    out_THD, _ = partial_attention(q_THD, k, v, batch, Softmax(case.head_dim**-0.5), first_R=first_R)
    assert (out_THD.double() - dense(case, torch.float32)).abs().max() <= tolerance(torch.float32)

"""Attention over expanded latents: both implementations equal the reference, which equals attention to latents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.kernels.attention.expanded import torch_ops
from ridgeline.kernels.attention.expanded import triton as kernels
from ridgeline.kernels.attention.expanded.cases import CASES, ExpandedCase
from ridgeline.kernels.attention.expanded.cost import expanded_attention_cost, worth_expanding
from ridgeline.kernels.attention.expanded.op import EXPANDED_ATTENTION, LongRows, expanded_attention
from ridgeline.kernels.attention.paged.triton_common import Cut
from tests.kernels.trees import signed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CUTS = (Cut(16, 16, warps=4, stages=1), Cut(64, 32, warps=4, stages=2), Cut(128, 64, warps=8, stages=2))


def computed(function: Any, args: tuple[Any, ...], **options: Any) -> Tensor:
    """Return the outputs, in a tensor whose other tokens are -1."""
    out_THV, *rest = args
    out_THV = torch.full_like(out_THV, -1)
    function(out_THV, *rest, scale=0.3 * rest[0].shape[-1] ** -0.5, **options)
    return out_THV


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("triton", torch.float32), ("triton", torch.bfloat16), ("triton", torch.float16), ("torch", torch.float32)],
)
def test_implementations_equal_the_reference(name: str, dtype: torch.dtype, case: ExpandedCase, device: str) -> None:
    if (name, device, dtype) == ("triton", "cpu", torch.bfloat16):
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16")
    function = next(i for i in EXPANDED_ATTENTION.implementations if i.name == name).load()
    args = case.inputs(dtype, torch.device(device))
    expected, found = computed(expanded_attention, args), computed(function, args)
    assert torch.isfinite(found).all()
    assert (found.float() - expected.float()).abs().max() <= TOLERANCE[dtype] * (1 + expected.abs().max())
    rows: LongRows = args[-1]
    taken = {t for first, n in zip(rows.first_R, rows.tokens_R, strict=True) for t in range(first, first + n)}
    others = [t for t in range(len(found)) if t not in taken]
    assert (found[others] == -1).all()


WIDTHS = {"key_dim": 128, "rope_dim": 64, "value_dim": 128}  # which Hopper has a kernel of its own for
HOPPER = (
    ExpandedCase(rows=((128, 128),), **WIDTHS),
    ExpandedCase(rows=((150, 150), (64, 257), (1, 1), (130, 1000)), num_heads=5, **WIDTHS),
    ExpandedCase(rows=((300, 301), (129, 4096)), **WIDTHS),
    ExpandedCase(rows=((1000, 1000),) * 3, num_heads=16, **WIDTHS),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", HOPPER, ids=str)
def test_hoppers_own_kernel_equals_the_reference(
    case: ExpandedCase, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again with the same bits, and also for the rows beside one that was stopped."""
    hopper = pytest.importorskip("ridgeline.kernels.attention.expanded.hopper")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("it is for Hopper")
    monkeypatch.setattr(hopper, "worth", lambda *_: True)
    args = case.inputs(dtype, torch.device("cuda"))
    assert hopper.supports(*args[1:-1])
    exact = [x.float() for x in args[1:-1]]
    expected = computed(expanded_attention, (args[0].float(), *exact, args[-1]))
    found = computed(kernels.expanded_attention, args)
    assert torch.isfinite(found).all()
    assert (found.float() - expected).abs().max() <= TOLERANCE[dtype] * (1 + expected.abs().max())
    for _ in range(20):
        assert torch.equal(computed(kernels.expanded_attention, args), found)
    stopped = args[-1].kv_len_R.clone()
    stopped[0] = 1
    rows = replace(args[-1], kv_len_R=stopped, derived={})
    end = rows.first_R[0] + rows.tokens_R[0]
    assert torch.equal(computed(kernels.expanded_attention, (*args[:-1], rows))[end:], found[end:])


@pytest.mark.parametrize(
    ("rows", "heads", "own"),
    [
        (((1024, 1024),), 16, False),  # the host would take longer to launch it than the device saves
        (((128, 128),), 128, False),
        (((128, 16_384),), 16, True),  # as many programs, but long ones
        (((1024, 1024),) * 8, 16, True),
        (((2048, 2048),), 128, True),
        (((8192, 8192),), 16, True),
        (((2048, 32_768),), 16, True),
    ],
)
def test_hoppers_own_kernel_runs_what_is_worth_its_launch(
    rows: tuple[tuple[int, int], ...], heads: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes that were timed on an H200, and some small ones."""
    hopper = pytest.importorskip("ridgeline.kernels.attention.expanded.hopper")
    monkeypatch.setattr(hopper, "num_multiprocessors", lambda device: 132)
    tokens_R, bound_R = np.array(rows, np.int64).T
    begin_R = np.cumsum(bound_R) - bound_R
    long = LongRows(
        first_R=np.cumsum(tokens_R) - tokens_R, tokens_R=tokens_R, begin_R=begin_R, bound_R=bound_R,
        kv_len_R=torch.from_numpy(bound_R).int(),
    )  # fmt: skip
    assert hopper.worth(long, heads, torch.device("cpu")) is own


TIMED = {  # µs on an H200 of (Triton's kernel, Hopper's own), in graphs
    (16, (8192, 8192)): (777, 517),
    (8, (16_384, 30_000)): (3592, 2268),
    (16, (2048, 32_768)): (1643, 874),
    (128, (2048, 2048)): (546, 339),
}


@pytest.mark.parametrize(("heads", "row"), TIMED, ids=str)
def test_estimates_of_both_kernels_are_what_was_measured(heads: int, row: tuple[int, int]) -> None:
    hopper = pytest.importorskip("ridgeline.kernels.attention.expanded.hopper")
    tokens_R, bound_R = np.array([row], np.int64).T
    steps_I = hopper.steps_of(tokens_R, bound_R)
    for pace, measured in zip((hopper.TRITON, hopper.HOPPER), TIMED[heads, row], strict=True):
        assert hopper.estimate(pace, steps_I, heads, 132) == pytest.approx(measured, rel=0.13)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["triton", "torch"])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_of_the_chosen_keys_alone(case: ExpandedCase, name: str, device: str) -> None:
    """Random ones, of which some tokens have none among the first keys, against softmax over what was chosen."""
    function = next(i for i in EXPANDED_ATTENTION.implementations if i.name == name).load()
    args = case.inputs(torch.float32, torch.device(device))
    out_THV, q_THK, q_THY, k_JHK, v_JHV, r_JY, rows = args
    made, words = torch.Generator().manual_seed(7), -(-int(rows.bound_R.max()) // 64) + 1
    chosen_TW = torch.zeros(len(out_THV), words, dtype=torch.int64)
    expected = torch.full_like(out_THV, -1)
    for (new, kv), first, begin in zip(case.rows, rows.first_R.tolist(), rows.begin_R.tolist(), strict=True):
        for token in range(new):
            seen = kv - new + token + 1
            place_j = (torch.randperm(seen, generator=made)[: max(1, seen // 3)]).sort().values
            if token % 4 == 0:
                place_j = place_j[-2:]
            for place in place_j.tolist():
                chosen_TW[first + token, place // 64] |= signed(1 << place % 64)
            key_jHX = torch.cat(
                (k_JHK[begin + place_j], r_JY[begin + place_j, None].expand(-1, case.num_heads, -1)), -1
            )
            q_HX = torch.cat((q_THK[first + token], q_THY[first + token]), -1)
            weights_Hj = (0.3 * q_THK.shape[-1] ** -0.5 * torch.einsum("hx,jhx->hj", q_HX, key_jHX)).softmax(-1)
            expected[first + token] = torch.einsum("hj,jhv->hv", weights_Hj, v_JHV[begin + place_j])
    for compute in (function, expanded_attention):
        found = computed(compute, args, chosen_TW=chosen_TW.to(device))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_any_cut_gives_the_same(cut: Cut, device: str) -> None:
    args = CASES[1].inputs(torch.float32, torch.device(device))
    expected = computed(expanded_attention, args)
    found = computed(kernels.expanded_attention, args, cut=cut)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [kernels.expanded_attention, torch_ops.expanded_attention])
def test_a_stopped_row_disturbs_no_other(function: Any, device: str) -> None:
    *args, rows = CASES[1].inputs(torch.float32, torch.device(device))
    expected = computed(function, (*args, rows))
    stopped = rows.kv_len_R.clone()
    stopped[0] = 1
    found = computed(function, (*args, replace(rows, kv_len_R=stopped, derived={})))
    end = rows.first_R[0] + rows.tokens_R[0]
    assert torch.equal(found[end:], expected[end:])


@pytest.mark.parametrize(
    "case", [*CASES, ExpandedCase(rows=((90, 100), (40, 40)), key_dim=24, rope_dim=8, value_dim=48)], ids=str
)
def test_tiles_of_queries_see_what_all_at_once_see(case: ExpandedCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 queries of one head, and of 8 where rows have 130 keys."""
    monkeypatch.setattr(torch_ops, "QUERIES", 32)
    monkeypatch.setattr(torch_ops, "SCORES", 1040)
    args = case.inputs(torch.float32, torch.device("cpu"))
    expected, found = computed(expanded_attention, args), computed(torch_ops.expanded_attention, args)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_no_scores_of_whole_rows_are_kept() -> None:
    """2 heads' scores of 4,096 tokens would be 134 MB. Values are narrower than keys, as those of all models are."""
    *given, rows = ExpandedCase(rows=((4096, 4096),), num_heads=2).inputs(torch.float32, torch.device("cpu"))
    with torch.profiler.profile(profile_memory=True) as seen:
        computed(torch_ops.expanded_attention, (*given, rows))
    assert max(event.self_cpu_memory_usage for event in seen.events()) <= 4 * torch_ops.SCORES


def test_it_is_attention_to_the_latents_themselves() -> None:
    """Queries against latents, whose attended sum is projected, give what made keys and values give."""
    generator = torch.Generator().manual_seed(3)
    heads, width, rope, value, rank, tokens, length = 3, 16, 8, 12, 20, 40, 90
    w_HKL = torch.randn(heads, width, rank, generator=generator, dtype=torch.float64)
    w_HVL = torch.randn(heads, value, rank, generator=generator, dtype=torch.float64)
    c_JL = torch.randn(length, rank, generator=generator, dtype=torch.float64)
    r_JY = torch.randn(length, rope, generator=generator, dtype=torch.float64)
    q_THX = torch.randn(tokens, heads, width + rope, generator=generator, dtype=torch.float64)
    q_THK, q_THY = q_THX.split((width, rope), dim=-1)
    rows = LongRows(
        first_R=np.array([0]), tokens_R=np.array([tokens]), begin_R=np.array([0]), bound_R=np.array([length]),
        kv_len_R=torch.tensor([length]),
    )  # fmt: skip
    out_THV = torch.empty(tokens, heads, value, dtype=torch.float64)
    k_JHK, v_JHV = (torch.einsum("hxl,jl->jhx", w, c_JL) for w in (w_HKL, w_HVL))
    torch_ops.expanded_attention(out_THV, q_THK, q_THY, k_JHK, v_JHV, r_JY, rows, scale=0.2)
    scores = torch.einsum("thk,hkl,jl->thj", q_THK, w_HKL, c_JL) + torch.einsum("thy,jy->thj", q_THY, r_JY)
    hidden_TJ = torch.arange(length) > torch.arange(length - tokens, length)[:, None]
    weights = (0.2 * scores).masked_fill(hidden_TJ[:, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(out_THV, torch.einsum("thj,jl,hvl->thv", weights, c_JL, w_HVL))


def test_what_it_refuses() -> None:
    out, q, rotated, k, v, r, rows = CASES[0].inputs(torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="parts of one tensor"):
        kernels.expanded_attention(out, q, rotated, k, v.contiguous(), r, rows, scale=1.0)


def test_least_work_counts_pairs_that_are_seen() -> None:
    cost = expanded_attention_cost([2, 1], [2, 4], num_heads=3, key_dim=8, rope_dim=4, value_dim=6, itemsize=2)
    pairs, keys = 1 + 2 + 4, 2 + 4
    assert cost.flops == 2 * 3 * pairs * (12 + 6)
    assert cost.bytes == 2 * (3 * 3 * (12 + 6) + keys * (3 * 14 + 4))


def test_rows_are_expanded_where_that_takes_fewer_flops() -> None:
    sizes = {"key_dim": 128, "value_dim": 128, "rank": 512}
    # 171 queries of a row pay for making the keys and values of one cached token
    tokens, cached = [1, 127, 128, 150, 250, 8192, 8192], [8192, 127, 128, 8192, 8192, 8192, 100_000]
    assert worth_expanding(tokens, cached, **sizes).tolist() == [False, False, True, False, True, True, True]
    slow = [False, False, True, True, True, True, True]  # pairs against latents take twice as long: 74 queries pay
    assert worth_expanding(tokens, cached, **sizes, pace=2.0).tolist() == slow
    narrow = {"key_dim": 128, "value_dim": 128, "rank": 64}  # latents are the narrower
    assert not worth_expanding(tokens, cached, **narrow).any()

"""Cached keys and values of 8 bits: levels against a search over all of them, attention against float64, in every
implementation; scales of rows, and scales that a checkpoint brings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.kernels.attention.decode.cases import DecodeCase
from ridgeline.kernels.attention.decode.op import DECODE_ATTENTION
from ridgeline.kernels.attention.paged.cases import AttentionCase
from ridgeline.kernels.attention.paged.op import PAGED_ATTENTION, AttentionShape, Softmax
from ridgeline.kernels.base import kv_cache
from ridgeline.kernels.base.kv_cache import KVScales
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.small.rotary.cases import RopeKVCase
from ridgeline.kernels.small.rotary.op import ROPE_KV, Projected
from tests.covering import by_pairs
from tests.kernels.attention.test_attention import dense, tolerance
from tests.kernels.unseen import seen_cells

pytest.importorskip("triton")
from ridgeline.kernels.attention.paged.hopper_items import prefill_items
from ridgeline.kernels.attention.paged.schedule import make_schedule
from ridgeline.kernels.attention.paged.widen import make_widening, widen
from tests.kernels.attention.test_cascade import BATCHES, make, schedule_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TYPES = tuple(kv_cache.LARGEST)
DIGITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}  # after the point
BIAS = {torch.float8_e4m3fn: 7, torch.float8_e5m2: 15}
CASES = (
    AttentionCase(rows=((1, 17), (1, 5), (1, 64))),
    AttentionCase(rows=((40, 100), (1, 90), (33, 33)), window=12, block_size=4),
    AttentionCase(rows=((1, 150), (33, 90), (3, 200)), num_heads=6, alibi=True, window=40, head_dim=64),
    AttentionCase(rows=((1, 70), (40, 75), (3, 9)), num_heads=8, sinks=True, softcap=3.0, head_dim=80),
    AttentionCase(rows=((1, 300), (17, 90)), num_heads=4, num_kv_heads=1, head_dim=128, block_size=64),
    AttentionCase(rows=((6, 300), (6, 6), (6, 700)), num_heads=8, head_dim=128, block_size=64),
    AttentionCase(rows=((17, 290), (17, 500)), num_heads=4, head_dim=64, window=100, sinks=True),
)
WIDE = (
    AttentionCase(rows=((1, 520), (17, 300)), num_heads=2, num_kv_heads=1, head_dim=256, block_size=64, window=300),
    AttentionCase(rows=((1, 520), (17, 90)), num_heads=8, num_kv_heads=1, head_dim=512, block_size=64),
)


def positive_levels(dtype: torch.dtype) -> list[float]:
    """The values of the codes 0, 1, 2, … from the definition of the format (OCP 8-bit floating point, 5.2)."""
    if dtype == torch.int8:
        return [float(n) for n in range(128)]
    digits, bias = DIGITS[dtype], BIAS[dtype]
    values = []
    for code in range(128):
        exponent, fraction = code >> digits, code & ((1 << digits) - 1)
        if exponent == 0:
            values.append(math.ldexp(fraction, 1 - bias - digits))
        else:
            values.append(math.ldexp((1 << digits) + fraction, exponent - bias - digits))
    return [value for value in values if value <= kv_cache.LARGEST[dtype]]


def nearest(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest level of each number in float64, the one with an even code of two that are equally near."""
    values = torch.tensor(positive_levels(dtype), dtype=torch.float64)
    size = y.double().abs().clamp(max=float(values[-1]))
    above = torch.searchsorted(values, size).clamp(1, len(values) - 1)
    low, high = values[above - 1], values[above]
    down = (size - low < high - size) | ((size - low == high - size) & (above % 2 == 1))
    return torch.where(down, low, high) * y.double().sign()


def step(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance of the levels around each number: the largest error of rounding."""
    if dtype == torch.int8:
        return (scale / 2).expand_as(x)
    smallest = 2.0 ** (1 - BIAS[dtype])
    exponent = (x / scale).abs().clamp(min=smallest).log2().floor()
    return scale * torch.exp2(exponent - DIGITS[dtype] - 1)


def quantized(cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = kv_cache.row_scales(cache, dtype)
    return kv_cache.levels(cache, scale, dtype), scale


def filled(k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, KVScales]:
    """Caches of levels whose scales lie beside each other."""
    (k_levels, k_scale), (v_levels, v_scale) = quantized(k, dtype), quantized(v, dtype)
    return k_levels, v_levels, KVScales(pairs_NGP2=torch.stack((k_scale, v_scale), -1))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_levels_are_the_nearest_ones(dtype: torch.dtype) -> None:
    values = torch.tensor(positive_levels(dtype))
    between = (values[1:] + values[:-1]) / 2
    y = torch.cat((values, between, between * 1.0001, torch.randn(500) * values[-1] / 4, torch.tensor([1e9])))
    y = torch.cat((y, -y))
    levels = kv_cache.levels(y, torch.ones(()), dtype)
    assert torch.equal(levels.double(), nearest(y, dtype))
    assert levels.double().max() == kv_cache.LARGEST[dtype]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_uses_all_levels_and_none_saturates(dtype: torch.dtype) -> None:
    x = torch.randn(200, 64) * torch.logspace(-30, 30, 200)[:, None]
    scale = kv_cache.row_scales(x, dtype)
    largest = (x.abs().amax(-1).double() / scale.double()) / kv_cache.LARGEST[dtype]
    assert largest.max() <= 1 + 2**-22  # as exact as float32
    assert largest.min() >= 1 - 2**-7  # the scale's own rounding
    kept = kv_cache.numbers(kv_cache.levels(x, scale, dtype), scale, torch.float32)
    assert ((kept - x).abs().double() <= step(x.double(), scale.double()[:, None], dtype) * (1 + 1e-6)).all()
    assert kv_cache.row_scales(torch.zeros(1, 8), dtype).item() == 1
    for strange in (torch.inf, -torch.inf, torch.nan):
        assert kv_cache.row_scales(torch.tensor([[1.0, strange]]), dtype).isnan().all()


def test_what_the_formats_can_hold() -> None:
    """E4M3 has a digit more, E5M2 more range. With a scale for each row that is worth something only for numbers that
    are 2^17 times smaller than the row's largest, and int8 is the most exact for numbers of one size."""
    normal, wide = torch.randn(500, 128), torch.randn(500, 128) * torch.logspace(-6, 0, 128)

    def error(x: Tensor, dtype: torch.dtype) -> tuple[float, float]:
        levels, scale = quantized(x, dtype)
        kept = kv_cache.numbers(levels, scale, torch.float32)
        return ((kept - x).norm() / x.norm()).item(), ((kept - x).abs() / x.abs())[:, :16].median().item()

    e4m3, e5m2, int8 = (error(normal, dtype)[0] for dtype in TYPES)
    assert int8 < e4m3 / 2 < e5m2 / 3
    assert 0.02 < e4m3 < 0.03  # rounding to 4 binary digits: 2**-4 / sqrt(3) / about sqrt(2)
    small_e4m3, small_e5m2, small_int8 = (error(wide, dtype)[1] for dtype in TYPES)
    assert small_e5m2 < 0.1 < small_e4m3 <= small_int8 == 1  # the others have lost most of these numbers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["triton", "torch"])
def test_rope_kv_stores_the_levels_of_what_it_would_store(
    name: str, dtype: torch.dtype, fixed: bool, device: str
) -> None:
    """In float32, where implementations round the numbers alike but for some last digits: a level may be the next."""
    on = torch.device(device)
    write = ROPE_KV.choose(Platform.of(on), name)
    for case in (
        RopeKVCase(tokens=7, heads=14, kv_heads=2, head_dim=64, rotary_dim=64, block_size=4),
        RopeKVCase(tokens=6, heads=6, kv_heads=2, head_dim=80, rotary_dim=32, norm=True, v_norm=True),
    ):
        plain, ours = (list(case.inputs(torch.float32, on)[0]) for _ in range(2))
        queries = ROPE_KV.reference(Projected(*plain))
        shape = plain[6].shape
        counter = torch.zeros(1, dtype=torch.int64, device=on)
        if fixed:
            pairs = torch.rand(1, shape[1], 1, 2, device=on).expand(*shape[:3], 2) / kv_cache.LARGEST[dtype] + 1e-9
            pairs = pairs[:1, :, :1].expand(*shape[:3], 2)
        else:
            pairs = torch.full((*shape[:3], 2), torch.nan, dtype=torch.bfloat16, device=on)
        ours[6:8] = (torch.zeros(shape, dtype=dtype, device=on) for _ in range(2))
        scales = KVScales(pairs_NGP2=pairs, saturated_1=counter if fixed else None)
        assert torch.allclose(write(Projected(*ours[:-1], scales)), queries, atol=1e-5)
        saturated = 0
        for cache, number in ((6, 0), (7, 1)):
            x, scale = plain[cache][1:], pairs[1:, ..., number].float()
            seen = ~x.isnan()
            if not fixed:
                expected = kv_cache.row_scales(x, dtype).float()
                rows = seen[..., 0]
                assert (scale[rows] / expected[rows]).log2().abs().max() <= 2**-6  # a bfloat16 further at the most
            saturated += int(((x / scale[..., None]).abs() > kv_cache.LARGEST[dtype]).sum())
            kept = kv_cache.numbers(ours[cache][1:], scale, torch.float32)
            within = x.clamp(-kv_cache.LARGEST[dtype] * scale[..., None], kv_cache.LARGEST[dtype] * scale[..., None])
            worst = step(within.double(), scale.double()[..., None], dtype) * (1 + 1e-4) + 1e-6
            assert ((kept - within).abs() <= worst)[seen].all()
        padding = int((plain[8] == 0).sum())  # these share a place, where only one of them is seen
        assert not fixed or saturated <= counter.item() <= saturated + padding * 2 * shape[1] * shape[3]
        assert not fixed or counter.item() > 0


def is_slow(name: str, case: AttentionCase, dtype: torch.dtype, activations: torch.dtype) -> bool:
    wide = case in WIDE and (dtype != torch.float8_e4m3fn or activations != torch.float16)
    return wide or (name == "triton" and activations != torch.float16)


def numbers_of(caches: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the rows stand for by the oracle's rounding, in float32 (a level times a bfloat16 has few digits)."""
    kept = []
    for cache in caches:
        scale = kv_cache.row_scales(cache, dtype)
        kept.append((nearest(cache.double() / scale.double()[..., None], dtype) * scale.double()[..., None]).float())
    return kept[0], kept[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "case", "dtype", "activations"),
    by_pairs(
        ["triton", "sdpa", "reference"],
        [*CASES, *WIDE],
        TYPES,
        [torch.float32, torch.float16, torch.bfloat16],
        drawn=lambda *case: not is_slow(*case),
    ),
    ids=str,
)
def test_attention_to_levels_is_attention_to_their_numbers(
    name: str, case: AttentionCase, dtype: torch.dtype, activations: torch.dtype, device: str
) -> None:
    """With no number in every cell that no row sees, neither level nor scale."""
    if device == "cpu" and is_slow(name, case, dtype, activations):
        pytest.skip("the interpreter is slow, and these differ little")
    on = torch.device(device)
    q_THD, k, v, batch = case.inputs(torch.float32, on)
    numbers = numbers_of((k.cpu(), v.cpu()), dtype)
    k_levels, v_levels, scales = filled(k, v, dtype)
    seen = torch.zeros(k.shape[0], case.block_size, dtype=torch.bool)
    known = seen_cells(case, batch)
    seen[: len(known)] = known
    for cache in (k_levels, v_levels):
        cache.view(torch.uint8).masked_fill_(~seen[:, None, :, None].to(on), 0x7F)
    scales.pairs_NGP2.masked_fill_(~seen[:, None, :, None].to(on), torch.nan)
    options = case.options(activations, on)
    attend = PAGED_ATTENTION.choose(Platform.of(on), name)
    out = attend(q_THD.to(activations), k_levels, v_levels, batch, **options, scales=scales)
    plain = q_THD.to(activations).float(), *(x.to(on) for x in numbers), batch
    softmax = options["softmax"]
    in_float = Softmax(*(x.float() if isinstance(x, Tensor) else x for x in softmax))
    expected = PAGED_ATTENTION.reference(*plain, softmax=in_float)  # which test_attention.py compares with float64
    assert out.dtype == activations
    assert (out.double() - expected.double()).abs().max().item() <= tolerance(activations)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_error_of_attention_is_within_what_rounding_can_do(dtype: torch.dtype) -> None:
    """In float64: a score moves by at most scale · Σ |q| |Δk|, so a weight by a factor of at most exp(2 δ), and an
    output by that share of the largest value, and by the largest Δv."""
    case = AttentionCase(rows=((1, 90), (9, 40)), head_dim=32)
    q_THD, k, v, batch = case.inputs(torch.float32, torch.device("cpu"))
    k_levels, v_levels, scales = filled(k, v, dtype)
    out = PAGED_ATTENTION.reference(q_THD, k_levels, v_levels, batch, Softmax(case.head_dim**-0.5), scales=scales)
    k_error, v_error = (
        step(x.double(), s.double()[..., None], dtype) for x, s in ((k, scales.k_NGP), (v, scales.v_NGP))
    )
    by_head = q_THD.double().abs().unflatten(1, (case.num_kv_heads, -1))
    delta = case.head_dim**-0.5 * torch.einsum("tghd,ngpd->tghnp", by_head, k_error).max().item()
    bound = math.expm1(2 * delta) * v.abs().max().item() + v_error.max().item()
    worst = (out.double() - dense(case, torch.float32)).abs().max().item()
    assert 0 < worst <= bound
    assert worst < 0.25


@settings(max_examples=15)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 150)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 4, 16, 64]),
    dtype=st.sampled_from(TYPES),
    window=st.sampled_from([None, 9]),
)
def test_any_page_table(
    lengths: list[tuple[int, int]], block_size: int, dtype: torch.dtype, window: int | None
) -> None:
    case = AttentionCase(rows=tuple((new, new + old) for new, old in lengths), block_size=block_size, window=window)
    q_THD, k, v, batch = case.inputs(torch.float32, torch.device("cpu"))
    *levels, scales = filled(k, v, dtype)
    options = case.options(torch.float32, torch.device("cpu"))
    expected = PAGED_ATTENTION.reference(q_THD, *numbers_of((k, v), dtype), batch, **options)
    for name in ("triton", "sdpa"):
        attend = PAGED_ATTENTION.choose(Platform(device_type="cpu"), name)
        out = attend(q_THD, *levels, batch, **options, scales=scales)
        assert (out - expected).abs().max().item() <= tolerance(torch.float32)


DECODES = (
    DecodeCase(lengths=(300, 1, 129, 200), num_heads=6, head_dim=64, rotary_dim=32, norm=True),
    DecodeCase(lengths=(90, 33), num_heads=8, window=30, sinks=True, v_norm=True, values_are_keys=True, norm=True),
    DecodeCase(lengths=(257, 1), num_heads=8, num_kv_heads=1, softcap=5.0, alibi=True, rotary_dim=None, block_size=64),
    DecodeCase(lengths=(90, 52), num_heads=2, num_kv_heads=1, head_dim=512, rotary_dim=512, block_size=64),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "case", "dtype", "given_scales"),
    by_pairs(
        ["triton", "torch"],
        DECODES,
        TYPES,
        [False, True],
        drawn=lambda name, case, dtype, given: case.head_dim < 512 or (dtype == torch.int8 and not given),
    ),
    ids=str,
)
def test_decode_attention_writes_and_reads_levels(
    name: str, case: DecodeCase, dtype: torch.dtype, given_scales: bool, device: str
) -> None:
    """The newest key counts as what its levels stand for, for its own row too. It lies where no number was before."""
    on, results = torch.device(device), []
    if device == "cpu" and case.head_dim == 512 and (given_scales or dtype != torch.int8):
        pytest.skip("the interpreter is slow")
    for which in (name, "reference"):
        projected, batch = case.inputs(torch.float32, on)
        arguments = list(projected)
        places, shape = arguments[8], arguments[6].shape
        *levels, scales = filled(arguments[6], arguments[7], dtype)
        if given_scales:
            largest = torch.linspace(1.0, 2.0, shape[1] * 2, device=on).view(1, shape[1], 1, 2)
            pairs = (largest / kv_cache.LARGEST[dtype])[:1].expand(*shape[:3], 2)
            scales = KVScales(pairs_NGP2=pairs, saturated_1=torch.zeros(1, dtype=torch.int64, device=on))
            levels = [
                kv_cache.levels(x, s, dtype) for x, s in zip(arguments[6:8], (scales.k_NGP, scales.v_NGP), strict=True)
            ]
        else:
            scales.pairs_NGP2[places // shape[2], :, places % shape[2]] = torch.nan
        arguments[6:8] = levels
        attend = DECODE_ATTENTION.choose(Platform.of(on), which)
        projected = Projected(*arguments)._replace(scales=scales)
        out = attend(projected, batch, **case.options(torch.float32, on))
        block, offset = places // shape[2], places % shape[2]
        kept = [
            kv_cache.numbers(
                kv_cache.taken(x, block)[torch.arange(len(block)), :, offset], s[block, :, offset], torch.float32
            )
            for x, s in zip(arguments[6:8], (scales.k_NGP, scales.v_NGP), strict=True)
        ]
        results.append((out, torch.stack(kept), 0 if scales.saturated_1 is None else scales.saturated_1.item()))
    (out, kept, saturated), (expected, expected_kept, expected_saturated) = results
    assert saturated == expected_saturated
    assert not given_scales or saturated > 0
    moved = (kept - expected_kept).abs() > 1e-5 * expected_kept.abs()
    assert moved.float().mean() < 0.02  # a last digit may make a level the next one, which then moves the output
    assert (out - expected).abs().max().item() <= (16e-6 if not moved.any() else 0.05)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_that_share_blocks_read_their_levels_together(dtype: torch.dtype, device: str) -> None:
    on, batch = torch.device(device), BATCHES["odd shapes, a sink, a soft cap"]
    q_THD, k, v, ragged = make(batch, torch.float32, device)
    schedule = schedule_of(batch, ragged)
    assert schedule.cascade is not None
    *levels, scales = filled(k, v, dtype)  # no numbers where no row looks
    options = batch.case.options(torch.float32, on)
    attend = PAGED_ATTENTION.choose(Platform.of(on), "triton")
    out = attend(q_THD, *levels, replace(ragged, schedule=schedule), **options, scales=scales)
    expected = PAGED_ATTENTION.reference(q_THD, *levels, ragged, **options, scales=scales)
    assert (out - expected).abs().max().item() <= tolerance(torch.float32)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_long_rows_are_widened_where_they_fit(dtype: torch.dtype, window: int | None) -> None:
    case = AttentionCase(
        rows=((150, 290), (0, 1), (2, 515), (33, 700)), num_heads=8, head_dim=64, block_size=32, window=window
    )
    q_THD, k, v, batch = case.inputs(torch.float16, torch.device("cpu"))
    *levels, scales = filled(k, v, dtype)
    cache = kv_cache.for_kernels(*levels, scales)
    shape = {"num_tokens": len(q_THD), "tokens_each": 0, "num_heads": 8, "num_kv_heads": 2, "window": window}
    rows_R = (batch.start_R1, batch.kv_len_R, batch.slots_R)
    needed = sum(
        -(-kv // 32) - (0 if window is None else max(0, kv - new - 69) // 32) for new, kv in case.rows if new > 4
    )
    for capacity in (needed, needed - 1):
        schedule = make_schedule(*rows_R, AttentionShape(**shape))
        items = prefill_items(*rows_R, len(q_THD), kv_row_bytes=100, few=schedule.few)
        tiles = schedule.counts_2[1].item()
        schedule = replace(schedule, hopper=items)
        widening = make_widening(batch, schedule, 32, capacity)
        if capacity < needed:  # the other kernel does all of it
            assert (widening.count_1.item(), items.count_1.item(), schedule.counts_2[1].item()) == (0, 0, tiles)
            continue
        assert (widening.count_1.item(), schedule.counts_2[1].item()) == (needed, 0)
        assert items.count_1.item() > 0
        wide = torch.full((capacity, 2, 2, 32, 64), torch.nan, dtype=torch.float16)
        widen(widening, cache, (wide[:, 0], wide[:, 1]), capacity)
        assert wide.isfinite().all()
        numbers = [
            kv_cache.numbers(x, s, torch.float16) for x, s in zip(levels, (scales.k_NGP, scales.v_NGP), strict=True)
        ]
        for row, (new, kv) in enumerate(case.rows):
            slot = batch.slots_R[row]
            for column in range(0 if window is None else max(0, kv - new - 69) // 32, -(-kv // 32) if new > 4 else 0):
                theirs, ours = batch.block_table_SC[slot, column], widening.table_SC[slot, column]
                assert all(torch.equal(wide[ours, i], numbers[i][theirs]) for i in range(2))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_keys_that_are_no_numbers_make_outputs_that_are_none(strange: float, dtype: torch.dtype) -> None:
    """They must not vanish in the rounding: a request that saw them is ended with an error."""
    for name in ("triton", "torch"):
        case = DecodeCase(lengths=(20, 30))
        projected, batch = case.inputs(torch.float32, torch.device("cpu"))
        projected.qkv_TX[1, case.num_heads * case.head_dim + 3] = strange  # of the second row's key
        k, v, scales = filled(projected.k_cache_NGPD, projected.v_cache_NGPD, dtype)
        attend = DECODE_ATTENTION.choose(Platform(device_type="cpu"), name)
        projected = projected._replace(k_cache_NGPD=k, v_cache_NGPD=v, scales=scales)
        out = attend(projected, batch, **case.options(torch.float32, torch.device("cpu")))
        assert out[0].isfinite().all()
        assert out[1, :2].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("blocks", [400, 10])
def test_hopper_attends_to_widened_rows(dtype: torch.dtype, head_dim: int, blocks: int) -> None:
    """With memory for all of them and for few, with lengths that the host knows and that it does not."""
    device = torch.device("cuda")
    if Platform.of(device).arch != "sm_90":
        pytest.skip("not a Hopper GPU")
    case = AttentionCase(
        rows=((300, 700), (1, 90), (129, 129), (1000, 1900)), num_heads=8, head_dim=head_dim, block_size=64
    )
    q_THD, k, v, batch = case.inputs(torch.bfloat16, device)
    *levels, scales = filled(k, v, dtype)
    wide = torch.full((blocks, 2, 2, 64, head_dim), torch.nan, dtype=torch.bfloat16, device=device)
    options = case.options(torch.bfloat16, device)
    expected = PAGED_ATTENTION.reference(q_THD, *levels, batch, **options, scales=scales)
    for known in (batch, replace(batch, num_tokens_R=None, kv_bound_R=None)):
        shape = AttentionShape(
            num_tokens=len(q_THD), tokens_each=0, num_heads=8, num_kv_heads=2, cache_NGPD=wide[:, 0], widened=True
        )
        schedule = make_schedule(batch.start_R1, batch.kv_len_R, batch.slots_R, shape)
        assert schedule.hopper is not None
        filled_batch = replace(known, schedule=schedule, wide=(wide[:, 0], wide[:, 1]), derived={})
        attend = PAGED_ATTENTION.choose(Platform.of(device), "triton")
        for _ in range(2):  # two layers
            out = attend(q_THD, *levels, filled_batch, **options, scales=scales)
            assert (out.double() - expected.double()).abs().max().item() <= 2 * tolerance(torch.bfloat16)

"""The search of cuts.py on a GPU: one launch a round, and two for its end.

A launch of a round first finds the digit that the round before it brought: every program reads what all ranks told of
its row. Then it adds its tokens to this round's numbers, by atomics on integers. In the first round most tokens lie
below a floor beyond which no row is cut. These only count for the row's mass, so their sums are made first.

Legend:
    R  rows
    U  tokens of this rank's part of the vocabulary, padding included
    N  ranks
    J  tiles of this rank's part, of which each tells its largest and its least logit
    M  such tiles of all ranks
    T  tokens of a tile
    B  values of a digit
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.base.rows import Feature
from ridgeline.kernels.sampling.bracket import stats_kernel
from ridgeline.kernels.sampling.cut_digits import (
    KNOWN,
    PLACES,
    away_of,
    floor_of,
    is_searching,
    known_before,
    note,
    parameters,
    place_of,
    range_of,
    units_of,
)
from ridgeline.kernels.sampling.cut_search import Cut
from ridgeline.kernels.sampling.draw import LEAST, bits_per_logit
from ridgeline.kernels.sampling.finish import UNIT
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.kernels.sampling.triton import columns_of, flags_of, strides_of

TOP_TILE = 1024  # small, since k tiles are needed to bound where the k-th token is
TILE = 4096


def cut_begin(
    logits_RU: Tensor,
    tables: SamplingTables,
    slots_R: Tensor,
    position_R: Tensor,
    features: Feature,
    first: int,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Compute `cuts.cut_begin`."""
    (rows, each), device = logits_RU.shape, logits_RU.device
    tiles, flags = triton.cdiv(each, TOP_TILE), flags_of(tables, features)
    source_RU = logits_RU
    if any(flags.values()):
        source_RU = torch.empty(rows, each, dtype=torch.float32, device=device)
    range_RJ = torch.empty(rows, 2 * tiles, dtype=torch.float32, device=device)
    stats_kernel[(tiles, rows)](
        logits_RU, slots_R, position_R, tables.temperature_S, *columns_of(tables), source_RU, range_RJ, range_RJ,
        count, first, logits_RU.stride(0), source_RU.stride(0), *strides_of(tables), TILE=TOP_TILE, **flags,
        RANGES=True, num_warps=4, **launch_options(device),
    )  # fmt: skip
    return source_RU, range_RJ


def cut_round(source_RU: Tensor, cut: Cut, number: int) -> Tensor:
    """Compute `cuts.cut_round`."""
    words_RX, known_DRS = cut.words_DRX[number], cut.known_DRS
    digits_kernel[(triton.cdiv(source_RU.shape[1], TILE), len(source_RU))](
        *_search(source_RU, cut, number), known_DRS[number], words_RX.view(torch.int64), words_RX[:, 2 << cut.bits :],
        *_sizes(source_RU, cut, number), **_constants(cut), TILE=TILE, num_warps=8,
        **launch_options(source_RU.device),
    )  # fmt: skip
    return words_RX


def cut_end(source_RU: Tensor, cut: Cut) -> Tensor:
    """Compute `cuts.cut_end`."""
    rows, each = source_RU.shape
    tiles, number, device = triton.cdiv(each, TILE), cut.rounds, source_RU.device
    ties_RJ = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    kept_RU, options = torch.empty_like(source_RU, memory_format=torch.contiguous_format), launch_options(device)
    ties_kernel[(tiles, rows)](
        *_search(source_RU, cut, number), cut.known_DRS[number], ties_RJ, *_sizes(source_RU, cut, number),
        **_constants(cut), TILE=TILE, num_warps=8, **options,
    )  # fmt: skip
    tables = cut.tables
    mean_R = cut.range_RM2 if cut.mean_R is None else cut.mean_R
    keep_kernel[(tiles, rows)](
        source_RU, cut.slots_R, tables.temperature_S, tables.min_p_S, cut.range_RM2, mean_R, cut.known_DRS[number],
        ties_RJ, kept_RU, cut.count, cut.range_RM2.shape[1], tiles, source_RU.stride(0), kept_RU.stride(0),
        tables.temperature_S.stride(0), TOPS=triton.next_power_of_2(cut.range_RM2.shape[1]),
        TILES=triton.next_power_of_2(tiles), TYPICAL=cut.mean_R is not None, TILE=TILE, num_warps=8, **options,
    )  # fmt: skip
    return kept_RU


def _search(source_RU: Tensor, cut: Cut, number: int) -> tuple[Tensor, ...]:
    """Return the pointers of `known_before`: logits, parameters, what all ranks told last and first, what was known."""
    tables, nothing = cut.tables, cut.range_RM2
    share_S = tables.top_p_S if cut.mean_R is None else tables.typical_p_S
    mean_R = nothing if cut.mean_R is None else cut.mean_R
    last, first = (cut.told[number - 1], cut.told[0]) if number else (cut.words_DRX[0], cut.words_DRX[0])
    told = [words.view(torch.int64) for words in (last, first)]
    counts = [words.view(-1)[2 << cut.bits :] for words in (last, first)]
    before = cut.known_DRS[max(number - 1, 0)]
    asked = tables.temperature_S, share_S, tables.top_k_S
    return source_RU, cut.slots_R, *asked, cut.range_RM2, mean_R, told[0], counts[0], told[1], counts[1], before


def _sizes(source_RU: Tensor, cut: Cut, number: int) -> tuple[int, ...]:
    tables = cut.tables
    strides = source_RU.stride(0), tables.top_k_S.stride(0), tables.temperature_S.stride(0)
    return cut.count, cut.size, cut.range_RM2.shape[1], *strides, number, cut.rank


def _constants(cut: Cut) -> dict[str, int | bool]:
    tops = triton.next_power_of_2(cut.range_RM2.shape[1])
    return {"TOPS": tops, "BITS": cut.bits, "RANKS": cut.ranks, "TYPICAL": cut.mean_R is not None}


@triton.jit(do_not_specialize=["number", "rank", "M"])
def digits_kernel(
    source_ptr, slots_ptr, temperature_ptr, top_p_ptr, top_k_ptr, range_ptr, mean_ptr, told_mass_ptr, told_count_ptr,
    first_mass_ptr, first_count_ptr, before_ptr, known_ptr, mass_ptr, tally_ptr, U, V, M, source_stride, int_stride,
    float_stride, number, rank, TOPS: tl.constexpr, BITS: tl.constexpr, RANKS: tl.constexpr, TYPICAL: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add a tile's tokens to a row's numbers, which are 0 before. Grid (J, R)."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    B: tl.constexpr = 1 << BITS
    LEVELS: tl.constexpr = 24 // BITS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot * float_stride)
    top_k, top_p = parameters(slot, temperature, top_k_ptr, top_p_ptr, int_stride, float_stride, V, TYPICAL)
    place, count, mass, goal, ranked, quota, own = known_before(
        row, top_k, top_p, told_mass_ptr, told_count_ptr, first_mass_ptr, first_count_ptr, before_ptr, number, rank,
        BITS, RANKS, TYPICAL,
    )  # fmt: skip
    if tile == 0:
        note(known_ptr + row * KNOWN, place, count, mass, goal, ranked, quota, own)
    searching = is_searching(top_k, top_p, number, LEVELS)
    if searching:
        scale = bits_per_logit(temperature)
        # One token a thread, as atomics have it: vectors would be turned about in shared memory three times
        token_T = tl.max_contiguous(tile * TILE + tl.arange(0, TILE), 1)
        top_M, top, least = range_of(range_ptr, row, M, TOPS)
        units = units_of(top, least, scale)
        x_T = tl.load(source_ptr + row * source_stride + token_T, mask=token_T < U, other=float("-inf")).to(tl.float32)
        mass_T = (tl.exp2(-away_of(x_T, top) * scale) * UNIT).to(tl.int64)
        place_T = place_of(x_T, top, units, mean_ptr + row, TYPICAL)
        level = tl.where(number < LEVELS, number, number - LEVELS + 1)
        shift = BITS * (LEVELS - 1 - level)
        counts_T = (x_T >= LEAST) & (((place_T >> shift) >> BITS).to(tl.int64) == place)
        digit_T = (place_T >> shift) & (B - 1)
        weighs_T = counts_T & (digit_T >= tl.where(top_p < 1.0, 0, B))
        tallies_T = counts_T & (digit_T >= tl.where((top_k > 0) | (level == LEVELS - 1), 0, B))
        mass_ptr += row * (3 * B // 2)
        tally_ptr += row * (3 * B)
        if number == 0 and not TYPICAL:
            floor = floor_of(top_M, tl.arange(0, TOPS) < M, top, scale, units, top_k, top_p, V, BITS)
            beyond_T, within_T = counts_T & (digit_T > floor), digit_T <= floor
            weighs_T, tallies_T = weighs_T & within_T, tallies_T & within_T
            tl.atomic_add(mass_ptr + B - 1, tl.sum(tl.where(beyond_T, mass_T, 0), axis=0), sem="relaxed")
            tl.atomic_add(tally_ptr + B - 1, tl.sum(beyond_T.to(tl.int32), axis=0), sem="relaxed")
        tl.atomic_add(mass_ptr + digit_T, mass_T, mask=weighs_T, sem="relaxed")
        tl.atomic_add(tally_ptr + digit_T, tallies_T.to(tl.int32), mask=tallies_T, sem="relaxed")


@triton.jit(do_not_specialize=["number", "rank", "M"])
def ties_kernel(
    source_ptr, slots_ptr, temperature_ptr, top_p_ptr, top_k_ptr, range_ptr, mean_ptr, told_mass_ptr, told_count_ptr,
    first_mass_ptr, first_count_ptr, before_ptr, known_ptr, ties_ptr, U, V, M, source_stride, int_stride,
    float_stride, number, rank, TOPS: tl.constexpr, BITS: tl.constexpr, RANKS: tl.constexpr, TYPICAL: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Note where each row is cut, and count a tile's tokens at that place. Grid (J, R)."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot * float_stride)
    top_k, top_p = parameters(slot, temperature, top_k_ptr, top_p_ptr, int_stride, float_stride, V, TYPICAL)
    place, count, mass, goal, ranked, quota, own = known_before(
        row, top_k, top_p, told_mass_ptr, told_count_ptr, first_mass_ptr, first_count_ptr, before_ptr, number, rank,
        BITS, RANKS, TYPICAL,
    )  # fmt: skip
    if tile == 0:
        note(known_ptr + row * KNOWN, place, count, mass, goal, ranked, quota, own)
    ties = tl.zeros((), tl.int32)
    if place < PLACES:
        token_T = tile * TILE + tl.arange(0, TILE)
        _, top, least = range_of(range_ptr, row, M, TOPS)
        units = units_of(top, least, bits_per_logit(temperature))
        x_T = tl.load(source_ptr + row * source_stride + token_T, mask=token_T < U, other=float("-inf")).to(tl.float32)
        place_T = place_of(x_T, top, units, mean_ptr + row, TYPICAL)
        ties = tl.sum(((x_T >= LEAST) & (place_T.to(tl.int64) == place)).to(tl.int32), axis=0)
    tl.store(ties_ptr + row * tl.num_programs(0) + tile, ties)


@triton.jit(do_not_specialize=["M"])
def keep_kernel(
    source_ptr, slots_ptr, temperature_ptr, min_p_ptr, range_ptr, mean_ptr, known_ptr, ties_ptr, kept_ptr, U, M, J,
    source_stride, kept_stride, float_stride, TOPS: tl.constexpr, TILES: tl.constexpr, TYPICAL: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the logits of a tile, -inf for tokens that go. Grid (J, R)."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot * float_stride)
    place, own = tl.load(known_ptr + row * KNOWN), tl.load(known_ptr + row * KNOWN + 6)
    j = tl.arange(0, TILES)
    ahead = tl.sum(tl.load(ties_ptr + row * J + j, mask=j < tile, other=0), axis=0)
    _, top, least = range_of(range_ptr, row, M, TOPS)
    token_T = tile * TILE + tl.arange(0, TILE)
    x_T = tl.load(source_ptr + row * source_stride + token_T, mask=token_T < U, other=float("-inf")).to(tl.float32)
    scale = bits_per_logit(temperature)
    place_T = place_of(x_T, top, units_of(top, least, scale), mean_ptr + row, TYPICAL).to(tl.int64)
    tied_T = (x_T >= LEAST) & (place_T == place)
    stays_T = (place_T < place) | (tied_T & (ahead + tl.cumsum(tied_T.to(tl.int32), axis=0) <= own))
    if not TYPICAL:
        min_p = tl.where(temperature > 0, tl.load(min_p_ptr + slot * float_stride), 0.0)
        stays_T = stays_T & (tl.exp2(-away_of(x_T, top) * scale) >= min_p)
    stays_T = stays_T | (x_T != x_T)
    tl.store(kept_ptr + row * kept_stride + token_T, tl.where(stays_T, x_T, float("-inf")), mask=token_T < U)

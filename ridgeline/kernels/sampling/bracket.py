"""A bracket around the place where a row's filter will cut, to within a few thousand tokens. One read gives the row's
total mass, then a sample of the row gives the bracket.

`stats_kernel` also stores adjusted logits, which later passes read.

Legend:
    R  rows
    V  vocabulary
    J  tiles of a row
    Z  tokens sampled of a row
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.sampling.adjust import adjusted
from ridgeline.kernels.sampling.draw import APART, LEAST, WIDTH, bits_per_logit

RUN = tl.constexpr(16)  # neighbours that are sampled together: one sector of 32 bytes
ROUNDS = tl.constexpr(10)  # steps of bisection between the sample's least and the row's largest logit
RANKED = tl.constexpr(1e-30)  # a scale that makes any difference of logits too small to count, but leaves -inf
DEVIATIONS = tl.constexpr(4.0)  # standard deviations by which a sample may be off before a row takes the slow way


@triton.jit(do_not_specialize=["first_token"])
def stats_kernel(
    logits_ptr,
    slots_ptr,
    position_ptr,
    temperature_ptr,
    bias_ids_ptr,
    bias_ptr,
    stop_ids_ptr,
    count_ptr,
    seen_ptr,
    min_len_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    adjusted_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    V,
    first_token,
    logits_stride,
    adjusted_stride,
    bias_ids_stride,
    bias_stride,
    stop_stride,
    count_stride,
    seen_stride,
    int_stride,
    float_stride,
    TILE: tl.constexpr,
    BIAS_WIDTH: tl.constexpr,
    STOP_WIDTH: tl.constexpr,
    PENALTY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the largest logit of each tile and Σ exp((x - largest) / temperature). Grid (J, R).

    A row's V logits are those of the tokens from `first_token` on."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = tile * TILE
    token = first + tl.arange(0, TILE)
    valid = token < V
    if PDL:
        gdc_wait()
    x = tl.load(logits_ptr + row * logits_stride + token, mask=valid, other=float("-inf")).to(tl.float32)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot * float_stride)
    if PDL:
        gdc_launch_dependents()
    if BIAS_WIDTH + STOP_WIDTH > 0 or PENALTY:
        x = adjusted(
            x,
            token + first_token,
            first + first_token,
            valid,
            slot,
            tl.load(position_ptr + row),
            bias_ids_ptr,
            bias_ptr,
            stop_ids_ptr,
            count_ptr,
            seen_ptr,
            min_len_ptr,
            repetition_ptr,
            presence_ptr,
            frequency_ptr,
            bias_ids_stride,
            bias_stride,
            stop_stride,
            count_stride,
            seen_stride,
            int_stride,
            float_stride,
            TILE,
            BIAS_WIDTH,
            STOP_WIDTH,
            PENALTY,
        )
        tl.store(adjusted_ptr + row * adjusted_stride + token, x, mask=valid)
    scale = bits_per_logit(temperature)
    largest = tl.maximum(tl.max(x, axis=0), LEAST)
    place = row * tl.num_programs(0) + tile
    tl.store(tile_max_ptr + place, largest)
    tl.store(tile_sum_ptr + place, tl.sum(tl.exp2((x - largest) * scale), axis=0))


@triton.jit
def bracket_kernel(
    source_ptr,
    slots_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    bracket_ptr,
    num_candidates_ptr,
    V,
    J,
    source_stride,
    int_stride,
    float_stride,
    TILES: tl.constexpr,
    SAMPLE: tl.constexpr,
    RESERVE: tl.constexpr,
    CAPACITY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write bracket_R8: lo, hi, the largest logit, the total mass, the floor, the bits per logit. Set the count of
    candidates to 0. Grid (R,).

    A sample says that tokens above hi will stay and tokens below lo will go; `finish` checks it exactly. hi = inf means
    that few tokens lie above lo, so they are listed. lo = hi = inf means that the row has neither top-k nor top-p. With
    SAMPLE 0 all tokens may be listed. Below the floor nothing stays; min-p counts for it too. Masses are summed with
    the bits per logit given here. Where ranks decide these are next to 0, so that every token counts as one.
    """
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, TILES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    max_J = tl.load(tile_max_ptr + row * J + j, mask=j < J, other=LEAST)
    sum_J = tl.load(tile_sum_ptr + row * J + j, mask=j < J, other=0.0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot * float_stride)
    top_p = tl.load(top_p_ptr + slot * float_stride)
    top_k = tl.load(top_k_ptr + slot * int_stride)
    scale = bits_per_logit(temperature)
    largest = tl.max(max_J, axis=0)
    total = tl.sum(sum_J * tl.exp2((max_J - largest) * scale), axis=0)
    by_rank = (top_k > 0) & (top_k < V)
    lo, hi = float("inf"), float("inf")
    floor = LEAST
    if (temperature > 0) & (by_rank | (top_p < 1.0)):
        lo, hi = LEAST, float("inf")
        if SAMPLE > 0:
            z = tl.arange(0, SAMPLE)
            runs: tl.constexpr = SAMPLE // RUN
            token_Z = z // RUN * (V // runs) + z % RUN
            x_Z = tl.load(source_ptr + row * source_stride + token_Z).to(tl.float32)
            weight_Z = tl.exp2((x_Z - largest) * scale)
            ratio = V / SAMPLE
            rank = 1.0 * RESERVE
            tail = (1.0 - top_p) * total / ratio
            if by_rank:
                tail = float("inf")
                rank = tl.maximum(_beyond(top_k / ratio, DEVIATIONS / 2), rank)
            lo, above = _low(x_Z, weight_Z, largest, scale, rank, tail)
            if above * ratio > CAPACITY / 2:
                if by_rank & (top_p >= 1.0):
                    hi = _high(x_Z, weight_Z, largest, scale, _beyond(top_k / ratio, -DEVIATIONS / 2), 0.0)
                    hi = tl.minimum(hi, largest)  # no token is certain to stay, but they are too many for a list
                if by_rank == 0:
                    hi = _high(x_Z, weight_Z, largest, scale, 1.0 * SAMPLE, tail)
                    hi = tl.minimum(hi, largest)
    min_p = tl.load(min_p_ptr + slot * float_stride)
    if lo < float("inf"):
        floor = lo
    if min_p > 0:  # `finish` applies it exactly
        floor = tl.maximum(floor, largest + (tl.log2(min_p) - 0.01) / scale)
    bracket_ptr += row * WIDTH
    tl.store(bracket_ptr, lo)
    tl.store(bracket_ptr + 1, hi)
    tl.store(bracket_ptr + 2, largest)
    tl.store(bracket_ptr + 3, total)
    tl.store(bracket_ptr + 4, floor)
    tl.store(bracket_ptr + 5, tl.where(by_rank, RANKED, scale))
    tl.store(num_candidates_ptr + row * APART, 0)


@triton.jit
def _beyond(expected, half_deviations: tl.constexpr):
    """Return the least c with c - d √c ≥ expected, or for d < 0 the greatest c with c + |d| √c ≤ expected. d = 2
    half_deviations."""
    root = tl.sqrt(expected + half_deviations * half_deviations) + half_deviations
    return tl.where(root > 0, root * root, 0.0)


@triton.jit
def _tail(x_Z, weight_Z, pivot, largest, scale):
    """Return the mass of the sample below `pivot`, its possible error, and the count of tokens from `pivot` on.

    The error counts one more token at the pivot, which guards against a tail of which the sample saw nothing. The three
    sums share one reduction, since barriers cost time.
    """
    below_Z = tl.where(x_Z < pivot, weight_Z, 0.0)
    above_Z = (x_Z >= pivot).to(tl.float32)
    sums = tl.sum(tl.join(tl.join(below_Z, below_Z * below_Z), tl.join(above_Z, above_Z)), axis=0)
    masses, counts = tl.split(sums)
    mass, squares = tl.split(masses)
    above, _ = tl.split(counts)
    at = tl.exp2((pivot - largest) * scale)
    return mass, tl.sqrt(squares + 2.0 * at * at) * DEVIATIONS, above


@triton.jit
def _low(x_Z, weight_Z, largest, scale, rank, tail):
    """Return (pivot, count): the largest pivot that has `rank` sampled tokens from it on and a mass below it that is
    surely ≤ tail, and its count. If there is none, the pivot lies below every token."""
    a = tl.min(tl.where(x_Z > LEAST, x_Z, largest), axis=0)
    b = largest
    lo = LEAST
    lo_above = tl.sum((x_Z > LEAST).to(tl.float32), axis=0)
    for _ in range(ROUNDS):
        pivot = 0.5 * a + 0.5 * b
        mass, doubt, above = _tail(x_Z, weight_Z, pivot, largest, scale)
        ok = (above >= rank) & (mass + doubt <= tail)
        a = tl.where(ok, pivot, a)
        b = tl.where(ok, b, pivot)
        lo = tl.where(ok, pivot, lo)
        lo_above = tl.where(ok, above, lo_above)
    return lo, lo_above


@triton.jit
def _high(x_Z, weight_Z, largest, scale, rank, tail):
    """Return the smallest pivot that has at most `rank` sampled tokens from it on and a mass below it that is surely ≥
    tail, or inf."""
    a = tl.min(tl.where(x_Z > LEAST, x_Z, largest), axis=0)
    b = largest
    hi = float("inf")
    for _ in range(ROUNDS):
        pivot = 0.5 * a + 0.5 * b
        mass, doubt, above = _tail(x_Z, weight_Z, pivot, largest, scale)
        ok = (above <= rank) & ((mass - doubt >= tail) | (tail <= 0.0))
        a = tl.where(ok, a, pivot)
        b = tl.where(ok, pivot, b)
        hi = tl.where(ok, pivot, hi)
    return hi

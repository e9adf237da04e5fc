"""One read of the logits: how good a token of every tile can be, and for filtered rows the tokens still in doubt.

Legend: N rows, V vocabulary, J tiles of a row, Q groups of four tokens in a tile, C candidates kept of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.sampling.adjust import adjusted
from ridgeline.kernels.sampling.noise import log2_below_groups

LOG2E = tl.constexpr(1.4426950408889634)
APART = tl.constexpr(32)  # rows' counters are so many int32 apart: each in its own cache line
LEAST = tl.constexpr(-3.4e38)  # below it only -inf: tokens that are forbidden
COLDEST = tl.constexpr(1e-30)  # lower temperatures count as this one: no difference between logits survives it


@triton.jit
def draw_kernel(
    logits_ptr,
    mask_ptr,
    slots_ptr,
    position_ptr,
    temperature_ptr,
    min_p_ptr,
    seed_ptr,
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
    bracket_ptr,
    num_candidates_ptr,
    candidate_ptr,
    candidate_id_ptr,
    best_ptr,
    best_id_ptr,
    sure_mass_ptr,
    sure_count_ptr,
    V,
    logits_stride,
    mask_stride,
    adjusted_stride,
    bias_ids_stride,
    bias_stride,
    stop_stride,
    count_stride,
    seen_stride,
    int_stride,
    float_stride,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    BIAS_WIDTH: tl.constexpr,
    STOP_WIDTH: tl.constexpr,
    MASK: tl.constexpr,
    PENALTY: tl.constexpr,
    RANDOM: tl.constexpr,
    FILTER: tl.constexpr,
    APPROX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (J, N). Without RANDOM best_NJ and best_id_NJ: a tile's largest logit. With RANDOM best_NJ alone: a bound of
    its noised logits, in bits (of greedy rows the largest logit). FILTER looks only at what may stay, and writes
    candidates_NC between the row's bracket (lo, hi), and mass and count of what lies above hi."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    Q: tl.constexpr = TILE // 4
    first = tile * TILE
    group_Q = tile * Q + tl.arange(0, Q)
    token = group_Q[:, None] * 4 + tl.arange(0, 4)[None, :]
    valid = token < V
    if PDL:
        gdc_wait()
    x = tl.load(logits_ptr + row * logits_stride + token, mask=valid, other=float("-inf")).to(tl.float32)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(position_ptr + row)
    if RANDOM:
        temperature = tl.load(temperature_ptr + slot * float_stride)
    if PDL:
        gdc_launch_dependents()
    if BIAS_WIDTH + STOP_WIDTH > 0 or MASK or PENALTY:
        x = adjusted(
            x,
            token,
            first,
            valid,
            slot,
            position,
            mask_ptr + row * mask_stride,
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
            MASK,
            PENALTY,
        )
        if RANDOM:  # a second look must find what this one saw
            tl.store(adjusted_ptr + row * adjusted_stride + token, x, mask=valid)
    place = row * tl.num_programs(0) + tile
    if FILTER:
        lo, hi = tl.load(bracket_ptr + row * 4), tl.load(bracket_ptr + row * 4 + 1)
        weight = tl.exp2((x - tl.load(bracket_ptr + row * 4 + 2)) * bits_per_logit(temperature))
        if lo <= hi:
            _divide(
                x, token, weight, lo, hi, num_candidates_ptr + row * APART, candidate_ptr + row * CAPACITY,
                candidate_id_ptr + row * CAPACITY, sure_mass_ptr + place, sure_count_ptr + place, CAPACITY,
            )  # fmt: skip
            x = tl.where(x >= lo, x, float("-inf"))
        x = tl.where(weight >= tl.load(min_p_ptr + slot * float_stride), x, float("-inf"))
    if RANDOM:
        wanted = temperature > 0
        if FILTER:
            wanted = wanted & (tl.max(x) > float("-inf"))
        if wanted:
            seed = tl.load(seed_ptr + slot * int_stride)
            x = x * bits_per_logit(temperature) - log2_below_groups(group_Q, position, seed, Q, APPROX)
    best = tl.max(x)
    tl.store(best_ptr + place, best)
    if not RANDOM:
        tl.store(best_id_ptr + place, tl.min(tl.where(x == best, token, 0x7FFFFFFF)))


@triton.jit
def bits_per_logit(temperature):
    """What turns logits into binary logarithms of probabilities; 1 for greedy rows."""
    return tl.where(temperature > 0, LOG2E / tl.maximum(temperature, COLDEST), 1.0)


@triton.jit
def _divide(
    x, token, weight, lo, hi, count_ptr, candidate_ptr, id_ptr, sure_mass_ptr, sure_count_ptr,
    CAPACITY: tl.constexpr,
):  # fmt: skip
    """Mass and count of what lies above hi; what lies in [lo, hi] goes onto the row's list, tile by tile in any order:
    one atomic a tile reserves the places."""
    if hi < float("inf"):
        tl.store(sure_mass_ptr, tl.sum(tl.where(x > hi, weight, 0.0)))
        tl.store(sure_count_ptr, tl.sum((x > hi).to(tl.int32)))
    else:
        tl.store(sure_mass_ptr, 0.0)
        tl.store(sure_count_ptr, 0)
    doubtful_Q4 = ((x >= lo) & (x <= hi)).to(tl.int32)
    doubtful_Q = tl.sum(doubtful_Q4, axis=1)
    number = tl.sum(doubtful_Q, axis=0)
    if number > 0:
        before_Q = tl.atomic_add(count_ptr, number, sem="relaxed") + tl.cumsum(doubtful_Q, axis=0) - doubtful_Q
        place_Q4 = before_Q[:, None] + tl.cumsum(doubtful_Q4, axis=1) - doubtful_Q4
        fits_Q4 = (doubtful_Q4 > 0) & (place_Q4 < CAPACITY)
        tl.store(candidate_ptr + place_Q4, x, mask=fits_Q4)
        tl.store(id_ptr + place_Q4, token, mask=fits_Q4)

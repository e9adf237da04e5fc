"""One read of the logits: the best (noised) token of every tile, and for filtered rows the tokens still in doubt.

Legend: N rows, V vocabulary, J tiles of a row, Q groups of four tokens in a tile, C candidates kept of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.sampling.adjust import adjusted
from ridgeline.kernels.sampling.noise import gumbel_of_groups

LOG2E = tl.constexpr(1.4426950408889634)
APART = tl.constexpr(32)  # rows' counters are so many int32 apart: each in its own cache line
LEAST = tl.constexpr(-3.4e38)  # below it only -inf: tokens that are forbidden


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
    """Grid (J, N). Writes best_NJ, best_id_NJ; with FILTER also candidates_NC between the row's bracket (lo, hi), and
    mass and count of what lies above hi, which stays for certain and is drawn from here."""
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
    temperature = 0.0
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
    place = row * tl.num_programs(0) + tile
    hi = float("-inf")
    if FILTER:
        lo, hi = tl.load(bracket_ptr + row * 4), tl.load(bracket_ptr + row * 4 + 1)
        top = tl.load(bracket_ptr + row * 4 + 2)
        if lo <= hi:
            _keep_candidates(
                x, token, lo, hi, num_candidates_ptr + row * APART, candidate_ptr + row * CAPACITY,
                candidate_id_ptr + row * CAPACITY, CAPACITY,
            )  # fmt: skip
    if hi < float("inf"):  # else nothing is certain: only candidates
        if FILTER:
            scale = 1.0 / tl.where(temperature > 0, temperature, 1.0) * LOG2E
            weight = tl.exp2((x - top) * scale)
            tl.store(sure_mass_ptr + place, tl.sum(tl.where(x > hi, weight, 0.0)))
            tl.store(sure_count_ptr + place, tl.sum((x > hi).to(tl.int32)))
            stays = (x > hi) & (weight >= tl.load(min_p_ptr + slot * float_stride))
            x = tl.where(stays, x, float("-inf"))
        if RANDOM and temperature > 0:
            seed = tl.load(seed_ptr + slot * int_stride)
            x = x * (1.0 / temperature) + gumbel_of_groups(group_Q, position, seed, Q, APPROX)
        best = tl.max(x)
        tl.store(best_ptr + place, best)
        tl.store(best_id_ptr + place, tl.min(tl.where(x == best, token, 0x7FFFFFFF)))
    else:
        tl.store(best_ptr + place, float("-inf"))
        tl.store(best_id_ptr + place, first)
        tl.store(sure_mass_ptr + place, 0.0)
        tl.store(sure_count_ptr + place, 0)


@triton.jit
def _keep_candidates(x, token, lo, hi, count_ptr, candidate_ptr, id_ptr, CAPACITY: tl.constexpr):
    """Append the tile's x in [lo, hi] to the row's list, in any order. They are so few among many that one atomic for
    each costs less than counting them first."""
    chosen = (x >= lo) & (x <= hi)
    place = tl.atomic_add(count_ptr + token * 0, 1, mask=chosen, sem="relaxed")
    fits = chosen & (place < CAPACITY)
    tl.store(candidate_ptr + place, x, mask=fits)
    tl.store(id_ptr + place, token, mask=fits)

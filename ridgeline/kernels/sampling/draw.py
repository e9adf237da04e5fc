"""One read of the logits. It finds how good a token of every tile can be and, for filtered rows, how much mass lies
where.

Legend:
    R  rows
    V  vocabulary
    J  tiles of a row
    Q  groups of four tokens in a tile
    C  candidates kept of a row
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.sampling.adjust import adjusted
from ridgeline.kernels.sampling.noise import log2_below_groups

LOG2E = tl.constexpr(1.4426950408889634)
APART = tl.constexpr(32)  # rows' counters are so many int32 apart, so that each has its own cache line
LEAST = tl.constexpr(-3.4e38)  # only -inf, the logit of forbidden tokens, is less
WIDTH = tl.constexpr(8)  # numbers that `bracket_kernel` writes for a row
COLDEST = tl.constexpr(1e-30)  # lower temperatures count as this one, with which the largest logit always wins


@triton.jit(do_not_specialize=["first_token"])
def draw_kernel(
    logits_ptr,
    slots_ptr,
    position_ptr,
    temperature_ptr,
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
    best_ptr,
    best_id_ptr,
    sure_ptr,
    reach_ptr,
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
    CAPACITY: tl.constexpr,
    BIAS_WIDTH: tl.constexpr,
    STOP_WIDTH: tl.constexpr,
    PENALTY: tl.constexpr,
    RANDOM: tl.constexpr,
    FILTER: tl.constexpr,
    APPROX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Bound what every tile can give. Grid (R, J): programs that run together belong to many rows and do not wait for
    one counter.

    A row's V logits are those of the tokens from `first_token` on, a multiple of 4. Ids that are written count from
    there.

    Without RANDOM it writes best_RJ and best_id_RJ, a tile's largest logit. With RANDOM it writes best_RJ alone, a
    bound of the tile's noised logits, in bits (for greedy rows the largest logit).

    With FILTER it looks only at tokens that may stay. It writes sure_RJ and reach_RJ: how much of the tile lies above
    the row's bracket, and how much lies from its floor on. If the bracket has no high end, candidates_RC lists the
    tokens in it instead.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
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
    if BIAS_WIDTH + STOP_WIDTH > 0 or PENALTY:
        x = adjusted(
            x,
            token + first_token,
            first + first_token,
            valid,
            slot,
            position,
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
        if RANDOM:  # `finish` must see the same logits
            tl.store(adjusted_ptr + row * adjusted_stride + token, x, mask=valid)
    place = row * tl.num_programs(1) + tile
    if RANDOM:
        wanted = temperature > 0
    if FILTER:
        bracket_ptr += row * WIDTH
        lo, hi = tl.load(bracket_ptr), tl.load(bracket_ptr + 1)
        if (lo < float("inf")) & (hi == float("inf")):
            _list(x, token, lo, num_candidates_ptr + row * APART, candidate_ptr + row * CAPACITY, CAPACITY)
            wanted = False  # `finish` draws from the list
        x = tl.where(x >= tl.load(bracket_ptr + 4), x, float("-inf"))
        if hi < float("inf"):
            amount = tl.exp2((x - tl.load(bracket_ptr + 2)) * tl.load(bracket_ptr + 5))
            tl.store(reach_ptr + place, tl.sum(amount))
            tl.store(sure_ptr + place, tl.sum(tl.where(x > hi, amount, 0.0)))
    if RANDOM and wanted:
        seed = tl.load(seed_ptr + slot * int_stride)
        x = x * bits_per_logit(temperature) - log2_below_groups(group_Q + first_token // 4, position, seed, Q, APPROX)
    best = tl.max(x)
    tl.store(best_ptr + place, best)
    if not RANDOM:
        tl.store(best_id_ptr + place, tl.min(tl.where(x == best, token, 0x7FFFFFFF)))


@triton.jit
def bits_per_logit(temperature):
    """Return the factor that turns logits into binary logarithms of probabilities; 1 for greedy rows."""
    return tl.where(temperature > 0, LOG2E / tl.maximum(temperature, COLDEST), 1.0)


@triton.jit
def _list(x, token, lo, count_ptr, candidate_ptr, CAPACITY: tl.constexpr):
    """Append the logits x [Q, 4] that are at least `lo`, with their ids, to the row's list, in any order.

    They are few among many, so one atomic for every group that holds some costs less than counting the tile's. Entries
    that do not fit are counted but not stored.
    """
    chosen_Q4 = x >= lo
    one_Q4 = chosen_Q4.to(tl.int32)
    one_Q = tl.sum(one_Q4, axis=1)
    place_Q = tl.atomic_add(count_ptr + one_Q * 0, one_Q, mask=one_Q > 0, sem="relaxed")
    place_Q4 = place_Q[:, None] + tl.cumsum(one_Q4, axis=1) - one_Q4
    entry_Q4 = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token.to(tl.int64)
    tl.store(candidate_ptr + place_Q4, entry_Q4, mask=chosen_Q4 & (place_Q4 < CAPACITY))

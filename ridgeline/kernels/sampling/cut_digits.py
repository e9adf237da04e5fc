"""The search of cut_search.py as Triton device functions, for one row.

Legend:
    M  tiles of all ranks, each with its largest and its least logit
    T  tokens of a tile
    B  values of a digit
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.sampling.draw import LEAST

PLACES = tl.constexpr(1 << 24)
FURTHEST = tl.constexpr(float((1 << 24) - 1))  # the last place
PER_BIT = tl.constexpr(float(1 << 19))
KNOWN = tl.constexpr(8)  # numbers of a row in `Cut.known_DRS`


@triton.jit
def range_of(range_ptr, row, M, TOPS: tl.constexpr):
    """Return the largest logits of the row's tiles, that of the row, and its least one."""
    m = tl.arange(0, TOPS)
    range_ptr += (row * M + m) * 2
    top_M = tl.load(range_ptr, mask=m < M, other=LEAST)
    return top_M, tl.max(top_M, axis=0), tl.min(tl.load(range_ptr + 1, mask=m < M, other=-LEAST), axis=0)


@triton.jit
def units_of(top, least, scale):
    """Return how many places a logit has: those of 32 bits of probability, or of the whole row if that is less."""
    width = tl.maximum(top - least, 1e-30)
    return tl.where(width * scale < 32.0, tl.div_rn(width * 0.0 + FURTHEST, width), scale * PER_BIT)


@triton.jit
def away_of(x_T, top):
    """Return how far tokens are below the largest logit, which may be infinite."""
    return tl.where(x_T == top, 0.0, top - x_T)


@triton.jit
def place_of(x_T, top, units, mean_ptr, TYPICAL: tl.constexpr):
    """Return the places of tokens: the same numbers in every kernel, since nothing here can be rounded in two ways."""
    away_T = away_of(x_T, top)
    if TYPICAL:
        away_T = tl.abs(away_T - tl.load(mean_ptr))
    return tl.minimum(away_T * units, FURTHEST).to(tl.int32)


@triton.jit
def parameters(
    slot, temperature, top_k_ptr, top_p_ptr, int_stride, float_stride, V, TYPICAL: tl.constexpr
):  # fmt: skip
    """Return top-k, 0 if a row has none, and top-p, 1 if it has none."""
    top_p = tl.load(top_p_ptr + slot * float_stride)
    top_k = tl.load(top_k_ptr + slot * int_stride)
    top_k = tl.where((temperature > 0) & (top_k > 0) & (top_k < V), top_k, 0)
    if TYPICAL:
        top_k = top_k * 0
    return top_k, tl.where(temperature > 0, top_p, 1.0)


@triton.jit
def is_searching(top_k, top_p, number, LEVELS: tl.constexpr):
    """Return True if a round finds a digit of the row."""
    return tl.where(number < LEVELS, (top_k > 0) | (top_p < 1.0), (top_k > 0) & (top_p < 1.0))


@triton.jit
def note(known_ptr, place, count, mass, goal, ranked, quota, own):
    tl.store(known_ptr, place)
    tl.store(known_ptr + 1, count)
    tl.store(known_ptr + 2, mass)
    tl.store(known_ptr + 3, goal)
    tl.store(known_ptr + 4, ranked)
    tl.store(known_ptr + 5, quota)
    tl.store(known_ptr + 6, own)


@triton.jit
def floor_of(top_M, there_M, top, scale, units, top_k, top_p, V, BITS: tl.constexpr):
    """Return a first digit beyond which the row is not cut.

    Each tile's largest logit is a token, so where k of them are, k tokens are. Without top-k, the tokens that are less
    likely than (1 - top_p) / V of the mass of these largest have together less than 1 - top_p of all mass.
    """
    away_M = away_of(top_M, top)
    if top_k > 0:
        digit_M = tl.where(there_M, tl.minimum(away_M * units, FURTHEST).to(tl.int32) >> (24 - BITS), 1 << BITS)
        floor = tl.zeros((), tl.int32)
        for bit in tl.static_range(BITS):  # the largest digit before which there are fewer than k
            more = floor | (1 << (BITS - 1 - bit))
            floor = tl.where(tl.sum((digit_M < more).to(tl.int64), axis=0) < top_k, more, floor)
    else:
        least = tl.sum(tl.where(there_M, tl.exp2(-away_M * scale), 0.0), axis=0) * (1.0 - top_p) / V
        reach = tl.maximum(0.01 - tl.log2(least), 0.01) / scale
        floor = tl.minimum(reach * units, FURTHEST).to(tl.int32) >> (24 - BITS)
    return floor


@triton.jit
def known_before(
    row, top_k, top_p, told_mass_ptr, told_count_ptr, first_mass_ptr, first_count_ptr, before_ptr, number, rank,
    BITS: tl.constexpr, RANKS: tl.constexpr, TYPICAL: tl.constexpr,
):  # fmt: skip
    """Return what is known of a row's cut before the round `number`, as `cut_search.Known` has it (int64)."""
    LEVELS: tl.constexpr = 24 // BITS
    zero = tl.zeros((), tl.int64)
    place, count, mass, goal, quota, own = zero, zero, zero, zero, zero, zero
    ranked = zero + PLACES
    if number == 0:
        place = tl.where(is_searching(top_k, top_p, number, LEVELS), zero, zero + PLACES)
    else:
        before_ptr += row * KNOWN
        place, count, mass = tl.load(before_ptr), tl.load(before_ptr + 1), tl.load(before_ptr + 2)
        goal, ranked, quota = tl.load(before_ptr + 3), tl.load(before_ptr + 4), tl.load(before_ptr + 5)
        own = tl.load(before_ptr + 6)
        if is_searching(top_k, top_p, number - 1, LEVELS):
            by_count = (top_k > 0) & (number <= LEVELS)
            count_B, mass_B, ahead_B = _told(row, told_mass_ptr, told_count_ptr, rank, BITS, RANKS)
            if number == 1:
                goal = tl.where(by_count, top_k, _share(tl.sum(mass_B, axis=0), top_p))
            digit, count, mass = _digit(count_B, mass_B, by_count, goal, count, mass, BITS)
            place = (place << BITS) + digit
            if (number == LEVELS) | (number == 2 * LEVELS - 1):
                at_B = tl.arange(0, 1 << BITS) == digit
                here = tl.sum(tl.where(at_B, count_B, 0), axis=0)
                each = tl.sum(tl.where(at_B, mass_B, 0), axis=0) // tl.maximum(here, 1)
                some = tl.maximum(each, 1)
                needed = (goal - mass + some - 1) // some
                needed = tl.minimum(tl.maximum(needed, 1), tl.maximum(here, 1))
                needed = tl.where(place == ranked, tl.minimum(needed, quota), needed)
                quota = tl.where(by_count, tl.minimum(goal - count, here), needed)
                own = tl.maximum(quota - tl.sum(tl.where(at_B, ahead_B, 0), axis=0), 0)
                if TYPICAL:
                    own = zero + (1 << 30)
                elif by_count & (top_p < 1.0):  # again, for a share of what top-k leaves
                    ranked, goal = place, _share(mass + each * quota, top_p)
                    count_B, mass_B, ahead_B = _told(row, first_mass_ptr, first_count_ptr, rank, BITS, RANKS)
                    place, count, mass = _digit(count_B, mass_B, False, goal, zero, zero, BITS)
    return place, count, mass, goal, ranked, quota, own


@triton.jit
def _told(row, mass_ptr, count_ptr, rank, BITS: tl.constexpr, RANKS: tl.constexpr):
    """Return counts and masses of all ranks at each digit, and the counts of the ranks before this one."""
    B: tl.constexpr = 1 << BITS
    b = tl.arange(0, B)
    count_B = tl.zeros((B,), tl.int64)
    mass_B = tl.zeros((B,), tl.int64)
    ahead_B = tl.zeros((B,), tl.int64)
    for other in tl.static_range(RANKS):
        place = row * RANKS + other
        here_B = tl.load(count_ptr + place * (3 * B) + b).to(tl.int64)
        mass_B += tl.load(mass_ptr + place * (3 * B // 2) + b)
        count_B += here_B
        ahead_B += tl.where(other < rank, here_B, 0)
    return count_B, mass_B, ahead_B


@triton.jit
def _digit(count_B, mass_B, by_count, goal, count, mass, BITS: tl.constexpr):
    """Return the digit at which the goal is reached, and the count and mass before it."""
    B: tl.constexpr = 1 << BITS
    reached_B = tl.cumsum(tl.where(by_count, count_B, mass_B), axis=0) + tl.where(by_count, count, mass)
    digit = tl.minimum(tl.sum((reached_B < goal).to(tl.int64), axis=0), B - 1)
    before_B = tl.arange(0, B) < digit
    count += tl.sum(tl.where(before_B, count_B, 0), axis=0)
    mass += tl.sum(tl.where(before_B, mass_B, 0), axis=0)
    return digit, count, mass


@triton.jit
def _share(mass, top_p):
    return tl.maximum((mass.to(tl.float64) * top_p).to(tl.int64), 1)

"""From the tiles' winners to a row's token; with a filter, its exact threshold and the draw among what was in doubt.

Thresholds are found by bisection on the logits' bits as ordered integers. Masses are integers in units of 2**-40 of
the likeliest token, so their sums are exact whatever the order. A row whose bracket missed, or held more than fits,
is searched in full: slower by much, equal in result, and rare.

Legend: N rows, V vocabulary, J tiles of a row, B tokens looked at together.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.sampling.draw import APART, LEAST, LOG2E
from ridgeline.kernels.sampling.noise import gumbel_of_tokens

UNIT = tl.constexpr(1099511627776.0)  # 2**40
NOBODY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def finish_kernel(
    best_ptr,
    best_id_ptr,
    sure_mass_ptr,
    sure_count_ptr,
    bracket_ptr,
    num_candidates_ptr,
    candidate_ptr,
    candidate_id_ptr,
    source_ptr,
    slots_ptr,
    position_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_ptr,
    seed_ptr,
    token_ptr,
    V,
    J,
    source_stride,
    int_stride,
    float_stride,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
    SHIFT: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    FILTER: tl.constexpr,
    APPROX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (N,): token_N. source: the adjusted logits [N, V], of which the low SHIFT bits of a float32 are 0."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, TILES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    best_J = tl.load(best_ptr + row * J + j, mask=j < J, other=float("-inf"))
    id_J = tl.load(best_id_ptr + row * J + j, mask=j < J, other=NOBODY)
    best = tl.max(best_J, axis=0)
    token = tl.min(tl.where(best_J == best, id_J, NOBODY), axis=0)
    if FILTER:
        lo, hi = tl.load(bracket_ptr + row * 4), tl.load(bracket_ptr + row * 4 + 1)
        if lo <= hi:  # the row has a threshold
            top, total = tl.load(bracket_ptr + row * 4 + 2), tl.load(bracket_ptr + row * 4 + 3)
            slot = tl.load(slots_ptr + row).to(tl.int64)
            inverse = 1.0 / tl.load(temperature_ptr + slot * float_stride)
            top_p = tl.load(top_p_ptr + slot * float_stride)
            min_p = tl.load(min_p_ptr + slot * float_stride)
            top_k = tl.load(top_k_ptr + slot * int_stride)
            top_k = tl.where(top_k < V, top_k, 0)
            seed, position = tl.load(seed_ptr + slot * int_stride), tl.load(position_ptr + row)
            found = _number(tl.load(num_candidates_ptr + row * APART))
            values_ptr, ids_ptr = candidate_ptr + row * CAPACITY, candidate_id_ptr + row * CAPACITY
            sure_mass = tl.sum(tl.load(sure_mass_ptr + row * J + j, mask=j < J, other=0.0), axis=0)
            sure_mass = (sure_mass * UNIT).to(tl.int64)
            sure_count = _number(tl.sum(tl.load(sure_count_ptr + row * J + j, mask=j < J, other=0), axis=0))
            total_mass = (total * UNIT).to(tl.int64)
            mass = _number(0).to(tl.int64)
            held = found <= CAPACITY
            if held:
                mass = _list_mass(values_ptr, found, top, inverse, FEW)
                if top_k > 0:
                    held = (sure_count < top_k) & ((sure_count + found >= top_k) | (lo <= LEAST))
                else:
                    target = (top_p * total * UNIT).to(tl.int64)
                    held = (sure_mass < target) & ((sure_mass + mass >= target) | (lo <= LEAST))
            if held:
                if found <= FEW:
                    value, chosen = _search(
                        values_ptr, ids_ptr, found, mass, sure_count, sure_mass, total_mass, lo, tl.minimum(hi, top),
                        top, inverse, top_k, top_p, min_p, seed, position, SHIFT, FEW, False, APPROX,
                    )  # fmt: skip
                else:
                    value, chosen = _search(
                        values_ptr, ids_ptr, found, mass, sure_count, sure_mass, total_mass, lo, tl.minimum(hi, top),
                        top, inverse, top_k, top_p, min_p, seed, position, SHIFT, CAPACITY, False, APPROX,
                    )  # fmt: skip
                token = tl.where((value > best) | ((value == best) & (chosen < token)), chosen, token)
            else:
                none, bottom = _number(0), tl.zeros((), tl.float32) + LEAST
                value, token = _search(
                    source_ptr + row * source_stride, ids_ptr, _number(V), none.to(tl.int64), none, none.to(tl.int64),
                    none.to(tl.int64), bottom, top, top, inverse, top_k, top_p, min_p, seed, position, SHIFT, MANY,
                    True, APPROX,
                )  # fmt: skip
    tl.store(token_ptr + row, tl.minimum(token, V - 1).to(tl.int64))


@triton.jit
def _number(x):
    """A count as an int32 tensor, whatever literal it came from."""
    return tl.zeros((), tl.int32) + x


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """int32 in the order of float32 x; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _between(low, high):
    """Middle of two int32, however far apart."""
    return ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)


@triton.jit
def _read(values_ptr, ids_ptr, start, length, B: tl.constexpr, FULL: tl.constexpr):
    """x float32 and token ids of entries start … start + B: of a row itself (FULL), or of a list of candidates."""
    i_B = start + tl.arange(0, B)
    x_B = tl.load(values_ptr + i_B, mask=i_B < length, other=float("-inf")).to(tl.float32)
    if FULL:
        return x_B, i_B
    else:
        return x_B, tl.load(ids_ptr + i_B, mask=i_B < length, other=NOBODY)


@triton.jit
def _mass(x_B, top, inverse):
    """Probabilities relative to the likeliest token's, in fixed point."""
    return (tl.exp2((x_B - top) * (inverse * LOG2E)) * UNIT).to(tl.int64)


@triton.jit
def _list_mass(values_ptr, length, top, inverse, B: tl.constexpr):
    """Mass of all candidates."""
    mass_B = tl.zeros((B,), tl.int64)
    for start in range(0, length, B):
        i_B = start + tl.arange(0, B)
        mass_B += _mass(tl.load(values_ptr + i_B, mask=i_B < length, other=float("-inf")), top, inverse)
    return tl.sum(mass_B, axis=0)


@triton.jit
def _above(
    key, key_B, mass_B, values_ptr, ids_ptr, length, top, inverse, SHIFT: tl.constexpr, B: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Count and mass of entries with a key above `key`: a list of candidates is in registers, a row (FULL) is not."""
    if FULL:
        counts_B = tl.zeros((B,), tl.int32)
        masses_B = tl.zeros((B,), tl.int64)
        for start in range(0, length, B):
            x_B, _ = _read(values_ptr, ids_ptr, start, length, B, FULL)
            inside_B = (_key(x_B, SHIFT) > key) & (x_B >= LEAST)
            counts_B += inside_B.to(tl.int32)
            masses_B += tl.where(inside_B, _mass(x_B, top, inverse), 0)
        return tl.sum(counts_B, axis=0), tl.sum(masses_B, axis=0)
    else:
        inside_B = key_B > key
        return tl.sum(inside_B.to(tl.int32), axis=0), tl.sum(tl.where(inside_B, mass_B, 0), axis=0)


@triton.jit
def _ties_up_to(
    key, last, key_B, listed_id_B, values_ptr, ids_ptr, length, SHIFT: tl.constexpr, B: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """How many entries have exactly `key` and a token id of at most `last`; from registers or not as in `_above`."""
    if FULL:
        counts_B = tl.zeros((B,), tl.int32)
        for start in range(0, length, B):
            x_B, id_B = _read(values_ptr, ids_ptr, start, length, B, FULL)
            counts_B += ((_key(x_B, SHIFT) == key) & (x_B >= LEAST) & (id_B <= last)).to(tl.int32)
        return tl.sum(counts_B, axis=0)
    else:
        return tl.sum(((key_B == key) & (listed_id_B <= last)).to(tl.int32), axis=0)


@triton.jit
def _search(
    values_ptr,
    ids_ptr,
    length,
    mass,
    sure_count,
    sure_mass,
    total_mass,
    floor,
    ceiling,
    top,
    inverse,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    SHIFT: tl.constexpr,
    B: tl.constexpr,
    FULL: tl.constexpr,
    APPROX: tl.constexpr,
):
    """Noised value and id of the row's best token among the entries that stay. All that stays beside them (sure_*) lies
    above `ceiling`; the thresholds lie in [floor, ceiling]. `mass`: of all entries, total_mass: of the row (both are
    found here if FULL: the entries are the row)."""
    lowest, highest = _key(floor, SHIFT) - 1, _key(ceiling, SHIFT)
    count = _number(length)
    if FULL:
        key_B, mass_B = tl.zeros((1,), tl.int32), tl.zeros((1,), tl.int64)  # these stay unused
        listed_id_B = key_B
        count, mass = _above(lowest, key_B, mass_B, values_ptr, ids_ptr, length, top, inverse, SHIFT, B, FULL)
        total_mass = mass
    else:
        listed_B, listed_id_B = _read(values_ptr, ids_ptr, 0, length, B, FULL)
        key_B = tl.where(listed_B >= LEAST, _key(listed_B, SHIFT), -0x7FFFFFFF)
        mass_B = _mass(listed_B, top, inverse)
    kept_mass = total_mass
    threshold = lowest  # everything above it stays, and `quota` of what equals it
    quota = _number(0)
    if top_k > 0:
        kept_mass = sure_mass + mass
        if sure_count + count > top_k:  # find the smallest key with less than k above it
            low, high = lowest, highest
            low_count, low_mass = count, mass  # above low; the others above high
            high_count, high_mass = _number(0), _number(0).to(tl.int64)
            while low + 1 < high:
                middle = _between(low, high)
                n, m = _above(middle, key_B, mass_B, values_ptr, ids_ptr, length, top, inverse, SHIFT, B, FULL)
                enough = sure_count + n >= top_k
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
                low_count, low_mass = tl.where(enough, n, low_count), tl.where(enough, m, low_mass)
                high_count, high_mass = tl.where(enough, high_count, n), tl.where(enough, high_mass, m)
            threshold = high
            quota = (top_k - sure_count - high_count).to(tl.int32)
            each = (low_mass - high_mass) // tl.maximum(low_count - high_count, 1)
            kept_mass = sure_mass + high_mass + each * quota
            count, mass = low_count, low_mass
    if top_p < 1.0:
        target = (kept_mass.to(tl.float64) * top_p).to(tl.int64)
        if (quota > 0) | (sure_mass + mass >= target):  # find the smallest key with less than the target above it
            low, high = threshold - (quota > 0).to(tl.int32), highest
            low_count, low_mass = count, mass
            high_count, high_mass = _number(0), _number(0).to(tl.int64)
            while low + 1 < high:
                middle = _between(low, high)
                n, m = _above(middle, key_B, mass_B, values_ptr, ids_ptr, length, top, inverse, SHIFT, B, FULL)
                enough = sure_mass + m >= target
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
                low_count, low_mass = tl.where(enough, n, low_count), tl.where(enough, m, low_mass)
                high_count, high_mass = tl.where(enough, high_count, n), tl.where(enough, high_mass, m)
            each = tl.maximum((low_mass - high_mass) // tl.maximum(low_count - high_count, 1), 1)
            needed = (target - sure_mass - high_mass + each - 1) // each
            needed = tl.maximum(tl.minimum(needed, low_count - high_count), 1).to(tl.int32)
            quota = tl.where((high == threshold) & (quota > 0), tl.minimum(needed, quota), needed)
            threshold = high
    last = _last_tie(threshold, quota, key_B, listed_id_B, values_ptr, ids_ptr, length, SHIFT, B, FULL)
    best_B = tl.full((B,), float("-inf"), tl.float32)
    winner_B = tl.full((B,), NOBODY, tl.int32)
    for start in range(0, length, B):
        x_B, id_B = _read(values_ptr, ids_ptr, start, length, B, FULL)
        k_B = _key(x_B, SHIFT)
        stays_B = (k_B > threshold) | ((k_B == threshold) & (id_B <= last))
        stays_B = stays_B & (x_B >= LEAST) & (tl.exp2((x_B - top) * (inverse * LOG2E)) >= min_p)
        value_B = x_B * inverse + gumbel_of_tokens(id_B, position, seed, APPROX)
        value_B = tl.where(stays_B, value_B, float("-inf"))
        better_B = (value_B > best_B) | ((value_B == best_B) & (id_B < winner_B))
        best_B = tl.where(better_B, value_B, best_B)
        winner_B = tl.where(better_B, id_B, winner_B)
    best = tl.max(best_B, axis=0)
    return best, tl.min(tl.where(best_B == best, winner_B, NOBODY), axis=0)


@triton.jit
def _last_tie(
    threshold, quota, key_B, listed_id_B, values_ptr, ids_ptr, length, SHIFT: tl.constexpr, B: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Largest token id among the `quota` smallest of those exactly at the threshold (-1: none of them stays)."""
    low, high = _number(-1), _number(-1)
    if quota > 0:
        high = _number(NOBODY)
        ties = _ties_up_to(threshold, high, key_B, listed_id_B, values_ptr, ids_ptr, length, SHIFT, B, FULL)
        if ties > quota:
            high = _number(1 << 20)  # above any token id
            while high - low > 1:
                middle = (low + high) >> 1
                n = _ties_up_to(threshold, middle, key_B, listed_id_B, values_ptr, ids_ptr, length, SHIFT, B, FULL)
                low, high = tl.where(n >= quota, low, middle), tl.where(n >= quota, middle, high)
    return high

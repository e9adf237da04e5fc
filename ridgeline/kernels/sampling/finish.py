"""From the tiles' bounds to a row's token; with a filter, its exact threshold where that decides.

Thresholds are found by bisection on the logits' bits as ordered integers. Masses are integers in units of 2**-40 of
the likeliest token, so their sums are exact whatever the order. A row whose bracket missed, or held more than fits,
is searched in full: slower by much, equal in result, and rare.

Legend: N rows, V vocabulary, J tiles of a row, B tokens looked at together.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.sampling.draw import APART, LEAST, LOG2E, bits_per_logit
from ridgeline.kernels.sampling.noise import gumbel_of_groups

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
    TILE: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    RANDOM: tl.constexpr,
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
    if RANDOM:
        token = _draw(
            best_J, j, sure_mass_ptr, sure_count_ptr, bracket_ptr, num_candidates_ptr, candidate_ptr, candidate_id_ptr,
            source_ptr, slots_ptr, position_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seed_ptr, row, V, J,
            source_stride, int_stride, float_stride, TILE, CAPACITY, SHIFT, FEW, MANY, FILTER, APPROX,
        )  # fmt: skip
    else:
        id_J = tl.load(best_id_ptr + row * J + j, mask=j < J, other=NOBODY)
        token = tl.min(tl.where(best_J == tl.max(best_J, axis=0), id_J, NOBODY), axis=0)
    tl.store(token_ptr + row, tl.minimum(token, V - 1).to(tl.int64))


@triton.jit
def _draw(
    bound_J, j, sure_mass_ptr, sure_count_ptr, bracket_ptr, num_candidates_ptr, candidate_ptr, candidate_id_ptr,
    source_ptr, slots_ptr, position_ptr, temperature_ptr, top_p_ptr, min_p_ptr, top_k_ptr, seed_ptr, row, V, J,
    source_stride, int_stride, float_stride, TILE: tl.constexpr, CAPACITY: tl.constexpr, SHIFT: tl.constexpr,
    FEW: tl.constexpr, MANY: tl.constexpr, FILTER: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    """The row's token. With FILTER first the best of all that may stay: if it lies above the bracket it stays for
    certain, and the exact threshold, which costs a search, does not matter."""
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position, seed = tl.load(position_ptr + row), tl.load(seed_ptr + slot * int_stride)
    temperature = tl.load(temperature_ptr + slot * float_stride)
    row_ptr = source_ptr + row * source_stride
    scale = bits_per_logit(temperature)
    if not FILTER:
        base = tl.max(bound_J, axis=0)
        return _winner(
            bound_J, j, base, row_ptr, V, scale, temperature, position, seed, base, 0.0, _number(0), _number(0),
            SHIFT, TILE, FILTER, APPROX,
        )  # fmt: skip
    else:
        min_p = tl.load(min_p_ptr + slot * float_stride)
        lo, hi = tl.load(bracket_ptr + row * 4), tl.load(bracket_ptr + row * 4 + 1)
        top, total = tl.load(bracket_ptr + row * 4 + 2), tl.load(bracket_ptr + row * 4 + 3)
        threshold, last = _key(tl.where(lo <= hi, lo, LEAST), SHIFT) - 1, _number(-1)
        searched = lo > hi  # the row has no threshold
        token, drawn = _number(0), False
        while not drawn:
            token = _winner(
                bound_J, j, top * scale, row_ptr, V, scale, temperature, position, seed, top, min_p, threshold, last,
                SHIFT, TILE, FILTER, APPROX,
            )  # fmt: skip
            drawn = searched
            if not searched:
                top_p = tl.load(top_p_ptr + slot * float_stride)
                top_k = tl.load(top_k_ptr + slot * int_stride)
                top_k = tl.where(top_k < V, top_k, 0)
                found = _number(tl.load(num_candidates_ptr + row * APART))
                values_ptr, ids_ptr = candidate_ptr + row * CAPACITY, candidate_id_ptr + row * CAPACITY
                sure_mass = tl.sum(tl.load(sure_mass_ptr + row * J + j, mask=j < J, other=0.0), axis=0)
                sure_mass = (sure_mass * UNIT).to(tl.int64)
                sure_count = _number(tl.sum(tl.load(sure_count_ptr + row * J + j, mask=j < J, other=0), axis=0))
                mass = _number(0).to(tl.int64)
                held = found <= CAPACITY
                if held:
                    mass = _list_mass(values_ptr, found, top, scale, FEW)
                    if top_k > 0:
                        held = (sure_count < top_k) & ((sure_count + found >= top_k) | (lo <= LEAST))
                    else:
                        target = (top_p * total * UNIT).to(tl.int64)
                        held = (sure_mass < target) & ((sure_mass + mass >= target) | (lo <= LEAST))
                x = tl.load(row_ptr + tl.minimum(token, V - 1)).to(tl.float32)
                drawn = held & (x > hi)
                if not drawn:
                    total_mass = (total * UNIT).to(tl.int64)
                    ceiling = tl.minimum(hi, top)
                    if not held:  # what stays may lie anywhere
                        bound_J = tl.where(j < J, float("inf"), float("-inf"))
                        none, bottom = _number(0), tl.zeros((), tl.float32) + LEAST
                        threshold, last = _search(
                            row_ptr, ids_ptr, _number(V), none.to(tl.int64), none, none.to(tl.int64),
                            none.to(tl.int64), bottom, top, top, scale, top_k, top_p, SHIFT, MANY, True,
                        )  # fmt: skip
                    elif found <= FEW:
                        threshold, last = _search(
                            values_ptr, ids_ptr, found, mass, sure_count, sure_mass, total_mass, lo, ceiling, top,
                            scale, top_k, top_p, SHIFT, FEW, False,
                        )  # fmt: skip
                    else:
                        threshold, last = _search(
                            values_ptr, ids_ptr, found, mass, sure_count, sure_mass, total_mass, lo, ceiling, top,
                            scale, top_k, top_p, SHIFT, CAPACITY, False,
                        )  # fmt: skip
                    key = _key(x, SHIFT)
                    drawn = held & ((key > threshold) | ((key == threshold) & (token <= last)))
                searched = True
        return token


@triton.jit
def _winner(
    bound_J, j, base, row_ptr, V, scale, temperature, position, seed, top, min_p, threshold, last, SHIFT: tl.constexpr,
    TILE: tl.constexpr, FILTER: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    """The best noised token of all (FILTER: of those above `threshold`, or equal to it and not past `last`).

    Tiles are looked at from the highest bound down, until none can hold anything better: one or two, as a rule.
    Values are bits beyond `base`, so noise counts however cold a row is. Bounds may be off by rounding.
    """
    Q: tl.constexpr = TILE // 4
    slack = tl.where(temperature > 0, tl.abs(base) * 4.8e-7 + 1e-5, 0.0)
    best = tl.zeros((), tl.float32) + float("-inf")
    token = _number(0)
    bound = tl.max(bound_J, axis=0)
    while bound - base > best - slack:
        tile = tl.min(tl.where(bound_J == bound, j, NOBODY), axis=0)
        bound_J = tl.where(j == tile, float("-inf"), bound_J)
        bound = tl.max(bound_J, axis=0)
        group_Q = tile * Q + tl.arange(0, Q)
        id_Q4 = group_Q[:, None] * 4 + tl.arange(0, 4)[None, :]
        x_Q4 = tl.load(row_ptr + id_Q4, mask=id_Q4 < V, other=float("-inf")).to(tl.float32)
        value_Q4 = tl.fma(x_Q4, tl.zeros_like(x_Q4) + scale, tl.zeros_like(x_Q4) - base)
        if temperature > 0:
            value_Q4 += gumbel_of_groups(group_Q, position, seed, Q, APPROX) * LOG2E
        if FILTER:
            key_Q4 = _key(x_Q4, SHIFT)
            stays_Q4 = (key_Q4 > threshold) | ((key_Q4 == threshold) & (id_Q4 <= last))
            stays_Q4 = stays_Q4 & (tl.exp2((x_Q4 - top) * scale) >= min_p)
            value_Q4 = tl.where(stays_Q4, value_Q4, float("-inf"))
        value = tl.max(value_Q4)
        chosen = tl.min(tl.where(value_Q4 == value, id_Q4, NOBODY))
        better = (value > best) | ((value == best) & (chosen < token))
        best, token = tl.where(better, value, best), tl.where(better, chosen, token)
    return token


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
def _mass(x_B, top, scale):
    """Probabilities relative to the likeliest token's, in fixed point."""
    return (tl.exp2((x_B - top) * scale) * UNIT).to(tl.int64)


@triton.jit
def _list_mass(values_ptr, length, top, scale, B: tl.constexpr):
    """Mass of all candidates."""
    mass_B = tl.zeros((B,), tl.int64)
    for start in range(0, length, B):
        i_B = start + tl.arange(0, B)
        mass_B += _mass(tl.load(values_ptr + i_B, mask=i_B < length, other=float("-inf")), top, scale)
    return tl.sum(mass_B, axis=0)


@triton.jit
def _above(
    key, key_B, mass_B, values_ptr, ids_ptr, length, top, scale, SHIFT: tl.constexpr, B: tl.constexpr,
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
            masses_B += tl.where(inside_B, _mass(x_B, top, scale), 0)
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
    scale,
    top_k,
    top_p,
    SHIFT: tl.constexpr,
    B: tl.constexpr,
    FULL: tl.constexpr,
):
    """The key from which entries stay, and the last token id that stays of those which equal it. All that stays beside
    them (sure_*) lies above `ceiling`; the thresholds lie in [floor, ceiling]. `mass`: of all entries, total_mass: of
    the row (both are found here if FULL: the entries are the row)."""
    lowest, highest = _key(floor, SHIFT) - 1, _key(ceiling, SHIFT)
    count = _number(length)
    if FULL:
        key_B, mass_B = tl.zeros((1,), tl.int32), tl.zeros((1,), tl.int64)  # these stay unused
        listed_id_B = key_B
        count, mass = _above(lowest, key_B, mass_B, values_ptr, ids_ptr, length, top, scale, SHIFT, B, FULL)
        total_mass = mass
    else:
        listed_B, listed_id_B = _read(values_ptr, ids_ptr, 0, length, B, FULL)
        key_B = tl.where(listed_B >= LEAST, _key(listed_B, SHIFT), -0x7FFFFFFF)
        mass_B = _mass(listed_B, top, scale)
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
                n, m = _above(middle, key_B, mass_B, values_ptr, ids_ptr, length, top, scale, SHIFT, B, FULL)
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
                n, m = _above(middle, key_B, mass_B, values_ptr, ids_ptr, length, top, scale, SHIFT, B, FULL)
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
    return threshold, last


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

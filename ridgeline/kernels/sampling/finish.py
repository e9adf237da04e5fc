"""The draw of a row's token from the bounds of its tiles.

The best noised token of all that may stay is the first candidate. The filter keeps it if the tokens before it hold less
than the filter's share (of mass, or of the count for top-k). That is certain above the bracket; otherwise the share is
added up. If the filter drops the candidate, the best of the tokens before it is the next one. If few tokens may stay,
they are listed, and their exact threshold is found first, by bisection on the logits' bits as ordered integers.

The masses of a list are integers in units of 2**-38 of the likeliest token, so their sums are exact in any order. If a
list lacks tokens that may stay, or is too short for them, the whole row is searched. That is much slower and rare, and
the result is the same.

Legend:
    R  rows
    V  vocabulary
    J  tiles of a row
    C  candidates kept of a row
    Q  groups of four tokens in a tile
    T  tokens that are looked at together
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.sampling.draw import APART, LEAST, LOG2E, WIDTH, bits_per_logit
from ridgeline.kernels.sampling.noise import gumbel_of_groups, gumbel_of_tokens

UNIT = tl.constexpr(274877906944.0)  # 2**38, the fixed-point mass of the likeliest token
NOBODY = tl.constexpr(0x7FFFFFFF)  # in place of a token id, if there is none


@triton.jit(do_not_specialize=["first_token"])
def finish_kernel(
    best_ptr,
    best_id_ptr,
    sure_ptr,
    reach_ptr,
    bracket_ptr,
    num_candidates_ptr,
    candidate_ptr,
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
    first_token,
    source_stride,
    int_stride,
    float_stride,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    MANY: tl.constexpr,
    RANDOM: tl.constexpr,
    FILTER: tl.constexpr,
    PART: tl.constexpr,
    APPROX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write token_R. Grid (R,). source: the adjusted logits [R, V]. As float32 their low SHIFT bits are 0.

    PART: they are those of the tokens from `first_token` on, and token is int32 [R, 2] with the bits of the token's
    logit in its second column.
    """
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, TILES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    best_J = tl.load(best_ptr + row * J + j, mask=j < J, other=float("-inf"))
    if RANDOM:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        position, seed = tl.load(position_ptr + row), tl.load(seed_ptr + slot * int_stride)
        temperature = tl.load(temperature_ptr + slot * float_stride)
        row_ptr = source_ptr + row * source_stride
        if FILTER:
            sure = tl.sum(tl.load(sure_ptr + row * J + j, mask=j < J, other=0.0), axis=0)
            reach = tl.sum(tl.load(reach_ptr + row * J + j, mask=j < J, other=0.0), axis=0)
            min_p = tl.load(min_p_ptr + slot * float_stride)
            top_p = tl.load(top_p_ptr + slot * float_stride)
            top_k = tl.load(top_k_ptr + slot * int_stride)
            token = _draw_filtered(
                best_J, j, J, sure, reach, bracket_ptr + row * WIDTH, tl.load(num_candidates_ptr + row * APART),
                candidate_ptr + row * CAPACITY, row_ptr, V, temperature, position, seed, top_p, min_p, top_k, TILE,
                CAPACITY, SHIFT, MANY, APPROX,
            )  # fmt: skip
        else:
            base = tl.max(best_J, axis=0)
            token = _winner(
                best_J, j, base, row_ptr, V, temperature, position, seed, base, 0.0, 0, 0, first_token // 4, SHIFT,
                TILE, False, APPROX,
            )  # fmt: skip
        score = tl.load(row_ptr + tl.minimum(token, V - 1)).to(tl.float32)
    else:
        score = tl.max(best_J, axis=0)
        id_J = tl.load(best_id_ptr + row * J + j, mask=j < J, other=NOBODY)
        token = tl.min(tl.where(best_J == score, id_J, NOBODY), axis=0)
    if PART:
        tl.store(token_ptr + 2 * row, tl.where(token < V, token + first_token, -1))
        tl.store(token_ptr + 2 * row + 1, score.to(tl.int32, bitcast=True))
    else:
        tl.store(token_ptr + row, tl.where(token < V, token, -1).to(tl.int64))


@triton.jit
def _draw_filtered(
    bound_J, j, J, sure, reach, bracket_ptr, found, list_ptr, row_ptr, V, temperature, position, seed, top_p, min_p,
    top_k, TILE: tl.constexpr, CAPACITY: tl.constexpr, SHIFT: tl.constexpr, MANY: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    """Return the token under top-k, top-p and min-p. sure, reach: the mass above the bracket, and the mass from its
    floor on."""
    lo, hi = tl.load(bracket_ptr), tl.load(bracket_ptr + 1)
    top, total = tl.load(bracket_ptr + 2), tl.load(bracket_ptr + 3)
    scale = bits_per_logit(temperature)
    top_k = tl.where(top_k < V, top_k, 0)
    share = tl.where(top_k > 0, top_k.to(tl.float32), top_p * total)  # a token stays if less than this lies before it
    least, last = _key(top * 0.0 + LEAST, SHIFT) - 1, _number(-1)
    threshold = least
    everywhere_J = tl.where(j < J, float("inf"), float("-inf"))  # bounds for a row of which any tile may hold the token
    token = _number(NOBODY)
    drawn, exact = False, lo == float("inf")
    if hi < float("inf"):
        threshold = _key(lo, SHIFT) - 1
        hi = tl.where(sure < share, hi, float("inf"))
        if (reach < share) & (tl.load(bracket_ptr + 4) == lo) & (lo > LEAST):
            threshold, bound_J = least, everywhere_J
    elif lo < float("inf"):
        exact = True
        if found <= CAPACITY:
            x_C, id_C = _read(list_ptr, 0, found, CAPACITY, False)
            key_C, mass_C = tl.where(x_C >= LEAST, _key(x_C, SHIFT), -0x7FFFFFFF), _mass(x_C, top, scale)
            if top_k > 0:
                drawn = (found >= top_k) | (lo <= LEAST)
            else:
                drawn = (tl.sum(mass_C, axis=0) >= (share * UNIT).to(tl.int64)) | (lo <= LEAST)
            if drawn:
                threshold, last = _search(
                    row_ptr, V, key_C, mass_C, id_C, (total * UNIT).to(tl.int64), lo, top, scale, top_k, top_p, SHIFT,
                    MANY, False,
                )  # fmt: skip
                value_C = tl.fma(x_C, x_C * 0.0 + scale, x_C * 0.0 - top * scale)
                value_C += gumbel_of_tokens(id_C, position, seed, APPROX) * LOG2E
                stays_C = (key_C > threshold) | ((key_C == threshold) & (id_C <= last))
                stays_C = stays_C & (x_C >= LEAST) & (tl.exp2((x_C - top) * scale) >= min_p)
                value_C = tl.where(stays_C, value_C, float("-inf"))
                token = tl.min(tl.where(value_C == tl.max(value_C, axis=0), id_C, NOBODY), axis=0)
        if not drawn:
            none_1 = tl.zeros((1,), tl.int32)
            bound_J = everywhere_J
            threshold, last = _search(
                row_ptr, V, none_1, none_1.to(tl.int64), none_1, _number(0).to(tl.int64), top * 0.0 + LEAST, top, scale,
                top_k, top_p, SHIFT, MANY, True,
            )  # fmt: skip
    while not drawn:
        token = _winner(
            bound_J, j, top * scale, row_ptr, V, temperature, position, seed, top, min_p, threshold, last, 0, SHIFT,
            TILE, True, APPROX,
        )  # fmt: skip
        x = tl.load(row_ptr + tl.minimum(token, V - 1)).to(tl.float32)
        drawn = exact | (x > hi) | (token == NOBODY)
        if not drawn:
            threshold, last = _key(x, SHIFT), token - 1  # the tokens before this one
            before = _before(threshold, last, row_ptr, V, top, tl.where(top_k > 0, 0.0, scale), SHIFT, MANY)
            drawn = (before < share) | (before == 0.0)
    return token


@triton.jit
def _before(threshold, last, row_ptr, V, top, scale, SHIFT: tl.constexpr, T: tl.constexpr):
    """Return the mass (with scale 0, the number) of all tokens above `threshold`, or equal to it and not past `last`.
    The order of the sum is the same for any row."""
    mass_T = tl.zeros((T,), tl.float32)
    for start in tl.range(0, V, T, num_stages=3):
        x_T, id_T = _read(row_ptr, start, V, T, True)
        key_T = _key(x_T, SHIFT)
        inside_T = (key_T > threshold) | ((key_T == threshold) & (id_T <= last))
        mass_T += tl.where(inside_T & (x_T >= LEAST), tl.exp2((x_T - top) * scale), 0.0)
    return tl.sum(mass_T, axis=0)


@triton.jit
def _winner(
    bound_J, j, base, row_ptr, V, temperature, position, seed, top, min_p, threshold, last, first_group,
    SHIFT: tl.constexpr, TILE: tl.constexpr, FILTER: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    """Return the best noised token of all (with FILTER: of those above `threshold`, or equal to it and not past
    `last`).

    Tiles are looked at from the highest bound down, until none can hold a better token. As a rule that takes one tile
    or two. Values are bits beyond `base`, so noise counts however cold a row is. Bounds may be off by rounding.
    The row's noise begins with that of the group `first_group`.
    """
    Q: tl.constexpr = TILE // 4
    scale = bits_per_logit(temperature)
    slack = tl.where(temperature > 0, tl.abs(base) * 4.8e-7 + 1e-5, 0.0)
    best = tl.zeros((), tl.float32) + float("-inf")
    token = _number(NOBODY)
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
            value_Q4 += gumbel_of_groups(group_Q + first_group, position, seed, Q, APPROX) * LOG2E
        if FILTER:
            key_Q4 = _key(x_Q4, SHIFT)
            stays_Q4 = (key_Q4 > threshold) | ((key_Q4 == threshold) & (id_Q4 <= last))
            stays_Q4 = stays_Q4 & (tl.exp2((x_Q4 - top) * scale) >= min_p)
            value_Q4 = tl.where(stays_Q4, value_Q4, float("-inf"))
        value = tl.max(value_Q4)
        chosen = tl.min(tl.where(value_Q4 == value, id_Q4, NOBODY))
        better = (value > best) | ((value == best) & (chosen < token) & (best > float("-inf")))
        best, token = tl.where(better, value, best), tl.where(better, chosen, token)
    return token


@triton.jit
def _number(x):
    """Return a count as an int32 tensor, whatever literal it came from."""
    return tl.zeros((), tl.int32) + x


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Return an int32 that orders as float32 x does; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _between(low, high):
    """Return the middle of two int32, however far apart they are."""
    return ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)


@triton.jit
def _read(entries_ptr, start, length, T: tl.constexpr, FULL: tl.constexpr):
    """Return x (float32) and token ids of entries start … start + T, of a row itself (FULL) or of a list of
    candidates."""
    i_T = start + tl.arange(0, T)
    if FULL:
        return tl.load(entries_ptr + i_T, mask=i_T < length, other=float("-inf")).to(tl.float32), i_T
    else:
        entry_T = tl.load(entries_ptr + i_T, mask=i_T < length, other=0)
        x_T = (entry_T >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        inside_T = i_T < length
        return tl.where(inside_T, x_T, float("-inf")), tl.where(inside_T, entry_T.to(tl.int32), NOBODY)


@triton.jit
def _mass(x_T, top, scale):
    """Return probabilities relative to the likeliest token's, in fixed point."""
    return (tl.exp2((x_T - top) * scale) * UNIT).to(tl.int64)


@triton.jit
def _above(
    key, key_T, mass_T, row_ptr, V, top, scale, SHIFT: tl.constexpr, MANY: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """Return the count and the mass of entries with a key above `key`. A list of candidates is in registers; a row
    (FULL) is read.

    The masses of a list sum up to less than 2**50, so one sum takes both: the count is in the bits from there on.
    """
    if FULL:
        counts_T = tl.zeros((MANY,), tl.int32)
        masses_T = tl.zeros((MANY,), tl.int64)
        for start in range(0, V, MANY):
            x_T, _ = _read(row_ptr, start, V, MANY, FULL)
            inside_T = (_key(x_T, SHIFT) > key) & (x_T >= LEAST)
            counts_T += inside_T.to(tl.int32)
            masses_T += tl.where(inside_T, _mass(x_T, top, scale), 0)
        return tl.sum(counts_T, axis=0), tl.sum(masses_T, axis=0)
    else:
        both = tl.sum(tl.where(key_T > key, mass_T + (1 << 50), 0), axis=0)
        return (both >> 50).to(tl.int32), both & ((1 << 50) - 1)


@triton.jit
def _ties_up_to(
    key, last, key_T, id_T, row_ptr, V, SHIFT: tl.constexpr, MANY: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """Return the number of entries with exactly `key` and a token id of at most `last`. Entries are in registers or
    read, as in `_above`."""
    if FULL:
        counts_T = tl.zeros((MANY,), tl.int32)
        for start in range(0, V, MANY):
            x_T, i_T = _read(row_ptr, start, V, MANY, FULL)
            counts_T += ((_key(x_T, SHIFT) == key) & (x_T >= LEAST) & (i_T <= last)).to(tl.int32)
        return tl.sum(counts_T, axis=0)
    else:
        return tl.sum(((key_T == key) & (id_T <= last)).to(tl.int32), axis=0)


@triton.jit
def _search(
    row_ptr, V, key_T, mass_T, id_T, total_mass, floor, top, scale, top_k, top_p, SHIFT: tl.constexpr,
    MANY: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Return the key from which entries stay, and the last token id that stays of those which equal it.

    The entries are key_T, mass_T and id_T, or the row itself (FULL), MANY of which are looked at together. Nothing
    below `floor` stays, and nothing above it is missing. total_mass is that of the row (with FULL it is found here).
    """
    lowest, highest = _key(floor, SHIFT) - 1, _key(top, SHIFT)
    count, mass = _above(lowest, key_T, mass_T, row_ptr, V, top, scale, SHIFT, MANY, FULL)
    if FULL:
        total_mass = mass
    kept_mass = total_mass
    threshold = lowest  # everything above it stays, and so do `quota` entries that equal it
    quota = _number(0)
    if top_k > 0:
        kept_mass = mass
        if count > top_k:  # find the smallest key with less than k above it
            low, high = lowest, highest
            low_count, low_mass = count, mass  # those above low; the next two are those above high
            high_count, high_mass = _number(0), _number(0).to(tl.int64)
            while low + 1 < high:
                middle = _between(low, high)
                n, m = _above(middle, key_T, mass_T, row_ptr, V, top, scale, SHIFT, MANY, FULL)
                enough = n >= top_k
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
                low_count, low_mass = tl.where(enough, n, low_count), tl.where(enough, m, low_mass)
                high_count, high_mass = tl.where(enough, high_count, n), tl.where(enough, high_mass, m)
            threshold = high
            quota = (top_k - high_count).to(tl.int32)
            each = (low_mass - high_mass) // tl.maximum(low_count - high_count, 1)
            kept_mass = high_mass + each * quota
            count, mass = low_count, low_mass
    if top_p < 1.0:
        target = (kept_mass.to(tl.float64) * top_p).to(tl.int64)
        if (quota > 0) | (mass >= target):  # find the smallest key with less than the target above it
            low, high = threshold - (quota > 0).to(tl.int32), highest
            low_count, low_mass = count, mass
            high_count, high_mass = _number(0), _number(0).to(tl.int64)
            while low + 1 < high:
                middle = _between(low, high)
                n, m = _above(middle, key_T, mass_T, row_ptr, V, top, scale, SHIFT, MANY, FULL)
                enough = m >= target
                low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
                low_count, low_mass = tl.where(enough, n, low_count), tl.where(enough, m, low_mass)
                high_count, high_mass = tl.where(enough, high_count, n), tl.where(enough, high_mass, m)
            each = tl.maximum((low_mass - high_mass) // tl.maximum(low_count - high_count, 1), 1)
            needed = (target - high_mass + each - 1) // each
            needed = tl.maximum(tl.minimum(needed, low_count - high_count), 1).to(tl.int32)
            quota = tl.where((high == threshold) & (quota > 0), tl.minimum(needed, quota), needed)
            threshold = high
    last = _last_tie(threshold, quota, key_T, id_T, row_ptr, V, SHIFT, MANY, FULL)
    return threshold, last


@triton.jit
def _last_tie(
    threshold, quota, key_T, id_T, row_ptr, V, SHIFT: tl.constexpr, MANY: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """Return the largest of the `quota` smallest token ids that are exactly at the threshold (-1: none of
    them stays)."""
    low, high = _number(-1), _number(-1)
    if quota > 0:
        high = _number(NOBODY)
        ties = _ties_up_to(threshold, high, key_T, id_T, row_ptr, V, SHIFT, MANY, FULL)
        if ties > quota:
            high = _number(1 << 20)  # above any token id
            while high - low > 1:
                middle = (low + high) >> 1
                n = _ties_up_to(threshold, middle, key_T, id_T, row_ptr, V, SHIFT, MANY, FULL)
                low, high = tl.where(n >= quota, low, middle), tl.where(n >= quota, middle, high)
    return high

"""Filters for batches in which some row asks for typical-p (Meister et al., "Locally typical sampling", arXiv
2202.00666). One program per row finds all the row's thresholds exactly and leaves the tokens that stay, for a draw
without filters.

A token's information less the entropy equals the distance of its logit from the mean logit, weighted by probability,
since both contain the same normalizer. So the tokens to keep are those nearest to that mean. The distance that keeps
enough is found by bisection on its bits, as the other thresholds are.

Legend:
    R  rows
    V  vocabulary
    J  tiles of a row
    T  tokens that are looked at together
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.sampling.draw import LEAST, bits_per_logit
from ridgeline.kernels.sampling.finish import _key, _mass, _number, _read, _search

INFINITY = tl.constexpr(0x7F800000)  # the bits of inf as a float32


@triton.jit
def typical_kernel(
    source_ptr,
    slots_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_ptr,
    typical_p_ptr,
    tile_max_ptr,
    kept_ptr,
    V,
    J,
    source_stride,
    kept_stride,
    int_stride,
    float_stride,
    TILES: tl.constexpr,
    SHIFT: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write kept_RV: float32, the adjusted logits (`source`) with -inf for tokens that top-k, top-p, min-p or typical-p
    removes. Greedy rows stay as they are. Grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, TILES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    top = tl.max(tl.load(tile_max_ptr + row * J + j, mask=j < J, other=LEAST), axis=0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot * float_stride)
    min_p = tl.load(min_p_ptr + slot * float_stride)
    top_p = tl.load(top_p_ptr + slot * float_stride)
    typical_p = tl.load(typical_p_ptr + slot * float_stride)
    top_k = tl.load(top_k_ptr + slot * int_stride)
    top_k = tl.where(top_k < V, top_k, 0)
    scale = bits_per_logit(temperature)
    row_ptr, kept_ptr = source_ptr + row * source_stride, kept_ptr + row * kept_stride
    random = temperature > 0
    threshold, last = _key(top * 0.0 + LEAST, SHIFT) - 1, _number(-1)
    if random & ((top_k > 0) | (top_p < 1.0)):
        none_1 = tl.zeros((1,), tl.int32)
        threshold, last = _search(
            row_ptr, V, none_1, none_1.to(tl.int64), none_1, _number(0).to(tl.int64), top * 0.0 + LEAST, top, scale,
            top_k, top_p, SHIFT, MANY, True,
        )  # fmt: skip
    mean, reach = top * 0.0, _number(INFINITY)
    if random & (typical_p < 1.0):
        mean = _mean_bits(row_ptr, V, threshold, last, min_p, top, scale, SHIFT, MANY)
        low, high = _number(-1), _number(INFINITY)
        total = _mass_within(high, mean, row_ptr, V, threshold, last, min_p, top, scale, SHIFT, MANY)
        target = (total.to(tl.float64) * typical_p).to(tl.int64)
        while low + 1 < high:  # the smallest distance within which there is enough
            middle = low + (high - low) // 2
            mass = _mass_within(middle, mean, row_ptr, V, threshold, last, min_p, top, scale, SHIFT, MANY)
            enough = mass >= tl.maximum(target, 1)
            low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
        reach = high
    for start in range(0, V, MANY):
        x_T, id_T = _read(row_ptr, start, V, MANY, True)
        stays_T = _stays(x_T, id_T, threshold, last, min_p, top, scale, SHIFT) & (
            _distance(x_T, mean, top, scale) <= reach
        )
        kept_T = tl.where(stays_T, x_T, float("-inf"))
        tl.store(kept_ptr + id_T, tl.where(random, kept_T, x_T), mask=id_T < V)


@triton.jit
def _stays(x_T, id_T, threshold, last, min_p, top, scale, SHIFT: tl.constexpr):
    """Return True for tokens that pass the filters before typical-p."""
    key_T = _key(x_T, SHIFT)
    inside_T = (key_T > threshold) | ((key_T == threshold) & (id_T <= last))
    return inside_T & (x_T >= LEAST) & (tl.exp2((x_T - top) * scale) >= min_p)


@triton.jit
def _distance(x_T, mean, top, scale):
    """Return the distance from the mean as the bits of a float32, which have the order of the distances."""
    return tl.abs((x_T - top) * scale - mean).to(tl.int32, bitcast=True)


@triton.jit
def _mean_bits(row_ptr, V, threshold, last, min_p, top, scale, SHIFT: tl.constexpr, T: tl.constexpr):
    """Return the expected (x - top) · scale of the tokens that stay."""
    weight_T = tl.zeros((T,), tl.float32)
    sum_T = tl.zeros((T,), tl.float32)
    for start in range(0, V, T):
        x_T, id_T = _read(row_ptr, start, V, T, True)
        bits_T = (x_T - top) * scale
        w_T = tl.where(_stays(x_T, id_T, threshold, last, min_p, top, scale, SHIFT), tl.exp2(bits_T), 0.0)
        weight_T += w_T
        sum_T += tl.where(w_T > 0, w_T * bits_T, 0.0)
    return tl.sum(sum_T, axis=0) / tl.sum(weight_T, axis=0)


@triton.jit
def _mass_within(
    reach, mean, row_ptr, V, threshold, last, min_p, top, scale, SHIFT: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """Return the mass, in fixed point, of the tokens that stay and lie at most `reach` from the mean."""
    mass_T = tl.zeros((T,), tl.int64)
    for start in range(0, V, T):
        x_T, id_T = _read(row_ptr, start, V, T, True)
        inside_T = _stays(x_T, id_T, threshold, last, min_p, top, scale, SHIFT)
        inside_T = inside_T & (_distance(x_T, mean, top, scale) <= reach)
        mass_T += tl.where(inside_T, _mass(x_T, top, scale), 0)
    return tl.sum(mass_T, axis=0)

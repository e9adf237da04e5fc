"""Mamba-2's recurrence in chunks: the products of c and b, once for all heads of a group, and outputs and states.

One launch multiplies c bᵀ for each chunk and group, with zeros above the diagonal, and the programs of the heads load
them. So a chunk begins with its decays at once, and no element asks on which side of the diagonal it is.

Legend: that of triton_chunks.py
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.scans.ssd.choose import Cut
from ridgeline.kernels.scans.ssd.triton_chunks import _before, _segment, _tile, aot_types, shape_constants

# A decay above the diagonal would be larger than one, and may be infinite. There the product is 0, and stays 0 if it is
# multiplied by a number that is finite.
FINITE = 126.0


@triton.jit
def _products(
    b_ptr, c_ptr, products_ptr, first_ptr, length_ptr, row_ptr, start_ptr,
    BC_TOKEN: tl.constexpr, G: tl.constexpr, S: tl.constexpr, BLOCK_S: tl.constexpr, Q: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write products_CGQQ, [token of c, token of b], of the type of b and c."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk, group = tl.program_id(0), tl.program_id(1)
    first, length, _, _, _ = _segment(first_ptr, length_ptr, row_ptr, start_ptr, chunk)
    if length == 0:
        return
    i, s = tl.arange(0, Q), tl.arange(0, BLOCK_S)
    offset = i[:, None] * BC_TOKEN + s[None, :]
    place = first.to(tl.int64) * BC_TOKEN + group * S
    b = _tile(b_ptr + place, offset, length, s, S, BLOCK_S)
    c = _tile(c_ptr + place, offset, length, s, S, BLOCK_S)
    products = tl.where(i[:, None] >= i[None, :], tl.dot(c, tl.trans(b), input_precision=DOT), 0.0)
    products_ptr += (chunk.to(tl.int64) * G + group) * Q * Q
    tl.store(products_ptr + i[:, None] * Q + i[None, :], products.to(products_ptr.dtype.element_ty))


@triton.jit
def _outputs(
    x_ptr, b_ptr, c_ptr, skip_ptr, log_ptr, shift_ptr, weight_ptr, products_ptr, before_ptr, sums_ptr, y_ptr,
    states_ptr, first_ptr, length_ptr, row_ptr, start_ptr, chunk_ptr, reads_ptr, writes_ptr, fresh_ptr,
    block_size, share,
    X_TOKEN: tl.constexpr, BC_TOKEN: tl.constexpr, G: tl.constexpr,
    H: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    Q: tl.constexpr, SEGMENT: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, FINITE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Walk through a segment with BLOCK_P x S numbers of a head's state."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    parts: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    first, length, row, begin, end = _segment(first_ptr, length_ptr, row_ptr, start_ptr, tl.program_id(1))
    if length == 0:
        return
    head = tl.program_id(0) // parts
    p = tl.program_id(0) % parts * BLOCK_P + tl.arange(0, BLOCK_P)
    s, i = tl.arange(0, BLOCK_S), tl.arange(0, Q)
    state = _before(
        states_ptr, before_ptr, sums_ptr, reads_ptr, fresh_ptr, block_size, row, first, begin, end, head, p, s,
        H, P, S, SEGMENT,
    )  # fmt: skip
    skip = tl.load(skip_ptr + head).to(tl.float32)
    token = first.to(tl.int64)
    x_ptrs = x_ptr + (token * X_TOKEN + head * P) + (i[:, None] * X_TOKEN + p[None, :])
    y_ptrs = y_ptr + (token * (H * P) + head * P) + (i[:, None] * (H * P) + p[None, :])
    group = head // share
    bc_offset = (token * BC_TOKEN + group * S) + (i[:, None] * BC_TOKEN + s[None, :])
    chunk = (tl.load(chunk_ptr + row) + (first - begin) // Q).to(tl.int64)
    scale = (chunk * H + head) * Q
    products_ptrs = products_ptr + (chunk * G + group) * Q * Q + (i[:, None] * Q + i[None, :])
    total = tl.load(log_ptr + scale + Q - 1)
    for ahead in tl.range(0, length, Q, num_stages=STAGES):
        rows = length - ahead
        b = _tile(b_ptr, bc_offset, rows, s, S, BLOCK_S)
        c = _tile(c_ptr, bc_offset, rows, s, S, BLOCK_S)
        x = _tile(x_ptrs, tl.zeros((Q, BLOCK_P), tl.int32), rows, p, P, BLOCK_P)
        products = tl.load(products_ptrs)
        log = tl.load(log_ptr + scale + i)
        shift = tl.load(shift_ptr + scale + i)
        weight = tl.load(weight_ptr + scale + i)
        next_total = tl.load(log_ptr + scale + H * Q + Q - 1)
        y = tl.dot(c, tl.trans(state.to(c.dtype)), input_precision=DOT) * tl.exp2(log)[:, None]
        left = tl.exp2(tl.minimum(log[:, None] - shift[None, :], FINITE))
        mixed = (products.to(tl.float32) * left).to(x.dtype)
        y = tl.dot(mixed, x, acc=y, input_precision=DOT) + skip * x
        weighted = (x * weight[:, None]).to(x.dtype)
        state = tl.dot(tl.trans(weighted), b, acc=state * tl.exp2(total), input_precision=DOT)
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(i < rows)[:, None] & (p < P)[None, :])
        total = next_total
        x_ptrs += Q * X_TOKEN
        y_ptrs += Q * H * P
        bc_offset += Q * BC_TOKEN
        products_ptrs += G * Q * Q
        scale += H * Q
    if first + length == end:
        place = tl.load(writes_ptr + row) * block_size + head * P * S + p[:, None] * S + s[None, :]
        tl.store(states_ptr + place, state, mask=(p < P)[:, None] & (s < S)[None, :])


def _aot(kernel: Any, cut: Cut, *, hot: bool = True) -> AotKernel:
    """Return an entry for Mamba-2's usual shape: 128 heads of 64 numbers, 128 of each in the state."""
    types = aot_types(kernel) | {"products_ptr": "*bf16"}
    constants = shape_constants(128, 64, 128, torch.bfloat16, cut) | {"X_TOKEN": 8448, "BC_TOKEN": 8448, "G": 1}
    constants |= {"FINITE": FINITE}
    names = [name for name in kernel.arg_names if name != "PDL"]
    return AotKernel(
        kernel,
        {name: types[name] for name in names if name not in constants},
        {name: constants[name] for name in names if name in constants},
        num_warps=cut.warps, num_stages=cut.stages, hot=hot, tensor_cores="MMA", archs=ONE_OF_EACH,
    )  # fmt: skip


AOT = (
    _aot(_products, Cut()),
    _aot(_outputs, Cut(), hot=False),  # ptxas spills two of what a loop keeps, and reads them once a chunk
)

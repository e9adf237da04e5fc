"""Attention to compressed keys for Hopper: a query sees the keys all of whose tokens are there.

Two warpgroups have 64 queries of a head each, and a warp copies tiles of keys and values by TMA, from the newest to the
oldest. A warpgroup starts a tile's scores together with the weighted values of the tile before, and its softmax runs
beside that product (rung 12 of the attention ladder). Outputs are rescaled only where a maximum has grown by more than
2**8. 128 queries see the same keys but for a few, which lie in one tile or two: these have a mask. Keys and values of
the next group, which the last tile reads too, weigh 0, so they must be finite.

In Gluon, for sm_90a; no CPU runs it. Its definition is `triton_sdpa.attend_intervals`, and gradients are that one's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import compute_capability
from ridgeline.kernels.hopper.gluon_names import barriers, load_tile

LOG2E = 1.4426950408889634
KEYS, ROWS = 128, 64  # keys of a tile, queries of a warpgroup
GROWN = gl.constexpr(8.0)


@gluon.jit
def _seen(query, LENGTH: gl.constexpr, STRIDE: gl.constexpr):
    """Return the number of keys that a query sees."""
    return gl.where(query + 1 >= LENGTH, (query + 1 - LENGTH) // STRIDE + 1, 0)


@gluon.jit
def _place(T, heads):
    """Return the program's tile of queries and its head: tiles with the most keys begin first."""
    tiles = (T + 127) // 128
    return tiles - 1 - gl.program_id(0) // heads, gl.program_id(0) % heads


@gluon.jit
def _producer(descs, q_tiles, k, v, bars, sizes, places, LENGTH: gl.constexpr, STRIDE: gl.constexpr, D: gl.constexpr,
              KEYS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    q_desc, k_desc, v_desc = descs
    q_full, k_full, v_full, k_empty, v_empty = bars
    T, N, heads, per_batch, per_group = sizes
    batch_rows, head_rows, head_columns = places
    tile, head = _place(T, heads)
    row = head // per_batch * batch_rows + head % per_batch * head_rows + tile * 128
    mbarrier.expect(q_full.index(0), 128 * D * 2)
    for part in gl.static_range(2):
        at = [row + part * 64, head % per_batch * head_columns]
        load_tile(q_desc, at, q_full.index(0), q_tiles[part])
    steps = (_seen(gl.minimum(tile * 128 + 128, T) - 1, LENGTH, STRIDE) + KEYS - 1) // KEYS
    for i in range(steps):
        here = i % STAGES
        key = head // per_group * N + (steps - 1 - i) * KEYS
        mbarrier.wait(k_empty.index(here), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(k_full.index(here), KEYS * D * 2)
        load_tile(k_desc, [key, 0], k_full.index(here), k.index(here))
        mbarrier.wait(v_empty.index(here), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(v_full.index(here), KEYS * D * 2)
        load_tile(v_desc, [key, 0], v_full.index(here), v.index(here))


@gluon.jit
def _as_column(x, like):
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, like.type.layout)), 1)


@gluon.jit
def _own_sums(weights):
    """Return the sums of each thread's own weights, [64, 4]."""
    return gl.sum(gl.sum(weights.reshape([64, weights.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _softmax(s, m, total, factor):
    """Return (maxima, weights, sums, what is kept of the output, the largest growth)."""
    new = gl.maximum(m, gl.max(s, 1) * factor)
    grown = new - m
    new = gl.where(grown > GROWN, new, m)
    shrink = gl.exp2(m - new)
    weights = gl.exp2(s * factor - gl.expand_dims(new, 1))
    return new, weights, total * _as_column(shrink, total) + _own_sums(weights), shrink, gl.max(grown, 0)


@gluon.jit
def _scores(q, keys, KEYS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    nothing = gl.zeros([64, KEYS], gl.float32, layout)
    return warpgroup_mma(q, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _masked(s, first_key, query, LENGTH: gl.constexpr, STRIDE: gl.constexpr):
    key = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    seen = gl.expand_dims(key, 0) < gl.expand_dims(_seen(query, LENGTH, STRIDE), 1)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _steps(steps, q, k, v, bars, query, o, p, m, total, factor, LENGTH: gl.constexpr,
           STRIDE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Attend to all tiles but the newest. p: that one's weights."""
    _q_full, k_full, v_full, k_empty, v_empty = bars
    p_layout: gl.constexpr = p.type.layout
    for i in range(1, steps):
        here, before = i % STAGES, (i - 1) % STAGES
        mbarrier.wait(k_full.index(here), (i // STAGES) & 1)
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        s = _scores(q, k.index(here), KEYS)
        o = warpgroup_mma(p, v.index(before), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_empty.index(here), count=1)
        if i == 1:  # the few keys that not all queries see may lie in two tiles
            s = _masked(s, (steps - 2) * KEYS, query, LENGTH, STRIDE)
        m, weights, total, shrink, grown = _softmax(s, m, total, factor)
        p = gl.convert_layout(weights.to(q.dtype), p_layout)
        o, p = warpgroup_mma_wait(0, deps=(o, p))
        mbarrier.arrive(v_empty.index(before), count=1)
        if grown > GROWN:
            o = o * _as_column(shrink, o)
    return o, p, m, total


@gluon.jit
def _consumer(q, k, v, bars, outs, sizes, factor, PART: gl.constexpr, LENGTH: gl.constexpr, STRIDE: gl.constexpr,
              D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    q_full, k_full, v_full, k_empty, _v_empty = bars
    T, _N, heads, per_batch, _per_group = sizes
    out_ptr, log_ptr, o_batch, o_head, o_row = outs
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    tile, head = _place(T, heads)
    steps = (_seen(gl.minimum(tile * 128 + 128, T) - 1, LENGTH, STRIDE) + KEYS - 1) // KEYS
    query = tile * 128 + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_layout))
    total = _own_sums(gl.zeros([64, KEYS], gl.float32, s_layout))
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(_scores(q, k.index(0), KEYS),))
    mbarrier.arrive(k_empty.index(0), count=1)
    s = _masked(s, (steps - 1) * KEYS, query, LENGTH, STRIDE)
    m, weights, total, _shrink, _grown = _softmax(s, m, total, factor)
    p = gl.convert_layout(weights.to(q.dtype), p_layout)
    o = gl.zeros([64, D], gl.float32, o_layout)
    o, p, m, total = _steps(
        steps, q, k, v, bars, query, o, p, m, total, factor, LENGTH, STRIDE, KEYS, STAGES
    )  # fmt: skip
    last = (steps - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((steps - 1) // STAGES) & 1)
    o = warpgroup_mma(p, v.index(last), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=(o,))
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, s_layout))
    some = total > 0
    log = gl.where(some, m + gl.log2(gl.where(some, total, 1.0)), float("inf"))
    gl.store(log_ptr + head.to(gl.int64) * T + query, log, mask=query < T)
    o = o * _as_column(gl.where(some, 1.0 / gl.where(some, total, 1.0), 0.0), o)
    row = tile * 128 + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, o_layout))
    channel = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    out_ptr += (head // per_batch).to(gl.int64) * o_batch + (head % per_batch).to(gl.int64) * o_head
    at = gl.expand_dims(row.to(gl.int64) * o_row, 1) + gl.expand_dims(channel, 0)
    gl.store(out_ptr + at, o.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(row, 1) < T)


@gluon.jit
def compressed_kernel(
    q_desc, k_desc, v_desc, out_ptr, log_ptr, o_batch, o_head, o_row, T, N, heads, per_batch, per_group,
    batch_rows, head_rows, head_columns, factor,
    LENGTH: gl.constexpr, STRIDE: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A tile of 128 queries of one head. heads: of all sequences together, per_batch of each, N keys of a group. A
    head's queries begin at row head_rows of its sequence's, and at column head_columns, each times the head."""
    layout: gl.constexpr = k_desc.layout
    q0 = gl.allocate_shared_memory(q_desc.dtype, [64, D], layout)
    q1 = gl.allocate_shared_memory(q_desc.dtype, [64, D], layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, D], layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [STAGES, KEYS, D], layout)
    q_full = barriers(1, 1)
    k_full, v_full, k_empty, v_empty = barriers(STAGES), barriers(STAGES), barriers(STAGES, 2), barriers(STAGES, 2)
    fence_async_shared()
    bars = (q_full, k_full, v_full, k_empty, v_empty)
    sizes, outs = (T, N, heads, per_batch, per_group), (out_ptr, log_ptr, o_batch, o_head, o_row)
    places = (batch_rows, head_rows, head_columns)
    gl.warp_specialize(
        [
            (_consumer, (q0, k, v, bars, outs, sizes, factor, 0, LENGTH, STRIDE, D, KEYS, STAGES)),
            (_consumer, (q1, k, v, bars, outs, sizes, factor, 1, LENGTH, STRIDE, D, KEYS, STAGES)),
            (_producer, ((q_desc, k_desc, v_desc), (q0, q1), k, v, bars, sizes, places, LENGTH, STRIDE, D, KEYS,
                         STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def supports(q_BHTD: Tensor, k_BGND: Tensor, length: int) -> bool:
    """Return True if the kernel runs: on Hopper, with 16-bit numbers, heads of 64 or 128 channels, whose rows lie one
    behind the other by head or by token, and keys of at most 128 tokens, so that each tile of queries sees one. There
    are at least as many keys as a tile has."""
    _, heads, tokens, size = q_BHTD.shape
    fits = size in (64, 128) and q_BHTD.itemsize == 2 and length <= 2 * ROWS and k_BGND.numel() >= KEYS * size
    if not fits or compute_capability(q_BHTD.device) != (9, 0):
        return False
    by_token = q_BHTD.stride() == (tokens * heads * size, size, heads * size, 1)
    return (q_BHTD.is_contiguous() or by_token) and q_BHTD.data_ptr() % 16 == 0


def attend_compressed(
    q_BHTD: Tensor, k_BGND: Tensor, v_BGND: Tensor, length: int, stride: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention of queries to the compressed keys that they see, and the logarithm to base 2 of each one's
    sum of exponentials, float32, [B, H, T]; inf for a query without keys, whose output is 0.

    q_BHTD: see `supports`. k_BGND, v_BGND: contiguous, at least one key. length, stride: tokens of a key, and from one
    to the next.
    """
    (batch, heads, tokens, size), (groups, count) = q_BHTD.shape, k_BGND.shape[1:3]
    out, log = torch.empty_like(q_BHTD), torch.empty((batch, heads, tokens), dtype=torch.float32, device=q_BHTD.device)
    by_head = q_BHTD.is_contiguous()
    q_2 = q_BHTD.flatten(0, 2) if by_head else q_BHTD.transpose(1, 2).flatten(2).flatten(0, 1)
    places = (heads * tokens, tokens, 0) if by_head else (tokens, 0, size)
    compressed_kernel[(-(-tokens // 128) * batch * heads,)](
        _descriptor(q_2, [ROWS, size]), _descriptor(k_BGND.flatten(0, 2), [KEYS, size]),
        _descriptor(v_BGND.flatten(0, 2), [KEYS, size]), out, log, *out.stride()[:3], tokens, count, batch * heads,
        heads, heads // groups, *places, scale * LOG2E, LENGTH=length, STRIDE=stride, D=size, KEYS=KEYS,
        STAGES=2 if size == 128 else 4, num_warps=4,
    )  # fmt: skip
    return out, log


def _layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def _descriptor(x: Tensor, box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, _layout())


# ---- ahead of time --------------------------------------------------------------------------------------------------


def ahead_of_time(size: int) -> AotKernel:
    """Return the kernel for heads of `size` channels, to compile."""
    boxes = {"q_desc": [ROWS, size], "k_desc": [KEYS, size], "v_desc": [KEYS, size]}
    types = {name: f"tensordesc<bf16{box},{_layout()!r}>" for name, box in boxes.items()}
    types |= {"out_ptr": "*bf16", "log_ptr": "*fp32", **dict.fromkeys(("o_batch", "o_head", "o_row"), "i32:16")}
    counts = ("T", "N", "heads", "per_batch", "per_group", "batch_rows", "head_rows", "head_columns")
    types |= {**dict.fromkeys(counts, "i32"), "factor": "fp32"}
    constants = {"LENGTH": 32, "STRIDE": 16, "D": size, "KEYS": KEYS, "STAGES": 2 if size == 128 else 4}
    return AotKernel(compressed_kernel, types, constants, tensor_cores="HGMMA", archs=("sm_90",))


AOT = (ahead_of_time(128), ahead_of_time(64))

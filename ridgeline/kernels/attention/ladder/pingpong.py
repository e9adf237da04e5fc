"""6. pingpong: two warpgroups take turns at the tensor cores, and further rungs switch on one idea more each.

Idea      FlashAttention-3 (arXiv 2407.08608) on tensors that lie as they are, without pages: a warp copies by TMA, and
          two warpgroups have 64 queries each. A warpgroup starts a tile's scores together with the weighted values of
          the tile before. Then it passes the turn, and computes its softmax while the tensor cores serve the other.
          Rung 5 leaves the order of the two to chance.
FLOPs     As rung 4. In fp8 the tensor cores have twice the rate.
Bytes     As rung 4: from L2 keys and values once for 128 queries.
Limit     Tensor cores; with heads of 64 nearly as much the exponentials, and in fp8 the exponentials.
Next      `POLYNOMIAL`  rung 7: one or two of four exponentials by FMA instructions (FlashAttention-4)
          `THRESHOLD`   rung 8: outputs are rescaled only where a maximum has grown by more than 2**8 (the same)
          `at_once`     rung 9: the tiles with the most keys of several heads begin first (the same)
          `FP8`         rung 10: products in E4M3, scales for 64 queries and 128 keys, rotated (FlashAttention-3)
          `AHEAD`       rung 11, in `ahead.py`: scores are computed a tile ahead
          `BESIDE`      rungs 12 and 13: no turns, and all of the softmax before the wait for the product beside it

What they compute is in `ideas.py` in NumPy. Here is the device's part, in Gluon, for sm_90a; no CPU runs it.

Legend:
    L  rows of all heads, one behind the other: heads times tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.kernels.attention.ladder.ahead import _consumer_ahead
from ridgeline.kernels.attention.ladder.ideas import rounded_blocks
from ridgeline.kernels.attention.ladder.tile import (
    GROWN,
    HALF,
    _all_sums,
    _as_column,
    _no_sums,
    _operand,
    _place,
    _rounded,
    _scores,
    _softmax,
    _weighted,
)
from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.hopper.gluon_names import barriers, load_tile

LOG2E = 1.4426950408889634
KEYS, ROWS = 128, 64  # keys of a tile, queries of a warpgroup


@gluon.jit
def _producer(descs, q_tiles, k, v, bars, T, heads, per_group, at_once, D: gl.constexpr, KEYS: gl.constexpr,
              STAGES: gl.constexpr, FP8: gl.constexpr, LONGEST: gl.constexpr):  # fmt: skip
    """Fill the rings, from the newest tile of keys to the oldest."""
    q_desc, k_desc, v_desc = descs
    q_full, k_full, v_full, k_empty, v_empty, _turns = bars
    size: gl.constexpr = 1 if FP8 else 2
    tile, head = _place(T, heads, at_once, LONGEST)
    group = head // per_group
    mbarrier.expect(q_full.index(0), 128 * D * size)
    for part in gl.static_range(2):
        load_tile(q_desc, [head * T + tile * 128 + part * 64, 0], q_full.index(0), q_tiles[part])
    steps = (gl.minimum(tile * 128 + 128, T) + KEYS - 1) // KEYS
    for i in range(steps):
        here = i % STAGES
        key = (steps - 1 - i) * KEYS
        mbarrier.wait(k_empty.index(here), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(k_full.index(here), KEYS * D * size)
        load_tile(k_desc, [group * T + key, 0], k_full.index(here), k.index(here))
        mbarrier.wait(v_empty.index(here), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(v_full.index(here), KEYS * D * size)
        if FP8:
            load_tile(v_desc, [group * D, key], v_full.index(here), v.index(here))
        else:
            load_tile(v_desc, [group * T + key, 0], v_full.index(here), v.index(here))


@gluon.jit
def _consumer(
    q, k, v, bars, out_ptr, scale_ptrs, T, heads, per_group, at_once, scale_log2, PART: gl.constexpr,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, POLYNOMIAL: gl.constexpr, THRESHOLD: gl.constexpr,
    FP8: gl.constexpr, LONGEST: gl.constexpr, BESIDE: gl.constexpr,
):  # fmt: skip
    """Attend with 64 queries. Warpgroup 0 has the first turn."""
    q_full, k_full, v_full, k_empty, v_empty, turns = bars
    q_scale_ptr, k_scale_ptr, v_scale_ptr = scale_ptrs
    dtype: gl.constexpr = q.dtype
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32 if FP8 else 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 4 if FP8 else 2)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32 if FP8 else 16])
    tile, head = _place(T, heads, at_once, LONGEST)
    steps = (gl.minimum(tile * 128 + 128, T) + KEYS - 1) // KEYS
    blocks = (T + KEYS - 1) // KEYS
    group = head // per_group * blocks
    factor, less, value_scale = scale_log2, 0.0, 1.0
    grows: gl.constexpr = HALF if FP8 else GROWN
    if FP8:
        q_scale = gl.load(q_scale_ptr + head * ((T + 63) // 64) + gl.minimum(tile * 2 + PART, (T + 63) // 64 - 1))
        q_scale *= scale_log2
        factor = q_scale * gl.load(k_scale_ptr + group + steps - 1)
        less = gl.load(v_scale_ptr + group + steps - 1)
        value_scale = gl.load(v_scale_ptr + heads // per_group * blocks + head // per_group)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    if not BESIDE:
        mbarrier.wait(turns.index(PART), PART ^ 1)
    s = _scores(q, k.index(0), KEYS, FP8)
    if not BESIDE:
        mbarrier.arrive(turns.index(1 - PART), count=1)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(0), count=1)
    query = tile * 128 + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    key = (steps - 1) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, s_layout))
    s = gl.where((gl.expand_dims(key, 0) <= gl.expand_dims(query, 1)) & (gl.expand_dims(key, 0) < T), s, float("-inf"))
    m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_layout))
    total = _no_sums(s, BESIDE)
    m, weights, total, _shrink, _grown = _softmax(s, m, total, factor, less, 0, THRESHOLD, FP8, BESIDE)
    p = _rounded(weights, dtype, p_layout)
    o = gl.zeros([64, D], gl.float32, o_layout)
    for i in range(1, steps):
        here = i % STAGES
        before = (i - 1) % STAGES
        if FP8:
            less = gl.load(v_scale_ptr + group + steps - 1 - i)
            factor = q_scale * gl.load(k_scale_ptr + group + steps - 1 - i)
        mbarrier.wait(k_full.index(here), (i // STAGES) & 1)
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        if not BESIDE:
            mbarrier.wait(turns.index(PART), (i & 1) ^ PART ^ 1)
        operand = _operand(p, dtype, p_layout)  # before any product: between two, ptxas would serialize them
        s = _scores(q, k.index(here), KEYS, FP8)
        o = _weighted(operand, v.index(before), o, FP8)
        if not BESIDE:
            mbarrier.arrive(turns.index(1 - PART), count=1)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_empty.index(here), count=1)
        m, weights, total, shrink, grown = _softmax(s, m, total, factor, less, POLYNOMIAL, THRESHOLD, FP8, BESIDE)
        if not FP8:
            p = gl.convert_layout(weights.to(dtype), p_layout)
        if not BESIDE:
            o = warpgroup_mma_wait(0, deps=(o,))
        elif FP8:  # weights are handed through, so that they come before the wait
            o, weights = warpgroup_mma_wait(0, deps=(o, weights))
        else:
            o, p = warpgroup_mma_wait(0, deps=(o, p))
        if FP8:  # words that a product reads may not be written while one is under way
            p = _rounded(weights, dtype, p_layout)
        mbarrier.arrive(v_empty.index(before), count=1)
        if BESIDE:
            if grown > grows:
                o = o * _as_column(shrink, o)
        elif THRESHOLD:
            if gl.max(grown, 0) > grows:
                o = o * _as_column(shrink, o)
        else:
            o = o * _as_column(shrink, o)
    last = (steps - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((steps - 1) // STAGES) & 1)
    o = _weighted(_operand(p, dtype, p_layout), v.index(last), o, FP8)
    o = warpgroup_mma_wait(0, deps=(o,))
    o = o * _as_column(value_scale / _all_sums(total, BESIDE), o)
    row = tile * 128 + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, o_layout))
    channel = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    at = (head.to(gl.int64) * T + gl.expand_dims(row, 1)) * D + gl.expand_dims(channel, 0)
    gl.store(out_ptr + at, o.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(row, 1) < T)


@gluon.jit
def pingpong_kernel(
    q_desc, k_desc, v_desc, out_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr, T, heads, per_group, at_once, scale_log2,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, POLYNOMIAL: gl.constexpr, THRESHOLD: gl.constexpr,
    FP8: gl.constexpr, LONGEST: gl.constexpr, AHEAD: gl.constexpr, BESIDE: gl.constexpr,
):  # fmt: skip
    """A tile of 128 queries of one head. heads: of all sequences together."""
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = k_desc.layout
    v_layout: gl.constexpr = v_desc.layout
    q0 = gl.allocate_shared_memory(dtype, [64, D], layout)
    q1 = gl.allocate_shared_memory(dtype, [64, D], layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], layout)
    if FP8:
        v = gl.allocate_shared_memory(dtype, [STAGES, D, KEYS], v_layout)
    else:
        v = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], v_layout)
    q_full, turns = barriers(1, 1), barriers(2, 1)
    k_full, v_full, k_empty, v_empty = barriers(STAGES), barriers(STAGES), barriers(STAGES, 2), barriers(STAGES, 2)
    fence_async_shared()
    bars = (q_full, k_full, v_full, k_empty, v_empty, turns)
    scales = (q_scale_ptr, k_scale_ptr, v_scale_ptr)
    if AHEAD:
        gl.warp_specialize(
            [
                (_consumer_ahead, (q0, k, v, bars, out_ptr, scales, T, heads, per_group, at_once, scale_log2, 0, D,
                                   KEYS, STAGES, POLYNOMIAL, THRESHOLD, FP8, LONGEST)),
                (_consumer_ahead, (q1, k, v, bars, out_ptr, scales, T, heads, per_group, at_once, scale_log2, 1, D,
                                   KEYS, STAGES, POLYNOMIAL, THRESHOLD, FP8, LONGEST)),
                (_producer, ((q_desc, k_desc, v_desc), (q0, q1), k, v, bars, T, heads, per_group, at_once, D, KEYS,
                             STAGES, FP8, LONGEST)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (q0, k, v, bars, out_ptr, scales, T, heads, per_group, at_once, scale_log2, 0, D, KEYS,
                             STAGES, POLYNOMIAL, THRESHOLD, FP8, LONGEST, BESIDE)),
                (_consumer, (q1, k, v, bars, out_ptr, scales, T, heads, per_group, at_once, scale_log2, 1, D, KEYS,
                             STAGES, POLYNOMIAL, THRESHOLD, FP8, LONGEST, BESIDE)),
                (_producer, ((q_desc, k_desc, v_desc), (q0, q1), k, v, bars, T, heads, per_group, at_once, D, KEYS,
                             STAGES, FP8, LONGEST)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


@dataclass(frozen=True)
class PingpongSwitches:
    """The ideas of rungs 7 to 13. polynomials: exponentials of each four that are polynomials, 0 to 2. ahead: scores
    are computed a tile ahead; in 16 bits that has registers for heads of 64 alone. beside: the softmax runs beside the
    product before it; with a threshold alone, and without turns."""

    polynomials: int = 0
    threshold: bool = False
    longest: bool = False
    fp8: bool = False
    ahead: bool = False
    beside: bool = False

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "POLYNOMIAL": self.polynomials, "THRESHOLD": self.threshold, "FP8": self.fp8, "LONGEST": self.longest,
            "AHEAD": self.ahead, "BESIDE": self.beside,
        }  # fmt: skip


def stages_of(size: int, fp8: bool) -> int:
    """Return the stages of the rings that fit beside the queries: 227 KiB."""
    return 2 if size == 128 and not fp8 else 4


CACHED_BYTES = 24 << 20  # of keys and values that are worked on together: about half of the second-level cache


class Pingpong:
    """The kernel on given operands, contiguous [B, H, T, D] and [B, G, T, D] with heads of 64 or 128 channels.

    In fp8 the operands are rounded here, once; q and k may have been rotated before. T is then a multiple of 16. Rows
    behind a head's last one are read and weigh 0, so they must be finite.
    """

    def __init__(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, switches: PingpongSwitches) -> None:
        self.switches, self.scale = switches, q_BHTD.shape[-1] ** -0.5
        (batch, heads, length, size), groups = q_BHTD.shape, k_BGTD.shape[1]
        self.out_BHTD = torch.full(q_BHTD.shape, torch.nan, dtype=q_BHTD.dtype, device=q_BHTD.device)
        self.shape, self.heads, self.per_group = (length, size), batch * heads, heads // groups
        self.at_once = max(1, CACHED_BYTES // (4 * length * size)) * self.per_group
        self.scales: list[Tensor | None] = [None, None, None]
        if switches.fp8:
            (q_BHTD, q_scale), (k_BGTD, k_scale), (v_BGTD, v_scale) = (
                rounded_blocks(x, rows) for x, rows in ((q_BHTD, ROWS), (k_BGTD, KEYS), (v_BGTD, KEYS))
            )
            self.scales = [q_scale.contiguous(), k_scale.contiguous(), _relative(v_scale)]
            v_BGTD = keys_in_registers(v_BGTD.mT)
        v_box = [size, KEYS] if switches.fp8 else [KEYS, size]
        self.descriptors = [
            _descriptor(q_BHTD.flatten(0, 2), [ROWS, size]), _descriptor(k_BGTD.flatten(0, 2), [KEYS, size]),
            _descriptor(v_BGTD.flatten(0, 2), v_box),
        ]  # fmt: skip

    def __call__(self) -> Tensor:
        """Return the causal attention, [B, H, T, D]."""
        length, size = self.shape
        pingpong_kernel[(-(-length // 128) * self.heads,)](
            *self.descriptors, self.out_BHTD, *self.scales, length, self.heads, self.per_group, self.at_once,
            self.scale * LOG2E, D=size, KEYS=KEYS, STAGES=stages_of(size, self.switches.fp8),
            **self.switches.constants, num_warps=4,
        )  # fmt: skip
        return self.out_BHTD


def keys_in_registers(v_BGDT: Tensor) -> Tensor:
    """Return values by channels, whose keys lie in the order of weights in a thread's registers; see `_operand`."""
    turned = v_BGDT.unflatten(-1, (-1, 2, 4, 2)).transpose(-2, -3)
    return turned.flatten(-4).contiguous()


def _relative(scales_BGN: Tensor) -> Tensor:
    """Return the powers of 2 by which each scale is below the largest of its head, and then these largest ones."""
    largest = scales_BGN.amax(-1)
    return torch.cat([torch.log2(largest[..., None] / scales_BGN).flatten(), largest.flatten()])


def shared_layout(box: list[int], bits: int) -> Any:
    """Return the layout of a box in shared memory; rows longer than 128 bytes lie in several panels."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, box[1] * bits // 8), element_bitwidth=bits, rank=2)


def _descriptor(x: Tensor, box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, shared_layout(box, x.itemsize * 8))


# ---- ahead of time --------------------------------------------------------------------------------------------------


def ahead_of_time(size: int, switches: PingpongSwitches) -> AotKernel:
    """Return the kernel with these switches, to compile."""
    bits, kind = (8, "fp8e4nv") if switches.fp8 else (16, "bf16")
    boxes = {"q_desc": [ROWS, size], "k_desc": [KEYS, size], "v_desc": [size, KEYS] if switches.fp8 else [KEYS, size]}
    types = {name: f"tensordesc<{kind}{box},{shared_layout(box, bits)!r}>" for name, box in boxes.items()}
    scales = [f"{x}_scale_ptr" for x in "qkv"]
    types |= {"out_ptr": "*bf16", **(dict.fromkeys(scales, "*fp32") if switches.fp8 else {})}
    types |= {**dict.fromkeys(("T", "heads", "per_group", "at_once"), "i32"), "scale_log2": "fp32"}
    constants = {"D": size, "KEYS": KEYS, "STAGES": stages_of(size, switches.fp8), **switches.constants}
    constants |= {} if switches.fp8 else dict.fromkeys(scales)
    cores = "QGMMA" if switches.fp8 else "HGMMA"
    return AotKernel(pingpong_kernel, types, constants, hot=True, tensor_cores=cores, archs=("sm_90",))


AOT = (
    ahead_of_time(128, PingpongSwitches()),
    ahead_of_time(64, PingpongSwitches(polynomials=2)),
    ahead_of_time(128, PingpongSwitches(threshold=True)),
    ahead_of_time(128, PingpongSwitches(fp8=True)),
    ahead_of_time(128, PingpongSwitches(fp8=True, threshold=True, polynomials=1, ahead=True)),
    ahead_of_time(128, PingpongSwitches(threshold=True, longest=True, beside=True)),
    ahead_of_time(128, PingpongSwitches(fp8=True, threshold=True, longest=True, polynomials=1, beside=True)),
)

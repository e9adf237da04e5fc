"""Gradients in five products with a warp that copies: `backward.py` on Hopper's own instructions, in Gluon.

Idea      The tiles of FlashAttention-3 (arXiv 2407.08608): 128 keys of two warpgroups meet 64 queries a step, and all
          that a step computes lies with keys as rows. Each wait has a product beside it: exponentials that of slopes,
          slopes that of values, the barrier behind them that of keys, the store of gradients of queries the next
          scores. A warp of its own copies queries, gradients of outputs and their numbers, two steps ahead.
FLOPs     As `backward.py`: 10 D for each pair that is seen.
Bytes     As there. Programs that run together have few heads, so that queries, gradients and sums stay in the cache.
Atomics   As there: the copy engine adds a step's gradients of queries from shared memory.
Limit     Tensor cores: a step's products take 2,560 cycles, its exponentials 512, its other instructions about 900.

Legend:
    L  rows of all heads, one behind the other: heads times tokens
    U  tokens, filled up to whole tiles
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.kernels.attention.ladder.backward import rounded_kernel
from ridgeline.kernels.attention.ladder.pingpong import CACHED_BYTES, LOG2E, shared_layout
from ridgeline.kernels.attention.triton_sdpa import output_products
from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.hopper.gluon_names import add_tile, barrier, barriers, load_tile

KEYS = 128  # of a program
ROWS = {64: 64, 128: 64}  # queries of a step, by the width of heads
STAGES = gl.constexpr(3)  # steps whose queries and gradients of outputs are there


@gluon.jit
def _place(T, groups, at_once, KEYS: gl.constexpr):
    """Return the program's tile of keys and its group: those that most queries see first, a few groups at a time."""
    tiles = (T + KEYS - 1) // KEYS
    n = gl.program_id(0)
    section = n // (tiles * at_once)
    rest = n - section * tiles * at_once
    here = gl.minimum(at_once, groups - section * at_once)
    return rest // here, section * at_once + rest % here


@gluon.jit
def _producer(descs, shared, bars, less_log_ptr, less_delta_ptr, T, groups, at_once, PER_GROUP: gl.constexpr,
              D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr):  # fmt: skip
    """Copy keys and values once, and queries, gradients of outputs and their numbers step by step."""
    q_desc, k_desc, v_desc, grad_desc = descs
    q, k, v, grad, numbers = shared
    kept, full, empty = bars
    tile, group = _place(T, groups, at_once, KEYS)
    begin = tile * KEYS
    mbarrier.expect(kept.index(0), KEYS * D * 4)
    load_tile(k_desc, [group * T + begin, 0], kept.index(0), k)
    load_tile(v_desc, [group * T + begin, 0], kept.index(0), v)
    steps = (T - begin + ROWS - 1) // ROWS
    padded = (T + ROWS - 1) // ROWS * ROWS
    lanes = gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32], [32], [1], [0]))
    for n in range(steps * PER_GROUP):
        head = group * PER_GROUP + n // steps
        within = begin + n % steps * ROWS
        less_log = gl.load(less_log_ptr + head * padded + within + lanes)
        less_delta = gl.load(less_delta_ptr + head * padded + within + lanes)
        here = n % STAGES
        mbarrier.wait(empty.index(here), (n // STAGES & 1) ^ 1)
        numbers.index(here * 2).store(less_log)
        numbers.index(here * 2 + 1).store(less_delta)
        barrier()  # the arrival of one lane is behind the stores of all
        mbarrier.expect(full.index(here), ROWS * D * 4)
        load_tile(q_desc, [head * T + within, 0], full.index(here), q.index(here))
        load_tile(grad_desc, [head * T + within, 0], full.index(here), grad.index(here))


@gluon.jit
def _rounded(x):
    """Return x in bfloat16, two numbers an instruction: one alone takes the unit of exponentials."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, True, 2)


@gluon.jit
def _scores(k, q, KEYS: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """Start the product of keys with the queries of a step."""
    nothing = gl.zeros([KEYS, ROWS], gl.float32, layout)
    return warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _begun(numbers, KEYS: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """Return the sums that a product begins with: a number of each query, for all keys."""
    return gl.expand_dims(numbers.load(gl.SliceLayout(0, layout)), 0).broadcast_to([KEYS, ROWS])


@gluon.jit
def _steps(
    first, last, end, n, s, dk, dv, dq_desc, shared, sums, bars, row, scale,
    MASKED: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Let the keys meet steps first … last - 1 of one head, of which step 0 begins at the tile's first key.

    s: scores of step `first`. When a step begins or ends, its scores are there, and no product is under way.
    n: steps so far, of all heads. end: steps of this head. row: of step 0, in tensors of queries.
    """
    q, k, v, grad, numbers = shared
    slopes, dq_tile = sums
    _kept, full, empty = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 2] if ROWS == 64 else [8, 1], [16, D // 2 if ROWS == 64 else D, 16]
    )
    for i in range(first, last):
        here, after = n % STAGES, (n + 1) % STAGES
        begun = _begun(numbers.index(here * 2 + 1), KEYS, ROWS, s_layout)
        dp = warpgroup_mma(v, grad.index(here).permute((1, 0)), begun, is_async=True)
        weights = gl.exp2(s * scale + gl.expand_dims(numbers.index(here * 2).load(gl.SliceLayout(0, s_layout)), 0))
        if MASKED:
            key = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, s_layout)), 1)
            query = gl.expand_dims(i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, s_layout)), 0)
            weights = gl.where(key <= query, weights, 0.0)
        p = gl.convert_layout(_rounded(weights), p_layout)
        dv = warpgroup_mma(p, grad.index(here), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        # The rounded weights once more: 16 registers fewer are alive.
        given = _rounded(gl.convert_layout(p, s_layout).to(gl.float32) * dp)
        slopes.store(given)
        dk = warpgroup_mma(gl.convert_layout(given, p_layout), q.index(here), dk, is_async=True)
        tma.store_wait(0)
        fence_async_shared()
        barrier()
        dv = warpgroup_mma_wait(1, deps=(dv,))
        nothing = gl.zeros([ROWS, D], gl.float32, dq_layout)
        dq = warpgroup_mma(slopes.permute((1, 0)), k, nothing, use_acc=False, is_async=True)
        mbarrier.wait(full.index(after), (n + 1) // STAGES & 1, pred=i + 1 < end)
        dk = warpgroup_mma_wait(1, deps=(dk,))
        s_after = _scores(k, q.index(after), KEYS, ROWS, s_layout)  # behind the last step: not used
        dq = warpgroup_mma_wait(1, deps=(dq,))
        dq_tile.store(dq)
        fence_async_shared()
        mbarrier.arrive(empty.index(here), count=1)
        barrier()
        add_tile(dq_desc, [row + i * ROWS, 0], dq_tile)
        s = warpgroup_mma_wait(0, deps=(s_after,))
        n += 1
    return n, s, dk, dv


@gluon.jit
def _consumer(
    dq_desc, outs, shared, sums, bars, T, groups, at_once, scale, natural,
    PER_GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and its values, and add to those of queries."""
    q, k, _v, _grad, _numbers = shared
    kept, full, _empty = bars
    dk_ptr, dv_ptr = outs
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    tile, group = _place(T, groups, at_once, KEYS)
    begin = tile * KEYS
    end = (T - begin + ROWS - 1) // ROWS
    masked = gl.minimum(KEYS // ROWS, end)
    dk = gl.zeros([KEYS, D], gl.float32, sums_layout)
    dv = gl.zeros([KEYS, D], gl.float32, sums_layout)
    n = 0
    mbarrier.wait(kept.index(0), 0)
    for within in range(PER_GROUP):
        head = group * PER_GROUP + within
        mbarrier.wait(full.index(n % STAGES), n // STAGES & 1)
        s = warpgroup_mma_wait(0, deps=(_scores(k, q.index(n % STAGES), KEYS, ROWS, s_layout),))
        n, s, dk, dv = _steps(
            0, masked, end, n, s, dk, dv, dq_desc, shared, sums, bars, head * T + begin, scale, True, D, ROWS, KEYS
        )
        n, s, dk, dv = _steps(
            masked, end, end, n, s, dk, dv, dq_desc, shared, sums, bars, head * T + begin, scale, False, D, ROWS, KEYS
        )
    row = begin + gl.arange(0, KEYS, gl.SliceLayout(1, sums_layout))
    channel = gl.arange(0, D, gl.SliceLayout(0, sums_layout))
    at = (group.to(gl.int64) * T + gl.expand_dims(row, 1)) * D + gl.expand_dims(channel, 0)
    inside = gl.expand_dims(row, 1) < T
    gl.store(dk_ptr + at, (dk * natural).to(dk_ptr.dtype.element_ty), mask=inside)
    gl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def roles_kernel(
    q_desc, k_desc, v_desc, grad_desc, dq_desc, dk_ptr, dv_ptr, less_log_ptr, less_delta_ptr, T, groups, at_once, scale,
    natural, PER_GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """A tile of keys of one group of heads. dq_desc: the sums of gradients of q, float32."""
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = q_desc.layout
    dq_layout: gl.constexpr = dq_desc.layout
    numbers_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slopes_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], layout)
    grad = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], layout)
    k = gl.allocate_shared_memory(dtype, [KEYS, D], layout)
    v = gl.allocate_shared_memory(dtype, [KEYS, D], layout)
    slopes = gl.allocate_shared_memory(dtype, [KEYS, ROWS], slopes_layout)
    dq_tile = gl.allocate_shared_memory(gl.float32, [ROWS, D], dq_layout)
    numbers = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], numbers_layout)
    bars = barriers(1), barriers(STAGES), barriers(STAGES)
    fence_async_shared()
    shared, descs, outs = (q, k, v, grad, numbers), (q_desc, k_desc, v_desc, grad_desc), (dk_ptr, dv_ptr)
    gl.warp_specialize(
        [
            (_consumer, (dq_desc, outs, shared, (slopes, dq_tile), bars, T, groups, at_once, scale, natural, PER_GROUP,
                         D, ROWS, KEYS)),
            (_producer, (descs, shared, bars, less_log_ptr, less_delta_ptr, T, groups, at_once, PER_GROUP, D, ROWS,
                         KEYS)),
        ],
        [1],
        [24],
    )  # fmt: skip


class RolesBackward:
    """The gradients of causal attention with given operands, contiguous bfloat16 [B, H, T, D] and [B, G, T, D] with
    heads of 64 or 128 channels; B H T is below 2**31.

    out_BHTD, log_BHT: of `attend_intervals`. Rows behind a head's last one are read and weigh 0, so they must be
    finite.
    """

    def __init__(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, out_BHTD: Tensor, log_BHT: Tensor) -> None:
        (batch, heads, self.length, size), groups = q_BHTD.shape, k_BGTD.shape[1]
        self.qkv, self.out_BHTD = (q_BHTD, k_BGTD, v_BGTD), out_BHTD
        self.groups, self.per_group, self.scale = batch * groups, heads // groups, size**-0.5
        # Keys, values, queries, gradients of outputs and sums of the groups that are worked on together.
        self.at_once = max(1, CACHED_BYTES // ((4 + 8 * self.per_group) * self.length * size))
        self.rows = ROWS[size]
        self.sums_BHTD = torch.zeros_like(q_BHTD, dtype=torch.float32)
        self.dq = _descriptor(self.sums_BHTD, self.rows)
        padded = triton.cdiv(self.length, self.rows) * self.rows
        numbers = log_BHT.new_zeros(2, batch * heads * padded + self.rows)  # a step more is read, and not used
        self.less_log_BHU, self.less_delta_BHU = (x[: -self.rows].view(batch, heads, padded) for x in numbers)
        self.less_log_BHU.fill_(float("-inf"))
        self.less_log_BHU[..., : self.length] = -log_BHT
        self.grads = [torch.full_like(x, torch.nan) for x in self.qkv]
        self.descriptors = [_descriptor(x, rows) for x, rows in zip(self.qkv, (self.rows, KEYS, KEYS), strict=True)]

    def __call__(self, grad_BHTD: Tensor) -> list[Tensor]:
        """Return the gradients of q, k and v; the next call writes to the same memory."""
        self.less_delta_BHU[..., : self.length] = -output_products(self.out_BHTD, grad_BHTD)
        self.sums_BHTD.zero_()
        roles_kernel[(self.groups * triton.cdiv(self.length, KEYS),)](
            *self.descriptors, _descriptor(grad_BHTD, self.rows), self.dq, *self.grads[1:], self.less_log_BHU,
            self.less_delta_BHU, self.length, self.groups, self.at_once, self.scale * LOG2E, self.scale,
            PER_GROUP=self.per_group, D=grad_BHTD.shape[-1], ROWS=self.rows, KEYS=KEYS, num_warps=8,
        )  # fmt: skip
        count = self.sums_BHTD.numel()
        rounded_kernel[(triton.cdiv(count, 4096),)](self.sums_BHTD, self.grads[0], count, self.scale, SIZE=4096)
        return self.grads


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    x_LD = x.flatten(0, 2)
    box = [rows, x.shape[-1]]
    return TensorDescriptor(x_LD, list(x_LD.shape), list(x_LD.stride()), box, shared_layout(box, x.itemsize * 8))


# ---- ahead of time --------------------------------------------------------------------------------------------------


def ahead_of_time(size: int) -> AotKernel:
    """Return the kernel for heads of so many channels, to compile for bfloat16."""
    rows = ROWS[size]
    boxes = {"q_desc": [rows, size], "k_desc": [KEYS, size], "v_desc": [KEYS, size], "grad_desc": [rows, size]}
    types = {name: f"tensordesc<bf16{box},{shared_layout(box, 16)!r}>" for name, box in boxes.items()}
    types["dq_desc"] = f"tensordesc<fp32{[rows, size]},{shared_layout([rows, size], 32)!r}>"
    types |= {"dk_ptr": "*bf16", "dv_ptr": "*bf16", "less_log_ptr": "*fp32", "less_delta_ptr": "*fp32"}
    types |= {"T": "i32", "groups": "i32", "at_once": "i32", "scale": "fp32", "natural": "fp32"}
    constants = {"PER_GROUP": 1, "D": size, "ROWS": rows, "KEYS": KEYS}
    return AotKernel(
        roles_kernel, types, constants, hot=size == 64, tensor_cores="HGMMA", archs=("sm_90",), num_warps=8,
    )  # fmt: skip


AOT = tuple(ahead_of_time(size) for size in (128, 64))

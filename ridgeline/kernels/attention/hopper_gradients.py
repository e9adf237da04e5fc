"""Gradients of attention to intervals of keys in five products with a warp that copies, on Hopper, in Gluon.

Idea      `triton_sdpa.py` computes scores and the gradients of weights twice, in seven products. Here a program has a
          tile of keys, computes both once, and adds to the gradients of queries in memory. The tiles are those of
          FlashAttention-3 (arXiv 2407.08608): 128 keys of two warpgroups meet 64 queries a step, 128 where heads have
          64 channels, and all that a step computes lies with keys as rows. Each wait has a product beside it:
          exponentials that of slopes, slopes that of values, the barrier behind them that of keys, the store of
          gradients of queries the next scores. A warp of its own copies queries, gradients of outputs and their
          numbers, two steps ahead, from head to head.
Masks     Each query sees an interval of keys, whose ends never decrease from a query to the next (`KeyMasks`). So a
          tile of keys meets queries from the first that sees some of it to the last one. Between those there are
          queries that see all of it, whose steps have no mask.
FLOPs     10 D for each pair that is seen.
Bytes     As the products of a tile need them. Programs that run together have few heads, so that queries, gradients and
          sums stay in the cache.
Atomics   The copy engine adds a step's gradients of queries from shared memory, in float32 and in no order: their last
          bits differ from run to run. Those of keys and values have one order.
Limit     Tensor cores: a step's products take 2,560 cycles, its exponentials 512, its other instructions about 900.

No CPU runs it. Its definition is `triton_sdpa.interval_gradients`.

Legend:
    B  sequences
    H  query heads
    G  key/value heads
    Q  queries
    K  keys
    D  head width
    N  tiles of keys
"""

from __future__ import annotations

from collections.abc import Sequence

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

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import compute_capability
from ridgeline.kernels.hopper.gluon_names import add_tile, barrier, barriers, load_tile, viewed

KEYS = 128  # of a program
ROWS = {64: 128, 128: 64}  # queries of a step, by width
COPYING = {64: 24, 128: 24}  # registers of the warp that copies, by width: those of others spill less with fewer
STAGES = gl.constexpr(3)  # steps whose queries and gradients of outputs are there
LOG2E = 1.4426950408889634
CACHED_BYTES = 24 << 20  # that are worked on together: about half of the second-level cache


@gluon.jit
def _place(K, groups, at_once, KEYS: gl.constexpr):
    """Return the program's tile of keys and its group: those that most queries see first where the mask is causal, a
    few groups at a time."""
    tiles = (K + KEYS - 1) // KEYS
    n = gl.program_id(0)
    section = n // (tiles * at_once)
    rest = n - section * tiles * at_once
    here = gl.minimum(at_once, groups - section * at_once)
    return rest // here, section * at_once + rest % here


@gluon.jit
def _span(ranges_ptr, tile, K, ROWS: gl.constexpr, KEYS: gl.constexpr):
    """Return the first query that a tile of keys meets, the first one without a mask, the first one behind those, and
    the end; then the numbers of steps with a mask and without."""
    begin, whole = gl.load(ranges_ptr + tile * 4), gl.load(ranges_ptr + tile * 4 + 1)
    ragged, end = gl.load(ranges_ptr + tile * 4 + 2), gl.load(ranges_ptr + tile * 4 + 3)
    end = gl.maximum(end, begin)
    whole = gl.where(tile * KEYS + KEYS > K, end, gl.minimum(whole, end))  # no query sees keys behind the last one
    ragged = gl.minimum(gl.maximum(ragged, whole), end)
    masked = (whole - begin + ROWS - 1) // ROWS + (end - ragged + ROWS - 1) // ROWS
    return begin, whole, ragged, end, masked, (ragged - whole) // ROWS


@gluon.jit
def _counts(span, per_group):
    """Return the number of steps with a mask of all heads, and that of all steps. At least one has a mask, whatever it
    meets: a loop that always runs leaves the next one more registers."""
    masked = gl.maximum(span[4] * per_group, 1)
    return masked, masked + span[5] * per_group


@gluon.jit
def _first(span, MASKED: gl.constexpr):
    """Return the first query of the first step with a mask, or of the first one without."""
    begin, whole, ragged, _end, _masked, _whole = span
    return gl.where(begin < whole, begin, ragged) if MASKED else whole


@gluon.jit
def _next(row, span, MASKED: gl.constexpr, ROWS: gl.constexpr):
    """Return the first query of the step behind this one, of those with a mask or without, and if it is that of the
    next head."""
    _begin, whole, ragged, end, _masked, _whole = span
    row += ROWS
    if MASKED:
        row = gl.where(row == whole, ragged, row)
        over = row >= end
    else:
        over = row >= ragged
    return gl.where(over, _first(span, MASKED), row), over


@gluon.jit
def _boxed(tile, desc):
    """Return rows of a head as a box of the tensor."""
    shape: gl.constexpr = [1, 1, tile.shape[0], tile.shape[1]]
    layout: gl.constexpr = desc.layout
    return viewed(tile, shape, layout)


@gluon.jit
def _producer(
    descs, shared, bars, log_ptr, delta_ptr, first_ptr, behind_ptr, ranges_ptr, Q, K, G, per_group, tile, group,
    WIDTH: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Copy keys and values once, and queries, gradients of outputs, their numbers and intervals step by step."""
    q_desc, k_desc, v_desc, grad_desc = descs
    q, k, v, grad, numbers, ends, places = shared
    kept, full, empty = bars
    batch, own = group // G, group % G
    span = _span(ranges_ptr, tile, K, ROWS, KEYS)
    mbarrier.expect(kept.index(0), KEYS * WIDTH * 4)
    load_tile(k_desc, [batch, own, tile * KEYS, 0], kept.index(0), _boxed(k, k_desc))
    load_tile(v_desc, [batch, own, tile * KEYS, 0], kept.index(0), _boxed(v, v_desc))
    copied = batch, own * per_group, tile, q, grad, numbers, ends, places, full, empty
    pointers = log_ptr, delta_ptr, first_ptr, behind_ptr
    masked, total = _counts(span, per_group)
    _copied(0, masked, copied, q_desc, grad_desc, pointers, span, Q, G * per_group, True, WIDTH, ROWS, KEYS)
    _copied(masked, total, copied, q_desc, grad_desc, pointers, span, Q, G * per_group, False, WIDTH, ROWS, KEYS)


@gluon.jit
def _copied(
    low, high, copied, q_desc, grad_desc, pointers, span, Q, H,
    MASKED: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Copy what steps low … high - 1 of all heads need, those with a mask or those without."""
    batch, head, tile, q, grad, numbers, ends, places, full, empty = copied
    log_ptr, delta_ptr, first_ptr, behind_ptr = pointers
    lanes = gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32], [32], [1], [0]))
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = _first(span, MASKED)
    for n in range(low, high):
        there = row + lanes < Q
        at = (batch * H + head).to(gl.int64) * Q + row
        log = gl.load(log_ptr + at + lanes, mask=there, other=float("inf"))
        delta = gl.load(delta_ptr + at + lanes, mask=there, other=0.0)
        here = n % STAGES
        if MASKED:
            first = gl.load(first_ptr + row + lanes, mask=there, other=0)
            behind = gl.load(behind_ptr + row + lanes, mask=there, other=0)
            mbarrier.wait(empty.index(here), (n // STAGES & 1) ^ 1)
            ends.index(here * 2).store(first - tile * KEYS)
            ends.index(here * 2 + 1).store(behind - first)
        else:
            mbarrier.wait(empty.index(here), (n // STAGES & 1) ^ 1)
        places.index(here).store(gl.zeros([1], gl.int32, one) + ((batch * H + head) * Q + row))
        numbers.index(here * 2).store(-log)
        numbers.index(here * 2 + 1).store(-delta)
        barrier()  # the arrival of one lane is behind the stores of all
        mbarrier.expect(full.index(here), ROWS * WIDTH * 4)
        load_tile(q_desc, [batch, head, row, 0], full.index(here), _boxed(q.index(here), q_desc))
        load_tile(grad_desc, [batch, head, row, 0], full.index(here), _boxed(grad.index(here), grad_desc))
        row, over = _next(row, span, MASKED, ROWS)
        head += over.to(gl.int32)


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
def _of_queries(line, layout: gl.constexpr):
    """Return a number of each query, [1, ROWS]."""
    return gl.expand_dims(line.load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def _steps(
    low, high, total, s, dk, dv, dq_desc, shared, sums, bars, scale,
    MASKED: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Let the keys meet steps low … high - 1 of all heads of their group, those with a mask or those without.

    s: scores of step `low`. When a step begins or ends, its scores are there, and no product is under way.
    total: steps of both kinds.
    """
    q, k, v, grad, numbers, ends, places = shared
    slopes, dq_tile = sums
    _kept, full, empty = bars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, WIDTH, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 2] if ROWS == 64 else [8, 1], [16, WIDTH // 2 if ROWS == 64 else WIDTH, 16]
    )
    for n in range(low, high):
        here, after = n % STAGES, (n + 1) % STAGES
        if MASKED:
            key = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(1, s_layout)), 1)
            within = (key - _of_queries(ends.index(here * 2), s_layout)).to(gl.uint32)
            s = gl.where(within < _of_queries(ends.index(here * 2 + 1), s_layout).to(gl.uint32), s, float("-inf"))
        begun = _of_queries(numbers.index(here * 2 + 1), s_layout).broadcast_to([KEYS, ROWS])
        dp = warpgroup_mma(v, grad.index(here).permute((1, 0)), begun, is_async=True)
        weights = gl.exp2(s * scale + _of_queries(numbers.index(here * 2), s_layout))
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
        nothing = gl.zeros([ROWS, WIDTH], gl.float32, dq_layout)
        dq = warpgroup_mma(slopes.permute((1, 0)), k, nothing, use_acc=False, is_async=True)
        mbarrier.wait(full.index(after), (n + 1) // STAGES & 1, pred=n + 1 < total)
        dk = warpgroup_mma_wait(1, deps=(dk,))
        s_after = _scores(k, q.index(after), KEYS, ROWS, s_layout)  # behind the last step: not used
        dq = warpgroup_mma_wait(1, deps=(dq,))
        dq_tile.store(dq)
        fence_async_shared()
        place = gl.sum(places.index(here).load(gl.BlockedLayout([1], [32], [8], [0])), 0)
        mbarrier.arrive(empty.index(here), count=1)
        barrier()
        add_tile(dq_desc, [place, 0], dq_tile)
        s = warpgroup_mma_wait(0, deps=(s_after,))
    return s, dk, dv


@gluon.jit
def _consumer(
    dq_desc, outs, shared, sums, bars, ranges_ptr, K, G, per_group, tile, group, scale, natural,
    D: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and its values, and add to those of queries."""
    q, k, _v, _grad, _numbers, _ends, _places = shared
    kept, full, _empty = bars
    dk_ptr, dv_ptr, of_batch, of_group, of_key = outs
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, WIDTH, 16])
    batch, own = group // G, group % G
    span = _span(ranges_ptr, tile, K, ROWS, KEYS)
    masked, total = _counts(span, per_group)
    dk = gl.zeros([KEYS, WIDTH], gl.float32, sums_layout)
    dv = gl.zeros([KEYS, WIDTH], gl.float32, sums_layout)
    mbarrier.wait(kept.index(0), 0)
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(_scores(k, q.index(0), KEYS, ROWS, s_layout),))
    s, dk, dv = _steps(
        0, masked, total, s, dk, dv, dq_desc, shared, sums, bars, scale, True, WIDTH, ROWS, KEYS,
    )  # fmt: skip
    s, dk, dv = _steps(
        masked, total, total, s, dk, dv, dq_desc, shared, sums, bars, scale, False, WIDTH, ROWS, KEYS,
    )  # fmt: skip
    tma.store_wait(0)
    row = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, sums_layout))
    channel = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, sums_layout)), 0)
    start = batch.to(gl.int64) * of_batch + own.to(gl.int64) * of_group
    at = start + gl.expand_dims(row.to(gl.int64) * of_key, 1) + channel
    inside = gl.expand_dims(row, 1) < K
    if D < WIDTH:
        inside = inside & (channel < D)
    gl.store(dk_ptr + at, (dk * natural).to(dk_ptr.dtype.element_ty), mask=inside)
    gl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def gradients_kernel(
    q_desc, k_desc, v_desc, grad_desc, dq_desc, dk_ptr, dv_ptr, log_ptr, delta_ptr, first_ptr, behind_ptr, ranges_ptr,
    of_batch, of_group, of_key, Q, K, G, per_group, groups, at_once, scale, natural,
    D: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    COPYING: gl.constexpr,
):  # fmt: skip
    """A tile of keys of one group of heads. dq_desc: the sums of gradients of q, float32, with
    heads one behind the other: rows behind the last one of a head add 0 to the next one's. of_…: strides of dk and dv.
    COPYING: registers of the warp that copies."""
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    wide_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], layout)
    grad = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], layout)
    k = gl.allocate_shared_memory(dtype, [KEYS, WIDTH], layout)
    v = gl.allocate_shared_memory(dtype, [KEYS, WIDTH], layout)
    slopes = gl.allocate_shared_memory(dtype, [KEYS, ROWS], layout)
    dq_tile = gl.allocate_shared_memory(gl.float32, [ROWS, WIDTH], wide_layout)
    numbers = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], line)
    ends = gl.allocate_shared_memory(gl.int32, [2 * STAGES, ROWS], line)
    places = gl.allocate_shared_memory(gl.int32, [STAGES, 1], line)
    bars = barriers(1), barriers(STAGES), barriers(STAGES)
    fence_async_shared()
    shared, descs = (q, k, v, grad, numbers, ends, places), (q_desc, k_desc, v_desc, grad_desc)
    tile, group = _place(K, groups, at_once, KEYS)
    outs = dk_ptr, dv_ptr, of_batch, of_group, of_key
    gl.warp_specialize(
        [
            (_consumer, (dq_desc, outs, shared, (slopes, dq_tile), bars, ranges_ptr, K, G, per_group, tile, group,
                         scale, natural, D, WIDTH, ROWS, KEYS)),
            (_producer, (descs, shared, bars, log_ptr, delta_ptr, first_ptr, behind_ptr, ranges_ptr, Q, K, G, per_group,
                         tile, group, WIDTH, ROWS, KEYS)),
        ],
        [1],
        [COPYING],
    )  # fmt: skip


@gluon.jit
def _rounded_kernel(
    sums_ptr, out_ptr, of_batch, of_head, of_row, H, Q, natural,
    D: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Round the sums of gradients of some queries of a head, times the scale."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    channel = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, layout)), 0)
    batch, head = gl.program_id(1) // H, gl.program_id(1) % H
    there = (gl.expand_dims(row, 1) < Q) & (channel < D)
    sums = gl.load(
        sums_ptr + gl.expand_dims(gl.program_id(1).to(gl.int64) * Q + row, 1) * D + channel, mask=there, other=0.0
    )
    at = batch.to(gl.int64) * of_batch + head.to(gl.int64) * of_head + gl.expand_dims(row.to(gl.int64) * of_row, 1)
    gl.store(out_ptr + at + channel, (sums * natural).to(out_ptr.dtype.element_ty), mask=there)


def width_of(size: int) -> int:
    """Return the channels of a tile for heads of so many."""
    return 64 if size <= 64 else 128


def rows_of(size: int) -> int:
    """Return the queries of a step for heads of so many channels."""
    return ROWS[width_of(size)]


def supports(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor) -> bool:
    """Return True for operands that these kernels take: bfloat16 on Hopper, heads of 40 to 128 channels, a multiple of
    8, whose rows and heads lie apart by multiples of 16 bytes."""
    size = q_BHQD.shape[-1]
    fits = compute_capability(q_BHQD.device)[0] == 9 and 40 <= size <= 128 and size % 8 == 0
    return fits and all(x.dtype == torch.bfloat16 and _aligned(x) for x in (q_BHQD, k_BGKD, v_BGKD))


def _aligned(x: Tensor) -> bool:
    steps = (stride for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1)
    return (
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(step > 0 and step % (16 // x.itemsize) == 0 for step in steps)
    )


def gradients(
    qkv: tuple[Tensor, Tensor, Tensor],
    grad_BHQD: Tensor,
    log_BHQ: Tensor,
    delta_BHQ: Tensor,
    intervals: tuple[Tensor, Tensor],
    ranges_N4: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `triton_sdpa.interval_gradients`. ranges_N4: the queries that see each tile of `KEYS` keys, in tiles of
    `rows_of`, int32 (`triton_sdpa.ranges_of`)."""
    q_BHQD, k_BGKD, v_BGKD = qkv
    (batch, heads, queries, size), (groups, keys) = q_BHQD.shape, k_BGKD.shape[1:3]
    if not _aligned(grad_BHQD):
        grad_BHQD = grad_BHQD.contiguous()
    width, per_group, rows = width_of(size), heads // groups, rows_of(size)
    # Keys, values, queries, gradients of outputs and sums of the groups that are worked on together.
    at_once = max(1, CACHED_BYTES // (4 * max(keys, queries) * size * (1 + 2 * per_group)))
    dq_BHQD, dk_BGKD = torch.empty_like(q_BHQD), torch.empty_like(k_BGKD)
    dv_BGKD = torch.empty_strided(dk_BGKD.shape, dk_BGKD.stride(), dtype=v_BGKD.dtype, device=v_BGKD.device)
    sums_LD = torch.zeros(batch * heads * queries, size, dtype=torch.float32, device=q_BHQD.device)
    box = [rows, width]
    sums = TensorDescriptor(sums_LD, list(sums_LD.shape), list(sums_LD.stride()), box, box_layout(2, 32))
    given = (q_BHQD, rows), (k_BGKD, KEYS), (v_BGKD, KEYS), (grad_BHQD, rows)
    gradients_kernel[(batch * groups * triton.cdiv(keys, KEYS),)](
        *(_descriptor(x, count, width) for x, count in given), sums, dk_BGKD, dv_BGKD, log_BHQ, delta_BHQ, *intervals,
        ranges_N4, *dk_BGKD.stride()[:3], queries, keys, groups, per_group, batch * groups, at_once, scale * LOG2E,
        scale, D=size, WIDTH=width, ROWS=rows, KEYS=KEYS, COPYING=COPYING[width], num_warps=8,
    )  # fmt: skip
    _rounded_kernel[(triton.cdiv(queries, rows), batch * heads)](
        sums_LD, dq_BHQD, *dq_BHQD.stride()[:3], heads, queries, scale, D=size, WIDTH=width, ROWS=rows, num_warps=4
    )
    return dq_BHQD, dk_BGKD, dv_BGKD


def box_layout(rank: int, bits: int) -> gl.NVMMASharedLayout:
    """Return the layout of a box in shared memory; rows longer than 128 bytes lie in several panels."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=rank)


def _descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Return x as the copy engine sees it: rows behind a head's last one and channels behind its last are 0."""
    strides = [step if size > 1 else x.shape[-1] for step, size in zip(x.stride(), x.shape, strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], [1, 1, rows, width], box_layout(4, 16))


# ---- ahead of time --------------------------------------------------------------------------------------------------


def ahead_of_time(size: int) -> AotKernel:
    """Return the kernel for heads of so many channels, to compile for bfloat16."""
    width, rows = width_of(size), rows_of(size)
    counts = {"q": rows, "k": KEYS, "v": KEYS, "grad": rows}
    types = {f"{x}_desc": f"tensordesc<bf16{[1, 1, n, width]},{box_layout(4, 16)!r}>" for x, n in counts.items()}
    types["dq_desc"] = f"tensordesc<fp32{[rows, width]},{box_layout(2, 32)!r}>"
    types |= {"dk_ptr": "*bf16", "dv_ptr": "*bf16", "log_ptr": "*fp32", "delta_ptr": "*fp32"}
    types |= dict.fromkeys(("first_ptr", "behind_ptr", "ranges_ptr"), "*i32")
    types |= dict.fromkeys(("of_batch", "of_group", "of_key"), "i32:16")
    types |= dict.fromkeys(("Q", "K", "G", "per_group", "groups", "at_once"), "i32")
    types |= {"scale": "fp32", "natural": "fp32"}
    constants = {"D": size, "WIDTH": width, "ROWS": rows, "KEYS": KEYS, "COPYING": COPYING[width]}
    return AotKernel(
        gradients_kernel, types, constants, tensor_cores="HGMMA", archs=("sm_90",), num_warps=8,
    )  # fmt: skip


AOT: Sequence[AotKernel] = (ahead_of_time(128), ahead_of_time(64))

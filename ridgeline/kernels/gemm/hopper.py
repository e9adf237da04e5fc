"""Linear maps of dozens to hundreds of tokens on Hopper, at the memory's rate: bulk copies, warpgroup MMA, PDL.

Weights are the left operand of the matrix units, and tokens are the columns. One producer warp of a program streams
blocks of weights and of x into a deep ring of shared memory. It asks for the first weights while the kernel before
still runs, since weights are never written. All other warps multiply and finish the tile: bias, gated activation,
rounding.

A tile is ROWS weight rows, 16 for each warp. A gated pair's tile has two parts: so many gate rows, and the matching up
rows. If tiles are few, SPLIT programs share the inputs of one. They write float32 sums, wait for each other, and each
of them adds up a share of the tokens in a fixed order. They must all fit on the device at once, or the wait would never
end.

Legend:
    C  weight rows of one part, which are the outputs of a tile
    T  tokens of a tile
    S  tokens of a share
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
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

from ridgeline.kernels.activation.triton import gated
from ridgeline.kernels.aot import AotKernel
from ridgeline.kernels.gemm.choose import Stream
from ridgeline.kernels.gluon_names import barrier, barriers, load_tile, viewed
from ridgeline.kernels.launch import launch_options, num_multiprocessors

PANEL = gl.constexpr(64)  # columns in one swizzled panel of shared memory: 128 bytes of a 16-bit type


def launch_stream(plan: Stream, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gate: str | None) -> Tensor:
    """Return x · weightᵀ + bias: [T, O], or with a gate act(first half) * second half: [T, F]. 16-bit types."""
    (tokens, inputs), device = x_TI.shape, x_TI.device
    outputs = len(weight_OI) // 2 if gate else len(weight_OI)
    tiles = triton.cdiv(outputs, plan.rows) * triton.cdiv(tokens, plan.tokens)
    programs = min(tiles * plan.split, num_multiprocessors(device))
    y_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=device)
    sums, arrivals = x_TI, x_TI  # any pointer will do where nothing is split
    if plan.split > 1:
        assert programs == tiles * plan.split
        size = programs * plan.rows * plan.tokens * (2 if gate else 1)
        sums = torch.empty(size, dtype=torch.float32, device=device)
        arrivals = _arrivals(device)[plan.split]
    stream_kernel[(programs,)](
        _descriptor(x_TI, min(plan.tokens, 32)), _descriptor(weight_OI.contiguous(), plan.rows),
        x_TI if bias_O is None else bias_O, y_TO, sums, arrivals, tokens, outputs, inputs,
        ROWS=plan.rows, TOKENS=plan.tokens, BLOCK=plan.block, STAGES=plan.stages, SPLIT=plan.split,
        BIAS=bias_O is not None, GATE=gate or "", num_warps=plan.rows // 16, **launch_options(device),
    )  # fmt: skip
    return y_TO


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, PANEL.value], _descriptor_layout())


@cache
def _descriptor_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@cache
def _arrivals(device: torch.device) -> dict[int, Tensor]:
    """Return a counter per tile for each SPLIT. Between launches a counter is a multiple of its SPLIT, so every SPLIT
    has its own.

    They are made by the first eager launch, which comes before any graph is captured.
    """
    return {split: torch.zeros(512, dtype=torch.int32, device=device) for split in (2, 4, 8)}


@gluon.jit
def _item(item, token_tiles, blocks, SPLIT: gl.constexpr):
    """Return (row tile, token tile, first and last input block) of a work index. Items of one row tile run side by
    side."""
    part = item % SPLIT
    tile = item // SPLIT
    return tile // token_tiles, tile % token_tiles, part * blocks // SPLIT, (part + 1) * blocks // SPLIT


@gluon.jit
def _load_tokens(x_desc, x, full, stage, token, first, tokens, PANELS: gl.constexpr):
    """Copy a stage's block of x. Boxes beyond the last token would be slow to fill with zeros; the first box is copied
    in their place."""
    layout: gl.constexpr = x_desc.layout
    BOX: gl.constexpr = x_desc.block_shape[0]
    BOXES: gl.constexpr = x.shape[1] // BOX
    for panel in gl.static_range(PANELS):
        boxes = viewed(x.index(stage * PANELS + panel), [BOXES, BOX, PANEL], layout)
        for box in gl.static_range(BOXES):
            corner = [gl.where(token + box * BOX < tokens, token + box * BOX, 0), first + panel * PANEL]
            load_tile(x_desc, corner, full.index(stage), boxes.index(box))


@gluon.jit
def _producer(
    x_desc, w_desc, x, w, full, empty, items, token_tiles, tokens, outputs, blocks,
    ROWS: gl.constexpr, PARTS: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill the ring with blocks of weights and of x, for all items of this program."""
    PANELS: gl.constexpr = BLOCK // PANEL
    step = 0
    _, _, first, last = _item(gl.program_id(0), token_tiles, blocks, SPLIT)
    ahead = gl.minimum(last - first, STAGES)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, token_tile, begin, end = _item(item, token_tiles, blocks, SPLIT)
        for block in range(begin, end):
            here = step % STAGES
            mbarrier.wait(empty.index(here), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(here), (PARTS * ROWS + TOKENS) * BLOCK * 2)
            for part in gl.static_range(PARTS):
                row = tile * ROWS + part * outputs
                for panel in gl.static_range(PANELS):
                    place = (here * PARTS + part) * PANELS + panel
                    load_tile(w_desc, [row, block * BLOCK + panel * PANEL], full.index(here), w.index(place))
            if step >= ahead:
                _load_tokens(x_desc, x, full, here, token_tile * TOKENS, block * BLOCK, tokens, PANELS)
            elif step == ahead - 1:
                if PDL:
                    tl.extra.cuda.gdc_wait()
                for early in range(ahead):
                    at = (begin + early) * BLOCK
                    _load_tokens(x_desc, x, full, early, token_tile * TOKENS, at, tokens, PANELS)
            step += 1


@gluon.jit
def _awaited(sums, pending: gl.constexpr, PARTS: gl.constexpr):
    """Return the sums, once at most `pending` products are under way."""
    return (warpgroup_mma_wait(pending, deps=sums),) if PARTS == 1 else warpgroup_mma_wait(pending, deps=sums)


@gluon.jit
def _products(
    w, x, full, empty, step, steps,
    ROWS: gl.constexpr, PARTS: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return (the parts' sums [C, T], the next step). A stage is given back when the products after it are
    under way."""
    PANELS: gl.constexpr = BLOCK // PANEL
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, TOKENS, 16])
    sums = ()
    for _ in gl.static_range(PARTS):
        sums = sums + (gl.zeros([ROWS, TOKENS], gl.float32, layout),)  # type: ignore[assignment]  # noqa: RUF005
    for i in range(steps):
        here = step % STAGES
        mbarrier.wait(full.index(here), (step // STAGES) & 1)
        grown = ()
        for part in gl.static_range(PARTS):
            sum_CT = sums[part]  # type: ignore[var-annotated]
            for panel in gl.static_range(PANELS):
                a = w.index((here * PARTS + part) * PANELS + panel)
                b = x.index(here * PANELS + panel).permute((1, 0))
                sum_CT = warpgroup_mma(a, b, sum_CT, is_async=True)
            grown = grown + (sum_CT,)  # type: ignore[assignment]  # noqa: RUF005
        sums = _awaited(grown, PARTS * PANELS, PARTS)
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=i > 0)
        step += 1
    sums = _awaited(sums, 0, PARTS)
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return sums, step


@gluon.jit
def _biased(value, bias_ptr, row, outputs, AXIS: gl.constexpr):
    """Add the bias of the rows, which lie along axis 1 - AXIS, to `value`."""
    layout: gl.constexpr = gl.SliceLayout(AXIS, value.type.layout)
    at = row + gl.arange(0, value.shape[1 - AXIS], layout)
    return value + gl.expand_dims(gl.load(bias_ptr + at, mask=at < outputs, other=0).to(gl.float32), AXIS)


@gluon.jit
def _finished(sums, bias_ptr, row, outputs, BIAS: gl.constexpr, GATE: gl.constexpr, AXIS: gl.constexpr):
    """Return the results of a tile whose rows lie along axis 1 - AXIS: with bias and activation, in float32."""
    y = sums[0]
    if BIAS:
        y = _biased(y, bias_ptr, row, outputs, AXIS)
    if GATE != "":
        up = sums[1]
        if BIAS:
            up = _biased(up, bias_ptr + outputs, row, outputs, AXIS)
        y = gated(y, up, GATE)
    return y


@gluon.jit
def _write(y, y_ptr, row, token, tokens, outputs, AXIS: gl.constexpr, layout: gl.constexpr):
    """Round the results of a tile to the type of `y_ptr`, and write them in `layout`."""
    y = gl.convert_layout(y.to(y_ptr.dtype.element_ty), layout)
    row_C = row + gl.arange(0, y.shape[1 - AXIS], gl.SliceLayout(AXIS, layout))
    token_T = token + gl.arange(0, y.shape[AXIS], gl.SliceLayout(1 - AXIS, layout))
    at = gl.expand_dims(token_T.to(gl.int64) * outputs, 1 - AXIS) + gl.expand_dims(row_C, AXIS)
    kept = gl.expand_dims(token_T < tokens, 1 - AXIS) & gl.expand_dims(row_C < outputs, AXIS)
    gl.store(y_ptr + at, y, mask=kept)


@gluon.jit
def _store(
    sums, bias_ptr, y_ptr, row, token, tokens, outputs,
    BIAS: gl.constexpr, GATE: gl.constexpr, AXIS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Finish a tile whose rows lie along axis 1 - AXIS: bias, activation and rounding. It is written in `layout`."""
    y = _finished(sums, bias_ptr, row, outputs, BIAS, GATE, AXIS)
    _write(y, y_ptr, row, token, tokens, outputs, AXIS, layout)


@gluon.jit
def _together(
    sums, sums_ptr, arrival_ptr, tile, part, left,
    ROWS: gl.constexpr, PARTS: gl.constexpr, TOKENS: gl.constexpr, SPLIT: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return this program's share of the tokens, [S, C] for each part, added up over its tile's programs. left: how
    many tokens are real."""
    SHARE: gl.constexpr = TOKENS // SPLIT
    SIZE: gl.constexpr = PARTS * ROWS * TOKENS
    tile_ptr = sums_ptr + tile.to(gl.int64) * (SPLIT * SIZE)
    own: gl.constexpr = sums[0].type.layout
    row_C1 = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, own)), 1)
    token_1T = gl.expand_dims(gl.arange(0, TOKENS, gl.SliceLayout(0, own)), 0)
    for p in gl.static_range(PARTS):
        at = part * SIZE + p * (ROWS * TOKENS) + token_1T * ROWS + row_C1
        gl.store(tile_ptr + at, sums[p], mask=(token_1T < left) & (row_C1 >= 0))
    barrier()  # until every thread's sums are written, before one thread says so
    arrived = gl.atomic_add(arrival_ptr + tile, 1, sem="acq_rel") + 1
    all_here = ((arrived - 1) | (SPLIT - 1)) + 1
    while arrived - all_here < 0:
        arrived = gl.atomic_add(arrival_ptr + tile, 0, sem="acquire")
    token_S = part * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, layout))
    row_1C = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, layout)), 0)
    share = ()
    for p in gl.static_range(PARTS):
        at = p * (ROWS * TOKENS) + gl.expand_dims(token_S * ROWS, 1) + row_1C
        mask = gl.expand_dims(token_S < left, 1) & (row_1C >= 0)
        total = gl.zeros([SHARE, ROWS], gl.float32, layout)
        for other in gl.static_range(SPLIT):
            total += gl.load(tile_ptr + other * SIZE + at, mask=mask, other=0, cache_modifier=".cg")
        share = share + (total,)  # type: ignore[assignment]  # noqa: RUF005
    return share


@gluon.jit
def _consumer(
    x, w, full, empty, bias_ptr, y_ptr, sums_ptr, arrival_ptr, items, token_tiles, tokens, outputs, blocks,
    ROWS: gl.constexpr, PARTS: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Multiply and finish all tiles of this program."""
    WARPS: gl.constexpr = ROWS // 16
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, token_tile, begin, end = _item(item, token_tiles, blocks, SPLIT)
        sums, step = _products(w, x, full, empty, step, end - begin, ROWS, PARTS, TOKENS, BLOCK, STAGES)
        row, token = tile * ROWS, token_tile * TOKENS
        if SPLIT == 1:
            tall: gl.constexpr = gl.BlockedLayout([8, 1], [ROWS // 8, 256 // ROWS], [1, WARPS], [0, 1])
            _store(sums, bias_ptr, y_ptr, row, token, tokens, outputs, BIAS, GATE, 1, tall)
        else:
            wide: gl.constexpr = gl.BlockedLayout([1, 4], [128 // ROWS, ROWS // 4], [WARPS, 1], [1, 0])
            share = _together(
                sums, sums_ptr, arrival_ptr, item // SPLIT, item % SPLIT, tokens - token,
                ROWS, PARTS, TOKENS, SPLIT, wide,
            )  # fmt: skip
            token += item % SPLIT * (TOKENS // SPLIT)
            _store(share, bias_ptr, y_ptr, row, token, tokens, outputs, BIAS, GATE, 0, wide)


@gluon.jit(do_not_specialize=["tokens"])
def stream_kernel(
    x_desc, w_desc, bias_ptr, y_ptr, sums_ptr, arrival_ptr, tokens, outputs, inputs,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [T, O].

    GATE: "" or the activation. With one the weight's rows are O gates, then O ups.
    sums: float32 [tiles, SPLIT, PARTS, TOKENS, ROWS].
    arrival: a counter per tile, a multiple of SPLIT.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    PANELS: gl.constexpr = BLOCK // PANEL
    PARTS: gl.constexpr = 1 if GATE == "" else 2
    dtype: gl.constexpr = w_desc.dtype
    layout: gl.constexpr = w_desc.layout
    w = gl.allocate_shared_memory(dtype, [STAGES * PARTS * PANELS, ROWS, PANEL], layout)
    x = gl.allocate_shared_memory(dtype, [STAGES * PANELS, TOKENS, PANEL], layout)
    full, empty = barriers(STAGES), barriers(STAGES)
    fence_async_shared()
    token_tiles = gl.cdiv(tokens, TOKENS)
    items = gl.cdiv(outputs, ROWS) * token_tiles * SPLIT
    blocks = gl.cdiv(inputs, BLOCK)
    gl.warp_specialize(
        [
            (_consumer, (
                x, w, full, empty, bias_ptr, y_ptr, sums_ptr, arrival_ptr, items, token_tiles, tokens, outputs,
                blocks, ROWS, PARTS, TOKENS, BLOCK, STAGES, SPLIT, BIAS, GATE,
            )),
            (_producer, (
                x_desc, w_desc, x, w, full, empty, items, token_tiles, tokens, outputs, blocks,
                ROWS, PARTS, TOKENS, BLOCK, STAGES, SPLIT, PDL,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip


def _aot(plan: Stream, gate: str) -> AotKernel:
    panel = f"{PANEL.value}],{_descriptor_layout()!r}>"
    signature = {
        "x_desc": f"tensordesc<bf16[{min(plan.tokens, 32)}, {panel}",
        "w_desc": f"tensordesc<bf16[{plan.rows}, {panel}",
    }
    signature |= {"bias_ptr": "*bf16", "y_ptr": "*bf16", "sums_ptr": "*fp32", "arrival_ptr": "*i32"}
    signature |= {"tokens": "i32", "outputs": "i32:16", "inputs": "i32:16"}
    cut = {"ROWS": plan.rows, "TOKENS": plan.tokens, "BLOCK": plan.block, "STAGES": plan.stages, "SPLIT": plan.split}
    flags = {"BIAS": False, "GATE": gate}
    return AotKernel(
        stream_kernel, signature, cut | flags, num_warps=plan.rows // 16, hot=True, tensor_cores="HGMMA",
        archs=("sm_90",),
    )  # fmt: skip


AOT = (
    _aot(Stream(rows=128, tokens=64, block=64, stages=5), "silu"),
    _aot(Stream(rows=64, tokens=128, block=128, stages=4, split=4), ""),
)

"""Linear maps of 16-bit types on Hopper with products of adapters: hopper/stream.py's way, and behind a tile's last
block of inputs come panels of the adapters' second matrices.

What adapters add is more inputs of the same product: x by the first matrices (beside.py) is the right operand, and
the second matrices of all adapters, [O, A · R], are the left one. A panel is 64 of those columns, 4 adapters of rank
16. A step reads the panels in which its tokens have adapters, and a token has zeros in columns of others' adapters. So
sums of tokens without an adapter get nothing but zeros, and keep their bits.

A tile has outputs of one part, whose columns of h it takes; the two halves of a gated pair take panels in turns.

With dependent launch these programs run beside the kernel that makes h (beside.py), which tells them when x is there.
They ask so often at most that the kernel before may take milliseconds, and wait for the end of that kernel then. They
wait for it in any case where their own inputs end. So no program depends on one that may have no place.

Legend:
    T  tokens
    I  inputs
    O  outputs
    H  parts times columns of all panels
"""

# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005 - Gluon knows no starred tuples
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.base.launch import num_multiprocessors
from ridgeline.kernels.gemm.lora.op import PANEL, num_panels
from ridgeline.kernels.gemm.plain.beside import ends, for_panels
from ridgeline.kernels.gemm.plain.choose import Stream
from ridgeline.kernels.gemm.plain.hopper import aot, prepared
from ridgeline.kernels.gemm.plain.op import Epilogue
from ridgeline.kernels.hopper.finish import added, arrives_last, finished, tall, write
from ridgeline.kernels.hopper.gluon_names import barriers, load_tile, viewed
from ridgeline.kernels.hopper.ring import (
    allocated,
    awaited,
    box,
    descriptor,
    item_of,
    load_first_tokens,
    load_tokens,
    load_weights,
    products,
)

MOST_ASKED = gl.constexpr(4096)  # times that a program asks whether x is there, some 3 ms


@gluon.jit
def _part(row, end_0, end_1, end_2):
    """Return the part of a tile that begins with a row."""
    return gl.where(row >= end_0, 1, 0) + gl.where(row >= end_1, 1, 0) + gl.where(row >= end_2, 1, 0)


@gluon.jit
def _x_is_there(ready_ptr, turn):
    """Return once x is there, which the copy engine may then read."""
    asked = 0
    seen = gl.atomic_add(ready_ptr, 0, sem="acquire")
    while (seen < turn) & (asked < MOST_ASKED):
        seen = gl.atomic_add(ready_ptr, 0, sem="acquire")
        asked += 1
    if seen < turn:
        gdc_wait()
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [gl.full([32], 0, gl.int32, lane)], gl.int32, False, 1
    )


@gluon.jit
def _load_panel(descs, ring, here, corner, token, tokens, PDL: gl.constexpr):
    """Copy a panel of second matrices and, once they are there, its columns of h to the first panels of a stage.
    corner: the row and column there, and the column of h."""
    h_desc, up_desc = descs
    w, x, full, _ = ring
    STAGES: gl.constexpr = full.shape[0]
    SLOTS: gl.constexpr = w.shape[0] // STAGES
    PANELS: gl.constexpr = x.shape[0] // STAGES
    COLUMNS: gl.constexpr = x.shape[2]
    BOX: gl.constexpr = h_desc.block_shape[0]
    BOXES: gl.constexpr = x.shape[1] // BOX
    layout: gl.constexpr = h_desc.layout
    mbarrier.expect(full.index(here), (w.shape[1] + x.shape[1]) * 128)
    load_tile(up_desc, [corner[0], corner[1]], full.index(here), w.index(here * SLOTS))
    if PDL:
        gdc_wait()  # for h
    boxes = viewed(x.index(here * PANELS), [BOXES, BOX, COLUMNS], layout)
    for at in gl.static_range(BOXES):
        first = gl.where(token + at * BOX < tokens, token + at * BOX, 0)
        load_tile(h_desc, [first, corner[2]], full.index(here), boxes.index(at))


@gluon.jit
def _producer(
    x_desc, w_desc, h_desc, up_desc, panel_ptr, ready_ptr, turn, ring, items, token_tiles, tokens, outputs, blocks,
    panels, end_0, end_1, end_2, PARTS: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill the ring with blocks of weights and of x, and with panels behind the last block of a tile."""
    w, x, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = w.shape[1]
    TOKENS: gl.constexpr = x.shape[1]
    COLUMNS: gl.constexpr = x.shape[2]
    PANELS: gl.constexpr = x.shape[0] // STAGES
    BLOCK: gl.constexpr = PANELS * COLUMNS
    step = 0
    _, _, first, last = item_of(gl.program_id(0), token_tiles, blocks, SPLIT)
    ahead = gl.minimum(last - first, STAGES)
    count = gl.load(panel_ptr)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        tile, token_tile, begin, end = item_of(item, token_tiles, blocks, SPLIT)
        for block in range(begin, end):
            here = load_weights(w_desc, ring, step, tile * ROWS, block, outputs, PARTS)
            if step >= ahead:
                load_tokens(x_desc, x, full, here, token_tile * TOKENS, block * BLOCK, tokens, PANELS)
            elif step == ahead - 1:
                if PDL:
                    _x_is_there(ready_ptr, turn)
                load_first_tokens(x_desc, ring, ahead, token_tile * TOKENS, begin, tokens)
            step += 1
        if item % SPLIT == SPLIT - 1:
            for nth in range(count):
                panel = gl.load(panel_ptr + 1 + nth)
                for half in gl.static_range(PARTS):
                    here = step % STAGES
                    mbarrier.wait(empty.index(here), ((step // STAGES) & 1) ^ 1)
                    row = tile * ROWS + half * outputs
                    column = (_part(row, end_0, end_1, end_2) * panels + panel) * COLUMNS
                    corner = (row, panel * COLUMNS, column)
                    _load_panel((h_desc, up_desc), ring, here, corner, token_tile * TOKENS, tokens, PDL)
                    step += 1
    if PDL:
        gdc_wait()  # where there is no panel, too


@gluon.jit
def _with_panels(ring, sums, step, count, PARTS: gl.constexpr):
    """Return (the sums with the products of so many panels, the next step)."""
    w, x, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    SLOTS: gl.constexpr = w.shape[0] // STAGES
    PANELS: gl.constexpr = x.shape[0] // STAGES
    for _ in range(count):
        grown = ()
        for half in gl.static_range(PARTS):
            here = step % STAGES
            mbarrier.wait(full.index(here), (step // STAGES) & 1)
            b = x.index(here * PANELS).permute((1, 0))
            sum_CT = warpgroup_mma(w.index(here * SLOTS), b, sums[half], is_async=True)
            done = awaited((sum_CT,), 0, 1)
            mbarrier.arrive(empty.index(here), count=1)
            grown = grown + (done[0],)
            step += 1
        sums = grown
    return sums, step


@gluon.jit
def _consumer(
    ring, panel_ptr, bias_ptr, y_ptr, sums_ptr, arrival_ptr, items, token_tiles, tokens, outputs, blocks,
    PARTS: gl.constexpr, SPLIT: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Multiply and finish all tiles of this program."""
    w, x, _, _ = ring
    ROWS: gl.constexpr = w.shape[1]
    TOKENS: gl.constexpr = x.shape[1]
    WARPS: gl.constexpr = ROWS // 16
    step, stop, stride = 0, items, gl.num_programs(0)
    if SPLIT > 1:  # there is a program for every item
        stop, stride = gl.program_id(0) + 1, 1
    count = gl.load(panel_ptr)
    for item in range(gl.program_id(0), stop, stride):
        tile, token_tile, begin, end = item_of(item, token_tiles, blocks, SPLIT)
        sums, step = products(ring, step, end - begin, PARTS)
        if SPLIT == 1:
            sums, step = _with_panels(ring, sums, step, count, PARTS)
        else:
            sums, step = _with_panels(ring, sums, step, gl.where(item % SPLIT == SPLIT - 1, count, 0), PARTS)
        row, token = tile * ROWS, token_tile * TOKENS
        mine = True
        if SPLIT > 1:
            place, part = item // SPLIT, item % SPLIT
            mine = arrives_last(sums, sums_ptr, arrival_ptr, place, part, tokens - token, WARPS, SPLIT)
        if mine:
            whole = sums
            if SPLIT > 1:
                whole = added(sums, sums_ptr, place, part, tokens - token, WARPS, SPLIT)
            y_CT = finished(whole, bias_ptr, row, outputs, BIAS, GATE)
            write(y_CT, y_ptr, row, token, tokens, outputs, tall(ROWS, WARPS))


@gluon.jit(do_not_specialize=["tokens", "panels", "turn"])
def beside_kernel(
    x_desc, w_desc, h_desc, up_desc, panel_ptr, ready_ptr, bias_ptr, y_ptr, sums_ptr, arrival_ptr, turn, tokens,
    outputs, inputs, panels, end_0, end_1, end_2,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [T, O] of 16-bit types.

    GATE: "" or the activation. With one the weight's rows are O gates, then O ups.
    panel: how many panels there are, and which, of so many `panels` in all.
    ready, turn: x is there once ready has come to turn.
    end_0 …: behind the rows of each part.
    sums: float32 [tiles, SPLIT, halves, ROWS * TOKENS].
    arrival: a counter per tile, 0 between launches.
    """
    if PDL:
        gdc_launch_dependents()
    PARTS: gl.constexpr = 1 if GATE == "" else 2
    w, x = allocated(x_desc, w_desc, ROWS, TOKENS, BLOCK, PARTS, STAGES)
    ring = (w, x, barriers(STAGES), barriers(STAGES))
    fence_async_shared()
    token_tiles = gl.cdiv(tokens, TOKENS)
    items = gl.cdiv(outputs, ROWS) * token_tiles * SPLIT
    blocks = gl.cdiv(inputs, BLOCK)
    gl.warp_specialize(
        [
            (_consumer, (
                ring, panel_ptr, bias_ptr, y_ptr, sums_ptr, arrival_ptr, items, token_tiles, tokens, outputs, blocks,
                PARTS, SPLIT, BIAS, GATE,
            )),
            (_producer, (
                x_desc, w_desc, h_desc, up_desc, panel_ptr, ready_ptr, turn, ring, items, token_tiles, tokens, outputs,
                blocks, panels, end_0, end_1, end_2, PARTS, SPLIT, PDL,
            )),
        ],
        [1],
        [40],
    )  # fmt: skip


def launch_beside(plan: Stream, x_TI: Tensor, weight_OI: Tensor, epilogue: Epilogue) -> Tensor:
    """Return x · weightᵀ + bias with what adapters add: [T, O], or with a gate act(first half) * second half: [T, F].
    16-bit types."""
    bias_O, gate, _, adapters = epilogue
    assert adapters is not None
    factors, step = adapters
    (tokens, inputs), outputs = x_TI.shape, len(weight_OI) // (2 if gate else 1)
    held, _, most = factors.up_AOR.shape
    items, processors = plan.items(tokens, outputs), num_multiprocessors(x_TI.device)
    turn = next(step.turns)
    thin = for_panels(x_TI, adapters, -items % processors, turn)
    y_TO = x_TI.new_empty(tokens, outputs)
    on = prepared(plan, x_TI, weight_OI, gate, x_TI)
    up_OK = factors.up_AOR.transpose(0, 1).flatten(1)
    assert up_OK.data_ptr() == factors.up_AOR.data_ptr()
    beside_kernel[(on.programs,)](
        on.x, on.weight, descriptor(thin.h_TH, min(plan.tokens, 32)), descriptor(up_OK, plan.rows), step.panel_P1,
        step.ready_1, x_TI if bias_O is None else bias_O, y_TO, on.sums, on.arrivals, turn, tokens, outputs, inputs,
        num_panels(held, most), *ends(factors), **on.named, BIAS=bias_O is not None, **on.options,
    )  # fmt: skip
    return y_TO


def _aot(plan: Stream, gate: str) -> object:
    signature = {"h_desc": box("bf16", min(plan.tokens, 32)), "up_desc": box("bf16", plan.rows), "panel_ptr": "*i32"}
    signature |= {"ready_ptr": "*i32", "turn": "i32", "panels": "i32"} | dict.fromkeys(
        ("end_0", "end_1", "end_2"), "i32:16"
    )
    return aot(beside_kernel, plan, "bf16", signature, {"BIAS": False, "GATE": gate}, "HGMMA", "bounded")


AOT = (
    _aot(Stream(128, 64, 64, 5), "silu"),
    _aot(Stream(64, 128, 128, 4, 4), ""),
)
assert PANEL * 2 == 128  # bytes of a row of the ring's panels

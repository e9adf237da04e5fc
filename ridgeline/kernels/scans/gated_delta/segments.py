"""Long rows in segments that run at the same time, for GPUs with more multiprocessors than there are heads to fill.

What a segment does to a state is affine: S ← M S + B. A first launch runs every segment from zeros, which leaves B, and
its keys alone from the identity, which leaves M, both without outputs. The kernel here then goes through a row's
segments, and leaves the state in front of each one in B's place. A second launch runs every segment from there, with
outputs. So more than twice the products are computed, by as many more programs as there are segments.

A segment ends where a row or its mark does, since `ScanMetadata.chunks` cuts them.

Legend: that of triton_prepare.py, and
    D  segments
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.scans.gated_delta.triton_step import aot_types

COLUMNS = 32
WARPS = 8
STAGES = 3  # two segments' lines are on their way: a step waits for a product, and no longer for 80 KiB


@triton.jit
def _gated_delta_carry(
    carried_ptr, states_ptr, start_ptr, reads_ptr, fresh_ptr, of_ptr, states_block,
    G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SHORT: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Replace each segment's B by the state in front of it, BV columns of a head of a row.

    carried_ptr: float32 [D, G, V + K, K]: a column of B or of M in each line.
    of_ptr: the first segment of each row.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(start_ptr + row + 1) - tl.load(start_ptr + row) <= SHORT:
        return
    key, other, value = tl.arange(0, K), tl.arange(0, K), tile * BV + tl.arange(0, BV)
    fresh = tl.load(fresh_ptr + row).to(tl.int32)
    held = (value < V * (1 - fresh))[:, None] & (key < K)[None, :]
    states_ptr += tl.load(reads_ptr + row) * states_block + head * K * V
    state = tl.load(states_ptr + key[None, :] * V + value[:, None], mask=held, other=0)
    cell = value[:, None] * K + key[None, :]
    first, behind = tl.load(of_ptr + row), tl.load(of_ptr + row + 1)
    for segment in tl.range(first, behind, num_stages=STAGES):
        lines_ptr = carried_ptr + (tl.cast(segment, tl.int64) * G + head) * (V + K) * K
        added = tl.load(lines_ptr + cell)
        tl.store(lines_ptr + cell, state)
        moved = tl.load(lines_ptr + V * K + other[:, None] * K + key[None, :])
        state = tl.dot(state, moved, added, input_precision="tf32")


def _aot() -> AotKernel:
    names = ("states_ptr", "start_ptr", "reads_ptr", "fresh_ptr", "states_block")
    types = {name: kind for name, kind in aot_types().items() if name in names}
    types |= {"carried_ptr": "*fp32", "of_ptr": "*i32"}
    constants = {"G": 32, "K": 128, "V": 128, "BV": COLUMNS, "SHORT": 1, "STAGES": STAGES}
    return AotKernel(
        _gated_delta_carry, types, constants, num_warps=WARPS, hot=True, tensor_cores="MMA", archs=("sm_90",)
    )


AOT = (_aot(),)

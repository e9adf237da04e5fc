"""Triton 5. stream-K: every program gets the same number of steps of K, wherever tiles end.

Idea      All steps of all tiles stand in one row, and each program takes an equal stretch of it. A tile that lies
          within one stretch is stored at once. Of others each program stores its part in float32, two at most: where
          its stretch begins, and where it ends. A second kernel adds the parts of each such tile, in their order. The
          published form (Osama et al., 2023) has one kernel, in which programs wait for others' parts; two need no
          wait, so that no kernel of another process can make them wait for ever.
FLOPs     2 M N K on the tensor cores.
Bytes     As Triton 2, and at most two tiles of float32 for each program are written and read: 69 MB for 132
          programs, whatever the size.
Limit     L2. 512 tiles of 4096 x 4096 x 4096 are 3.88 waves, not 4: 3 % less time, which the parts use up. For 140
          tiles on 132 multiprocessors it is 1.06 waves in place of 2.
Next      Engines choose by the number of tiles: the last rung of a ladder is not the best for each shape.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.gemm.ladder.triton_blocked import ARCHS, OPERANDS, OPTIONS, product, store, tiles_of
from ridgeline.kernels.gemm.ladder.triton_grouped import GROUP, place
from ridgeline.kernels.gemm.ladder.triton_rungs import TILE


@triton.jit
def begin(program, steps, PROGRAMS):
    """The first of all steps that is a program's; the next program's first is its end."""
    return (tl.cast(program, tl.int64) * steps // PROGRAMS).to(tl.int32)


@triton.jit
def part(parts_ptr, program, starts_here, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The addresses of a program's part: of the tile in which its stretch starts, or of that in which it ends."""
    first = (2 * program + tl.where(starts_here, 0, 1)).to(tl.int64) * ROWS * COLUMNS
    return parts_ptr + first + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _stretches_kernel(
    a_ptr, b_ptr, c_ptr, parts_ptr, M, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    each, program, programs = tl.cdiv(K, DEPTH), tl.program_id(0), tl.num_programs(0)
    steps = tl.cdiv(M, ROWS) * tl.cdiv(N, COLUMNS) * each
    now, end = begin(program, steps, programs), begin(program + 1, steps, programs)
    start = now
    while now < end:
        tile = now // each
        first = now - tile * each
        last = tl.minimum(end - tile * each, each)
        row, column = place(tile, M, N, ROWS, COLUMNS, GROUP)
        sums = product(a_ptr, b_ptr, M, N, K, row, column, first, last, ROWS, COLUMNS, DEPTH)
        if last - first == each:
            store(c_ptr, sums, M, N, row, column, ROWS, COLUMNS)
        else:
            tl.store(part(parts_ptr, program, start >= tile * each, ROWS, COLUMNS), sums)
        now = tile * each + last


@triton.jit
def _mend_kernel(
    c_ptr, parts_ptr, M, N, K, PROGRAMS,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile: the parts of it that programs have stored."""
    tile, each = tl.program_id(0), tl.cdiv(K, DEPTH)
    steps = tl.num_programs(0) * each
    first = (((tile * each + 1).to(tl.int64) * PROGRAMS - 1) // steps).to(tl.int32)  # that has the tile's first step
    last = (((tile + 1) * each).to(tl.int64) * PROGRAMS - 1) // steps
    if first != last:
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for program in range(first, last.to(tl.int32) + 1):
            starts_here = begin(program, steps, PROGRAMS) >= tile * each
            sums += tl.load(part(parts_ptr, program, starts_here, ROWS, COLUMNS))
        row, column = place(tile, M, N, ROWS, COLUMNS, GROUP)
        store(c_ptr, sums, M, N, row, column, ROWS, COLUMNS)


def stream_k(a_MK: Tensor, b_NK: Tensor, c_MN: Tensor, programs: int) -> None:
    """Write A · Bᵀ to C. All are contiguous. programs: one for each multiprocessor."""
    (m, k), n = a_MK.shape, len(b_NK)
    tiles = tiles_of(m, n)
    programs = min(programs, tiles * triton.cdiv(k, TILE["DEPTH"]))
    parts = torch.empty(programs, 2, TILE["ROWS"], TILE["COLUMNS"], device=a_MK.device, dtype=torch.float32)
    _stretches_kernel[(programs,)](a_MK, b_NK, c_MN, parts, m, n, k, **TILE, GROUP=GROUP, **OPTIONS)
    _mend_kernel[(tiles,)](c_MN, parts, m, n, k, programs, **TILE, GROUP=GROUP, num_warps=8)


PARTS = {"parts_ptr": "*fp32"}
AOT = (
    AotKernel(
        _stretches_kernel, {**dict(list(OPERANDS.items())[:3]), **PARTS, **dict(list(OPERANDS.items())[3:])},
        {**TILE, "GROUP": GROUP}, hot=True, tensor_cores="HGMMA", archs=ARCHS, **OPTIONS,
    ),
    AotKernel(
        _mend_kernel, {"c_ptr": "*bf16", **PARTS, "M": "i32", "N": "i32:16", "K": "i32:16", "PROGRAMS": "i32"},
        {**TILE, "GROUP": GROUP}, num_warps=8, archs=ARCHS,
    ),
)  # fmt: skip

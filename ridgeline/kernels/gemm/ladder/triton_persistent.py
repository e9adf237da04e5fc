"""Triton 4. persistent: as many programs as multiprocessors, which walk over tiles.

Idea      One loop over tiles around the loop over K. A program starts once, and its loads of the next tile can begin
          while this one's results are stored, if Triton's pipeline reaches over the end of the inner loop.
FLOPs     2 M N K on the tensor cores.
Bytes     As Triton 2.
Limit     L2; and the last wave: 512 tiles for 132 programs are 4 tiles for some, and 3 for others.
Next      Shares that do not end where tiles do: stream-K.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.gemm.ladder.triton_blocked import ARCHS, OPERANDS, OPTIONS, product, store, tiles_of
from ridgeline.kernels.gemm.ladder.triton_grouped import GROUP, place
from ridgeline.kernels.gemm.ladder.triton_rungs import TILE


@triton.jit
def _persistent_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, ROWS) * tl.cdiv(N, COLUMNS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = place(tile, M, N, ROWS, COLUMNS, GROUP)
        sums = product(a_ptr, b_ptr, M, N, K, row, column, 0, tl.cdiv(K, DEPTH), ROWS, COLUMNS, DEPTH)
        store(c_ptr, sums, M, N, row, column, ROWS, COLUMNS)


def persistent(a_MK: Tensor, b_NK: Tensor, c_MN: Tensor, programs: int) -> None:
    """Write A · Bᵀ to C. All are contiguous. programs: one for each multiprocessor."""
    (m, k), n = a_MK.shape, len(b_NK)
    grid = (min(programs, tiles_of(m, n)),)
    _persistent_kernel[grid](a_MK, b_NK, c_MN, m, n, k, **TILE, GROUP=GROUP, **OPTIONS)


AOT = (
    AotKernel(
        _persistent_kernel, OPERANDS, {**TILE, "GROUP": GROUP}, hot=True, tensor_cores="HGMMA", archs=ARCHS, **OPTIONS
    ),
)  # fmt: skip

"""Triton 2. grouped: an order of tiles that L2 likes.

Idea      Tiles are taken in groups of 8 rows of tiles, column by column, as rung 13 takes them. Programs of one moment
          then share few rows of A and few columns of B.
FLOPs     2 M N K on the tensor cores.
Bytes     From L2 as Triton 1. From memory, with 132 programs at work: 8 tiles' rows of A and 17 columns of B for 132
          tiles, in place of 9 rows and 16 columns (at N = 4096: all of B) for 132 tiles.
Limit     L2. For 4096 x 4096 x 4096 there are 512 tiles of 3.9 waves: the last wave is nearly full.
Next      Where tiles are few, K is divided.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.gemm.ladder.triton_blocked import ARCHS, OPERANDS, OPTIONS, product, store, tiles_of
from ridgeline.kernels.gemm.ladder.triton_rungs import TILE

GROUP = 8


@triton.jit
def place(tile, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The row and column of a tile, in the order of groups."""
    down, across = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    first = tile // (GROUP * across) * GROUP
    size = tl.minimum(down - first, GROUP)  # of the last group: fewer rows
    within = tile % (GROUP * across)
    return first + within % size, within // size


@triton.jit
def _grouped_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column = place(tl.program_id(0), M, N, ROWS, COLUMNS, GROUP)
    sums = product(a_ptr, b_ptr, M, N, K, row, column, 0, tl.cdiv(K, DEPTH), ROWS, COLUMNS, DEPTH)
    store(c_ptr, sums, M, N, row, column, ROWS, COLUMNS)


def grouped(a_MK: Tensor, b_NK: Tensor, c_MN: Tensor) -> None:
    """Write A · Bᵀ to C. All are contiguous."""
    (m, k), n = a_MK.shape, len(b_NK)
    _grouped_kernel[(tiles_of(m, n),)](a_MK, b_NK, c_MN, m, n, k, **TILE, GROUP=GROUP, **OPTIONS)


AOT = (
    AotKernel(
        _grouped_kernel, OPERANDS, {**TILE, "GROUP": GROUP}, hot=True, tensor_cores="HGMMA", archs=ARCHS, **OPTIONS
    ),
)  # fmt: skip

"""Triton 1. blocked: a program makes a tile, and Triton writes what rungs 3 to 10 wrote by hand.

Idea      Tiles are values. `tl.dot` becomes wgmma on Hopper, tcgen05 on Blackwell, mfma on an MI300X; `num_stages`
          makes loads asynchronous and shared memory a ring of stages; layouts without bank conflicts are chosen for us.
FLOPs     2 M N K on the tensor cores.
Bytes     From L2: M N K (1 / 128 + 1 / 256) numbers of 2 bytes, as rung 11.
Limit     L2. Tiles run in rows of C: those of one moment share few rows of A, and read all of B.
Next      An order of tiles that L2 likes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.gemm.ladder.triton_rungs import TILE

OPTIONS = {"num_warps": 8, "num_stages": 3}
ARCHS = ("sm_90", "sm_100", "gfx942")
OPERANDS = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*bf16", "M": "i32", "N": "i32:16", "K": "i32:16"}


@triton.jit
def product(
    a_ptr, b_ptr, M, N, K, row, column, first, last,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The sums of a tile over the steps of K from `first` to before `last`."""
    rows, columns = row * ROWS + tl.arange(0, ROWS), column * COLUMNS + tl.arange(0, COLUMNS)
    a_at, b_at = a_ptr + rows.to(tl.int64)[:, None] * K, b_ptr + columns.to(tl.int64)[None, :] * K
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(first, last):
        depth = step * DEPTH + tl.arange(0, DEPTH)
        a = tl.load(a_at + depth[None, :], mask=(rows < M)[:, None] & (depth < K)[None, :], other=0.0)
        b = tl.load(b_at + depth[:, None], mask=(columns < N)[None, :] & (depth < K)[:, None], other=0.0)
        sums = tl.dot(a, b, sums)
    return sums


@triton.jit
def store(c_ptr, sums, M, N, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Round a tile's sums to C's format, and store what exists of it."""
    rows, columns = row * ROWS + tl.arange(0, ROWS), column * COLUMNS + tl.arange(0, COLUMNS)
    at = c_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(at, sums.to(c_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def _blocked_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    across = tl.cdiv(N, COLUMNS)
    row, column = tl.program_id(0) // across, tl.program_id(0) % across
    sums = product(a_ptr, b_ptr, M, N, K, row, column, 0, tl.cdiv(K, DEPTH), ROWS, COLUMNS, DEPTH)
    store(c_ptr, sums, M, N, row, column, ROWS, COLUMNS)


def tiles_of(m: int, n: int) -> int:
    """Return the tiles of an output."""
    return triton.cdiv(m, TILE["ROWS"]) * triton.cdiv(n, TILE["COLUMNS"])


def blocked(a_MK: Tensor, b_NK: Tensor, c_MN: Tensor) -> None:
    """Write A · Bᵀ to C. All are contiguous."""
    (m, k), n = a_MK.shape, len(b_NK)
    _blocked_kernel[(tiles_of(m, n),)](a_MK, b_NK, c_MN, m, n, k, **TILE, **OPTIONS)


AOT = (AotKernel(_blocked_kernel, OPERANDS, TILE, hot=True, tensor_cores="HGMMA", archs=ARCHS, **OPTIONS),)

"""Triton 3. split-K: where tiles are few, several programs divide the K of each.

Idea      With 4 programs a tile, 4 times as many multiprocessors have work. Each stores its share's sums in float32,
          and a second kernel adds the shares, always in the same order, and rounds. No program waits for another:
          kernels of one stream run one after the other.
FLOPs     2 M N K on the tensor cores.
Bytes     As Triton 2, and 4 shares of M N numbers of 4 bytes are written to memory and read: 32 M N bytes.
Limit     For many tiles memory, and it is slower than Triton 2. For few (M = 128, N = 4096: 16 tiles) it has 64
          multiprocessors in place of 16.
Next      Programs that stay, for many tiles; shares of equal size, whatever the number of tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.gemm.ladder.triton_blocked import ARCHS, OPERANDS, OPTIONS, product, tiles_of
from ridgeline.kernels.gemm.ladder.triton_grouped import GROUP, place
from ridgeline.kernels.gemm.ladder.triton_rungs import SPLITS, TILE

NUMBERS = 1024  # results of a program of the second kernel


@triton.jit
def _shares_kernel(
    a_ptr, b_ptr, shares_ptr, M, N, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, column = place(tl.program_id(0), M, N, ROWS, COLUMNS, GROUP)
    share, steps = tl.program_id(1), tl.cdiv(K, DEPTH)
    first, last = share * steps // SPLITS, (share + 1) * steps // SPLITS
    sums = product(a_ptr, b_ptr, M, N, K, row, column, first, last, ROWS, COLUMNS, DEPTH)
    rows, columns = row * ROWS + tl.arange(0, ROWS), column * COLUMNS + tl.arange(0, COLUMNS)
    at = shares_ptr + (share * M + rows).to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(at, sums, mask=(rows < M)[:, None] & (columns < N)[None, :])


@triton.jit
def _add_kernel(shares_ptr, c_ptr, SIZE, SPLITS: tl.constexpr, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    sums = tl.zeros([NUMBERS], tl.float32)
    for share in tl.static_range(SPLITS):
        sums += tl.load(shares_ptr + share * SIZE + at, mask=at < SIZE, other=0.0)
    tl.store(c_ptr + at, sums.to(c_ptr.dtype.element_ty), mask=at < SIZE)


def split_k(a_MK: Tensor, b_NK: Tensor, c_MN: Tensor) -> None:
    """Write A · Bᵀ to C. All are contiguous."""
    (m, k), n = a_MK.shape, len(b_NK)
    shares = torch.empty(SPLITS, m, n, device=a_MK.device, dtype=torch.float32)
    grid = (tiles_of(m, n), SPLITS)
    _shares_kernel[grid](a_MK, b_NK, shares, m, n, k, **TILE, GROUP=GROUP, SPLITS=SPLITS, **OPTIONS)
    _add_kernel[(triton.cdiv(m * n, NUMBERS),)](shares, c_MN, m * n, SPLITS=SPLITS, NUMBERS=NUMBERS)


SHARES = {
    ("shares_ptr" if name == "c_ptr" else name): "*fp32" if name == "c_ptr" else kind for name, kind in OPERANDS.items()
}
AOT = (
    AotKernel(
        _shares_kernel, SHARES, {**TILE, "GROUP": GROUP, "SPLITS": SPLITS},
        hot=True, tensor_cores="HGMMA", archs=ARCHS, **OPTIONS,
    ),
    AotKernel(
        _add_kernel, {"shares_ptr": "*fp32", "c_ptr": "*bf16", "SIZE": "i64:16"},
        {"SPLITS": SPLITS, "NUMBERS": NUMBERS}, archs=ARCHS,
    ),
)  # fmt: skip

"""3. tiled: a tile of queries meets tiles of keys, on the tensor cores.

Idea      FlashAttention (part 5 of the NumPy notes): 64 queries stay on the chip with their output, and each tile of
          keys that passes by is read for all of them. Scores are a matrix product, and so is what they weigh.
FLOPs     4 T² D for each head, on the tensor cores: every tile is computed and masked, those behind the queries too.
Bytes     From memory as rung 2. From L2 all keys and values once for 64 queries: T² D / 16 bytes.
Limit     L2, and close to it the tensor cores: both for twice the pairs that the result needs.
Next      Tiles that no query sees are left out, those that every query sees need no mask, and tiles are larger.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.attention.ladder.online import SIGNATURE
from ridgeline.kernels.attention.triton_sdpa import EXACT, LOG2E, NOTHING, add_tile, load_rows
from ridgeline.kernels.base.aot import AotKernel

ROWS, COLUMNS = 64, 64


@triton.jit
def _tiled_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, T, PER_GROUP, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head."""
    queries, channels = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    own = tl.program_id(1).to(tl.int64) * T * D
    shared = (tl.program_id(1) // PER_GROUP).to(tl.int64) * T * D
    q = load_rows(q_ptr + own, queries, channels, D, T, D, False, D == WIDTH)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    top, total = tl.full([ROWS], NOTHING, tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, T, COLUMNS):
        keys = start + tl.arange(0, COLUMNS)
        k = load_rows(k_ptr + shared, keys, channels, D, T, D, False, D == WIDTH)
        v = load_rows(v_ptr + shared, keys, channels, D, T, D, False, D == WIDTH)
        scores = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale
        scores = tl.where(keys[None, :] <= queries[:, None], scores, NOTHING)
        out, top, total = add_tile(out, top, total, scores, 1.0, v, True)
    at = out_ptr + own + queries[:, None] * D + channels[None, :]
    inside = (queries[:, None] < T) & (channels[None, :] < D)
    tl.store(at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def tiled(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, out_BHTD: Tensor) -> None:
    """Write the causal attention of whole sequences. All four are contiguous; H is a multiple of G."""
    (batch, heads, length, size), groups = q_BHTD.shape, k_BGTD.shape[1]
    _tiled_kernel[(triton.cdiv(length, ROWS), batch * heads)](
        q_BHTD, k_BGTD, v_BGTD, out_BHTD, length, heads // groups, size**-0.5 * LOG2E.value,
        ROWS=ROWS, COLUMNS=COLUMNS, D=size, WIDTH=max(16, triton.next_power_of_2(size)), num_warps=4, num_stages=2,
    )  # fmt: skip


AOT = (
    AotKernel(
        _tiled_kernel, SIGNATURE, {"ROWS": ROWS, "COLUMNS": COLUMNS, "D": 128, "WIDTH": 128},
        hot=True, tensor_cores="HGMMA", archs=("sm_90",), num_stages=2,
    ),
)  # fmt: skip

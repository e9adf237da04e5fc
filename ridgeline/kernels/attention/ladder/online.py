"""2. online: one query at a time, and no score leaves the chip.

Idea      A softmax in one pass (part 4 of the NumPy notes): what was summed with an old maximum is worth
          exp(old - new) of it under the new one. So a program keeps one query, its output and two numbers, and keys and
          values pass by once, in tiles, up to the query's own.
FLOPs     2 T² D for each head, half of rung 1's, since keys behind the query are left out. They run on CUDA cores: a
          single query is no matrix.
Bytes     From memory q, k, v and the output, each once. From L2 all keys and values for every query: 2 T² D bytes.
Limit     L2: 128 times more bytes than with tiles of 128 queries.
Next      Many queries in a program, which share the keys that it reads, and whose scores are a matrix product.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.attention.triton_sdpa import LOG2E, NOTHING
from ridgeline.kernels.base.aot import AotKernel

COLUMNS = 64


@triton.jit
def _online_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, T, PER_GROUP, scale, COLUMNS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A query of one head. Those with the most keys, the last ones, begin first."""
    query = tl.num_programs(0) - 1 - tl.program_id(0)
    row, group = tl.program_id(1).to(tl.int64) * T + query, (tl.program_id(1) // PER_GROUP).to(tl.int64)
    channels = tl.arange(0, WIDTH)
    q = tl.load(q_ptr + row * D + channels, mask=channels < D, other=0.0).to(tl.float32)
    out, total, top = tl.zeros([WIDTH], tl.float32), tl.zeros([1], tl.float32), tl.full([1], NOTHING, tl.float32)
    for start in range(0, query + 1, COLUMNS):
        keys = start + tl.arange(0, COLUMNS)
        at = (group * T + keys)[:, None] * D + channels[None, :]
        there = (keys <= query)[:, None] & (channels < D)[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0).to(tl.float32)
        scores = tl.where(keys <= query, tl.sum(q[None, :] * k, 1) * scale, NOTHING)
        higher = tl.maximum(top, tl.max(scores, 0, keep_dims=True))
        kept, weights = tl.exp2(top - higher), tl.exp2(scores - higher)
        v = tl.load(v_ptr + at, mask=there, other=0.0).to(tl.float32)
        out = out * kept + tl.sum(weights[:, None] * v, 0)
        total = total * kept + tl.sum(weights, 0, keep_dims=True)
        top = higher
    tl.store(out_ptr + row * D + channels, (out / total).to(out_ptr.dtype.element_ty), mask=channels < D)


def online(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, out_BHTD: Tensor) -> None:
    """Write the causal attention of whole sequences. All four are contiguous; H is a multiple of G."""
    (batch, heads, length, size), groups = q_BHTD.shape, k_BGTD.shape[1]
    _online_kernel[(length, batch * heads)](
        q_BHTD, k_BGTD, v_BGTD, out_BHTD, length, heads // groups, size**-0.5 * LOG2E.value,
        COLUMNS=COLUMNS, D=size, WIDTH=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip


_POINTERS = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16")
SIGNATURE = {**_POINTERS, "T": "i32", "PER_GROUP": "i32", "scale": "fp32"}
AOT = (
    AotKernel(_online_kernel, SIGNATURE, {"COLUMNS": COLUMNS, "D": 128, "WIDTH": 128}, hot=True, archs=("sm_90",)),
)  # fmt: skip

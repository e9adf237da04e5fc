"""The backward pass in five products: a program has a tile of keys, and adds to the gradients of queries in memory.

Idea      `triton_sdpa.py` has two kernels, and each computes the scores and the gradients of weights: seven products.
          Here one kernel computes them once, as FlashAttention-2 and 3 do (arXiv 2307.08691, 2407.08608). All that a
          tile of keys does lies with keys as rows: then weights and their gradients are operands in registers for the
          gradients of values and keys, and only the gradients of scores are transposed, through shared memory.
FLOPs     10 D for each pair that is seen, in place of 14 D.
Bytes     From L2 q and the outputs' gradient once for 128 keys, and to L2 the gradients of q as sums in float32.
Atomics   A query's gradient is a sum over all tiles of keys, which are programs. Without atomic sums a program would
          wait for others, or compute two products again. So these sums have no order, and the last bits of gradients
          of q differ from run to run. Those of k and v have none: heads of a group are a loop.
Limit     Tensor cores, if the sums overlapped with products. The copy engine makes them (a reducing bulk copy), so no
          thread waits for memory. On an H200 it is at 27 % of the tensor cores and slower than seven products are: one
          program fits a multiprocessor, and its warps wait for each product together.

Legend:
    L  rows of all heads, one behind the other: heads times tokens
    U  tokens, filled up to whole tiles
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.kernels.attention.triton_sdpa import EXACT, LOG2E, output_products
from ridgeline.kernels.base.aot import AotKernel


@dataclass(frozen=True)
class BackwardTiles:
    """rows: queries of a step; columns: keys of a program."""

    rows: int
    columns: int = 128
    warps: int = 8
    stages: int = 2


TILES = {64: BackwardTiles(128), 128: BackwardTiles(64)}


@triton.jit
def _meet_queries(
    dk, dv, k, v, q_desc, grad_desc, dq_desc, less_log_ptr, less_delta_ptr, base, padded, keys, begin, T, scale,
    ROWS: tl.constexpr, COPIED: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Let a tile of keys meet the queries from begin on of one head. Its rows begin at base, and its numbers at
    padded: what is subtracted from scores and from the gradients of weights, where the sums of products begin."""
    for start in range(begin, T, ROWS):
        queries = start + tl.arange(0, ROWS)
        q = q_desc.load([base + start, 0])
        grad = grad_desc.load([base + start, 0])
        less_log = tl.load(less_log_ptr + padded + queries)
        less_delta = tl.load(less_delta_ptr + padded + queries)
        columns: tl.constexpr = k.shape[0]
        scores = tl.broadcast_to(less_log[None, :], (columns, ROWS))
        weights = tl.exp2(tl.dot(k, tl.trans(q), scores, input_precision=EXACT) * scale)
        weights = tl.where(keys[:, None] <= queries[None, :], weights, 0.0)
        dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision=EXACT)
        slopes = tl.broadcast_to(less_delta[None, :], (columns, ROWS))
        slopes = tl.dot(v, tl.trans(grad), slopes, input_precision=EXACT)
        given = (weights * slopes).to(q.dtype)
        dk = tl.dot(given, q, dk, input_precision=EXACT)
        dq = tl.dot(tl.trans(given), k, input_precision=EXACT)
        if COPIED:
            dq_desc.atomic_add([base + start, 0], dq)  # rows behind the last query add 0 to those of the next head
        else:
            at = dq_desc + (base + queries[:, None]) * D + tl.arange(0, D)[None, :]
            tl.atomic_add(at, dq, mask=queries[:, None] < T, sem="relaxed")
    return dk, dv


@triton.jit
def backward_kernel(
    q_desc, k_desc, v_desc, grad_desc, dq_desc, dk_ptr, dv_ptr, less_log_ptr, less_delta_ptr, T, scale, natural,
    PER_GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """A tile of keys of one group of heads; the first tiles, which most queries see, begin first. dq_desc: the sums of
    gradients of q; where the copy engine does not make them (COPIED), a pointer."""
    tile, group = tl.program_id(1), tl.program_id(0)
    begin = tile * COLUMNS
    keys, channels = begin + tl.arange(0, COLUMNS), tl.arange(0, D)
    k = k_desc.load([group * T + begin, 0])
    v = v_desc.load([group * T + begin, 0])
    dk, dv = tl.zeros([COLUMNS, D], tl.float32), tl.zeros([COLUMNS, D], tl.float32)
    padded_T = tl.cdiv(T, ROWS) * ROWS
    for within in range(PER_GROUP):
        head = group * PER_GROUP + within
        dk, dv = _meet_queries(
            dk, dv, k, v, q_desc, grad_desc, dq_desc, less_log_ptr, less_delta_ptr, head * T, head * padded_T, keys,
            begin, T, scale, ROWS, COPIED, D,
        )  # fmt: skip
    at = (group.to(tl.int64) * T + keys[:, None]) * D + channels[None, :]
    inside = keys[:, None] < T
    tl.store(dk_ptr + at, (dk * natural).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rounded_kernel(sums_ptr, out_ptr, count, natural, SIZE: tl.constexpr):
    """Round the sums of gradients of q, times the scale."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    sums = tl.load(sums_ptr + at, mask=at < count, other=0.0)
    tl.store(out_ptr + at, (sums * natural).to(out_ptr.dtype.element_ty), mask=at < count)


class FusedBackward:
    """The gradients of causal attention with given operands, contiguous [B, H, T, D] and [B, G, T, D] with heads of 64
    or 128 channels; B H T is below 2**31.

    out_BHTD, log_BHT: of `attend_intervals`. Rows behind a head's last one are read and weigh 0, so they must be
    finite.
    """

    def __init__(self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, out_BHTD: Tensor, log_BHT: Tensor) -> None:
        (batch, heads, self.length, size), groups = q_BHTD.shape, k_BGTD.shape[1]
        self.tiles = TILES.get(size, BackwardTiles(64, 64, 4))
        self.qkv, self.out_BHTD = (q_BHTD, k_BGTD, v_BGTD), out_BHTD
        self.groups, self.per_group, self.scale = batch * groups, heads // groups, size**-0.5
        self.sums_BHTD = torch.zeros_like(q_BHTD, dtype=torch.float32)
        padded = triton.cdiv(self.length, self.tiles.rows) * self.tiles.rows
        self.less_log_BHU = log_BHT.new_full((batch, heads, padded), float("-inf"))
        self.less_log_BHU[..., : self.length] = log_BHT / (-self.scale * LOG2E.value)
        self.less_delta_BHU = torch.zeros_like(self.less_log_BHU)
        self.grads = [torch.full_like(x, torch.nan) for x in self.qkv]
        rows, columns = self.tiles.rows, self.tiles.columns
        boxes = [rows, columns, columns]
        self.descriptors = [_descriptor(x, box) for x, box in zip(self.qkv, boxes, strict=True)]
        self.copied = q_BHTD.is_cuda
        self.dq = _descriptor(self.sums_BHTD, rows) if self.copied else self.sums_BHTD

    def __call__(self, grad_BHTD: Tensor) -> list[Tensor]:
        """Return the gradients of q, k and v; the next call writes to the same memory."""
        self.less_delta_BHU[..., : self.length] = -output_products(self.out_BHTD, grad_BHTD)
        self.sums_BHTD.zero_()
        tiles, size = self.tiles, grad_BHTD.shape[-1]
        backward_kernel[(self.groups, triton.cdiv(self.length, tiles.columns))](
            *self.descriptors, _descriptor(grad_BHTD, tiles.rows), self.dq, *self.grads[1:], self.less_log_BHU,
            self.less_delta_BHU, self.length, self.scale * LOG2E.value, self.scale, PER_GROUP=self.per_group,
            ROWS=tiles.rows, COLUMNS=tiles.columns, D=size, COPIED=self.copied, num_warps=tiles.warps,
            num_stages=tiles.stages,
        )  # fmt: skip
        count = self.sums_BHTD.numel()
        rounded_kernel[(triton.cdiv(count, 4096),)](self.sums_BHTD, self.grads[0], count, self.scale, SIZE=4096)
        return self.grads


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    x_LD = x.flatten(0, 2)
    return TensorDescriptor(x_LD, list(x_LD.shape), list(x_LD.stride()), [rows, x.shape[-1]])


# ---- ahead of time --------------------------------------------------------------------------------------------------


def ahead_of_time(size: int, tiles: BackwardTiles, copied: bool = True) -> AotKernel:
    """Return the kernel for heads of so many channels, to compile for bfloat16."""
    boxes = {"q_desc": tiles.rows, "k_desc": tiles.columns, "v_desc": tiles.columns, "grad_desc": tiles.rows}
    types = {name: f"tensordesc<bf16[{rows}, {size}]>" for name, rows in boxes.items()}
    types["dq_desc"] = f"tensordesc<fp32[{tiles.rows}, {size}]>" if copied else "*fp32"
    types |= {"dk_ptr": "*bf16", "dv_ptr": "*bf16", "less_log_ptr": "*fp32", "less_delta_ptr": "*fp32"}
    types |= {"T": "i32", "scale": "fp32", "natural": "fp32"}
    constants = {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "D": size, "COPIED": copied, "PER_GROUP": 1}
    return AotKernel(
        backward_kernel, types, constants, hot=True, tensor_cores="HGMMA", archs=("sm_90",),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


AOT = tuple(ahead_of_time(size, tiles) for size, tiles in TILES.items())

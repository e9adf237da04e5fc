"""Prefill attention over the paged cache for Hopper: the choice of tiles, and the launch. hopper_items.py makes the
work list, and hopper_kernel.py is the device's part.

Legend, beside that of op.py:
    L  lines of D elements in the cache's memory
    I  work items
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.kernels.attention.paged.hopper_items import CACHED_BYTES
from ridgeline.kernels.attention.paged.hopper_kernel import prefill_kernel
from ridgeline.kernels.attention.paged.hopper_pieces import add_pieces, may_be_cut, parts_of
from ridgeline.kernels.attention.paged.op import PrefillItems, RaggedBatch, Softmax
from ridgeline.kernels.base.launch import launch_options, num_multiprocessors

LOG2E = 1.4426950408889634


def supports(arch: str, dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
    """Return True if `prefill_attention` can run: on Hopper, with 16-bit types, heads of 64, 128 or 256, and blocks of
    8, 16, … 256 tokens."""
    blocks = 8 <= block_size <= 256 and block_size & (block_size - 1) == 0
    return arch == "sm_90" and dtype in (torch.bfloat16, torch.float16) and head_dim in (64, 128, 256) and blocks


@dataclass(frozen=True, kw_only=True)
class Config:
    """The cut of the kernel: KEYS in a tile, STAGES of each ring, items whose queries are in shared memory (QUEUE), and
    registers per thread.

    A query of an item sees at most STAGES - 1 tiles more than another query of it.
    """

    KEYS: int = 128
    STAGES: int = 2
    QUEUE: int = 2
    CONSUMER_REGS: int = 232
    PRODUCER_REGS: int = 40


def choose(head_dim: int, queries: int) -> Config:
    """Return the cut for heads of this width and items of so many queries. On an H200 smaller key tiles were slower at
    every length."""
    if queries > 128:
        return Config(STAGES=4, CONSUMER_REGS=160, PRODUCER_REGS=24)
    if head_dim == 256:  # whose sums take half of the registers, and whose queries of two items too much shared memory
        return Config(KEYS=64, QUEUE=1, CONSUMER_REGS=240, PRODUCER_REGS=24)
    return Config(STAGES=2 if head_dim == 128 else 4)


def prefill_attention(
    q_THD: Tensor,
    caches: tuple[Tensor, Tensor],
    batch: RaggedBatch,
    items: PrefillItems,
    softmax: Softmax,
    out_THD: Tensor,
    config: Config | None = None,
    lse_TH: Tensor | None = None,
) -> None:
    """Write the attention of the rows that `items` lists into `out_THD`; see `op.paged_attention_reference`.

    Other rows are left alone. Memory that no query sees may hold anything, NaN included. Heads of a query must be
    adjacent, and blocks of the caches must start at multiples of D elements.

    caches: keys and values, [N, G, P, D] each.
    softmax: without a cap and slopes.
    lse_TH: float32, where the natural logarithms of these rows' sums are written, if they are wanted.
    """
    (k_cache_NGPD, v_cache_NGPD), sinks_H = caches, softmax.sinks_H
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads, block_size = k_cache_NGPD.shape[1:3]
    longest = None if batch.kv_bound_R is None else int(batch.kv_bound_R.max(initial=1))
    config = config or choose(head_dim, items.queries)
    box = min(block_size, config.KEYS)
    per_kv, pack = num_heads // num_kv_heads, items.pack
    k_LD, v_LD = _rows(k_cache_NGPD), _rows(v_cache_NGPD)
    units, split = num_heads // pack, items.merges_I4 is not None
    programs = min(items.limit * units, num_multiprocessors(q_THD.device))
    parts = parts_of(items, num_heads, head_dim, q_THD.device) if split else (None, None)
    at_once = units if split else _heads_at_once(longest, k_cache_NGPD) * per_kv // pack
    prefill_kernel[(programs,)](
        _descriptor(q_THD, 64 // pack, pack), _descriptor(k_LD, box), _descriptor(v_LD, box), out_THD, lse_TH, sinks_H,
        items.table_I4, items.count_1, items.ticket_1, at_once,
        batch.block_table_SC, softmax.scale * LOG2E, out_THD.stride(0), batch.block_table_SC.stride(0),
        k_cache_NGPD.stride(0) // head_dim, k_cache_NGPD.stride(1) // head_dim,
        v_cache_NGPD.stride(0) // head_dim, v_cache_NGPD.stride(1) // head_dim, max(len(k_LD), len(v_LD)), *parts,
        UNITS=units, PER_KV=per_kv, PACK=pack, P=block_size, BOX=box, D=head_dim,
        KEYS=config.KEYS, STAGES=config.STAGES, QUEUE=config.QUEUE, WINDOW=softmax.window or 0,
        SINKS=sinks_H is not None, SPLIT=units if split else 0, CONSUMERS=items.queries // 64,
        CONSUMER_REGS=config.CONSUMER_REGS, PRODUCER_REGS=config.PRODUCER_REGS, num_warps=4,
        **launch_options(q_THD.device),
    )  # fmt: skip
    if parts[0] is not None and may_be_cut(longest, config.KEYS):
        add_pieces(items, parts, out_THD, lse_TH)


def _rows(cache_NGPD: Tensor) -> Tensor:
    """Return the cache's memory, gaps between blocks included, as lines of D elements: [L, D]."""
    num_blocks, num_kv_heads, block_size, head_dim = cache_NGPD.shape
    block, head, row, one = cache_NGPD.stride()
    assert (row, one) == (head_dim, 1)
    assert block % head_dim == 0
    assert head % head_dim == 0
    rows = ((num_blocks - 1) * block + (num_kv_heads - 1) * head) // head_dim + block_size
    return cache_NGPD.as_strided((rows, head_dim), (head_dim, 1))


def _descriptor(x: Tensor, *rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=x.dim())
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [*rows, 64], layout)


def _heads_at_once(longest: int | None, k_cache_NGPD: Tensor) -> int:
    """Return the number of key heads to work on at a time: a divisor of their number whose part of the longest row
    about fits the second-level cache. All of them if the longest row is not known."""
    num_kv_heads, _, head_dim = k_cache_NGPD.shape[1:]
    heads = num_kv_heads
    while longest is not None and heads % 2 == 0 and heads * longest * head_dim * 4 > 2 * CACHED_BYTES:
        heads //= 2
    return heads

"""Levels widened to 16-bit numbers, for hopper.py: its copies go from the cache to shared memory past all registers.

A step's long rows have their blocks widened into memory that all layers of a group share, once for all their queries.
It moves 3 bytes for every number, and so much less than the products take: of n queries on each key, 56 / n of their
time (a quarter as many key heads as heads, 600 TFLOP/s, 4 TB/s), 1 % for 8,192 tokens and 5 % for 1,024.

The device decides, since only it knows the lengths in a captured graph: rows that do not fit the memory are left to
triton_prefill.py, which converts tiles in registers, once for every 128 queries.

Legend:
    R  rows
    N  blocks of the cache
    W  blocks of the memory for widened ones
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.attention.paged.op import RaggedBatch, Schedule
from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.kv_cache import KernelCache
from ridgeline.kernels.base.launch import launch_options, num_multiprocessors
from ridgeline.kernels.base.triton_levels import taken_apart

PROGRAMS = 8  # per multiprocessor; each has 8 KiB or so to read under way, which together covers memory's latency


@dataclass(frozen=True)
class Widening:
    """The places that a step's long rows are widened to. All tensors are int32 on the device.

    source_W: the cache's block that each block is made from.
    table_SC: the block table of the widened rows.
    count_1: how many blocks there are; 0 if they do not fit.
    """

    source_W: Tensor
    table_SC: Tensor
    count_1: Tensor


def make_widening(batch: RaggedBatch, schedule: Schedule, block_size: int, capacity: int) -> Widening:
    """Place the blocks of the rows in `schedule.hopper`. The work of the kernel that is not to run is taken out of the
    schedule."""
    assert schedule.hopper is not None
    table_SC, num_rows = batch.block_table_SC, len(batch.slots_R)
    made = Widening(
        torch.empty(capacity, dtype=torch.int32, device=table_SC.device),
        torch.empty_like(table_SC),
        torch.empty(1, dtype=torch.int32, device=table_SC.device),
    )
    _place_kernel[(num_rows,)](
        batch.start_R1, batch.kv_len_R, batch.slots_R, table_SC, made.source_W, made.table_SC, made.count_1,
        schedule.counts_2, schedule.hopper.count_1, num_rows, capacity, schedule.window or 0, table_SC.stride(0),
        FEW=schedule.few, P=block_size, WINDOW=schedule.window is not None, ROWS=triton.next_power_of_2(num_rows),
        **launch_options(table_SC.device),
    )  # fmt: skip
    return made


@triton.jit(do_not_specialize=["num_rows", "capacity", "window"])
def _place_kernel(
    start_ptr, kv_len_ptr, slots_ptr, table_ptr, source_ptr, wide_table_ptr, count_ptr, counts_ptr, items_count_ptr,
    num_rows, capacity, window, stride_table,
    FEW: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Place one row's blocks in each program."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    row_R = tl.arange(0, ROWS)
    real_R = row_R < num_rows
    start_R = tl.load(start_ptr + row_R, mask=real_R, other=0).to(tl.int32)
    tokens_R = tl.load(start_ptr + row_R + 1, mask=real_R, other=0).to(tl.int32) - start_R
    kv_len_R = tl.load(kv_len_ptr + row_R, mask=real_R, other=0).to(tl.int32)
    first_R = tl.zeros((ROWS,), tl.int32)
    if WINDOW:
        first_R = tl.maximum(kv_len_R - tokens_R - window + 1, 0) // P
    blocks_R = tl.where(real_R & (tokens_R > FEW), tl.cdiv(kv_len_R, P) - first_R, 0)
    total = tl.sum(blocks_R)
    fits = total <= capacity
    if row == 0:
        tl.store(count_ptr, tl.where(fits, total, 0))
        if fits:
            tl.store(counts_ptr + 1, 0)
        else:
            tl.store(items_count_ptr, 0)
    if fits:
        mine_R = row_R == row
        base = tl.sum(tl.where(row_R < row, blocks_R, 0))
        first, blocks = tl.sum(tl.where(mine_R, first_R, 0)), tl.sum(tl.where(mine_R, blocks_R, 0))
        at = tl.load(slots_ptr + row).to(tl.int64) * stride_table + first
        for begin in range(0, blocks, 128):
            i = begin + tl.arange(0, 128)
            block = tl.load(table_ptr + at + i, mask=i < blocks, other=0)
            tl.store(source_ptr + base + i, block, mask=i < blocks)
            tl.store(wide_table_ptr + at + i, base + i, mask=i < blocks)


def widen(widening: Widening, cache: KernelCache, wide: tuple[Tensor, Tensor], most: int) -> None:
    """Write the blocks that `widening` names as numbers. most: a bound on how many there are."""
    k_WGPD, v_WGPD = wide
    _, num_kv_heads, block_size, head_dim = k_WGPD.shape
    tokens = min(block_size, max(16, 8192 // head_dim))
    pieces = num_kv_heads * (block_size // tokens)
    _widen_kernel[(min(most * pieces, PROGRAMS * num_multiprocessors(k_WGPD.device)),)](
        *cache.tensors, k_WGPD, v_WGPD, widening.source_W, widening.count_1, *cache.strides, *cache.scale_strides,
        *k_WGPD.stride()[:2], NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, P=block_size, TOKENS=tokens, KV=cache.KV,
        **launch_options(k_WGPD.device),
    )  # fmt: skip


@triton.jit
def _widen_kernel(
    k_ptr, v_ptr, scale_ptr, k_wide_ptr, v_wide_ptr, source_ptr, count_ptr,
    stride_block, stride_head, stride_token, stride_scale_block, stride_scale_head, stride_scale_token,
    wide_stride_block, wide_stride_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr, KV: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Widen TOKENS keys and values of one head at a time."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pieces: tl.constexpr = NUM_KV_HEADS * (P // TOKENS)
    n_K, w_W, d_D = tl.arange(0, TOKENS), tl.arange(0, HEAD_DIM // 2), tl.arange(0, HEAD_DIM)
    for work in range(tl.program_id(0), tl.load(count_ptr) * pieces, tl.num_programs(0)):
        wide, piece = tl.full((), work // pieces, tl.int64), work % pieces
        block = tl.load(source_ptr + wide).to(tl.int64)
        g, token_K = piece % NUM_KV_HEADS, piece // NUM_KV_HEADS * TOKENS + n_K
        at_KW = block * stride_block + g * stride_head + token_K[:, None] * stride_token + w_W[None, :]
        scale_at = block * stride_scale_block + g * stride_scale_head
        if scale_ptr.dtype.element_ty == tl.int32:
            word_K = tl.load(scale_ptr + scale_at + token_K * stride_scale_token)
            k_scale_K = (word_K << 16).to(tl.float32, bitcast=True)
            v_scale_K = (word_K & -0x10000).to(tl.float32, bitcast=True)
        else:
            k_scale_K = tl.load(scale_ptr + scale_at + token_K * stride_scale_token)
            v_scale_K = tl.load(scale_ptr + scale_at + token_K * stride_scale_token + 1)
        out_KD = wide * wide_stride_block + g * wide_stride_head + token_K[:, None] * HEAD_DIM + d_D[None, :]
        k_KD = _numbers(tl.load(k_ptr + at_KW), k_scale_K, TOKENS, HEAD_DIM, KV, PDL)
        v_KD = _numbers(tl.load(v_ptr + at_KW), v_scale_K, TOKENS, HEAD_DIM, KV, PDL)
        tl.store(k_wide_ptr + out_KD, k_KD.to(k_wide_ptr.dtype.element_ty))
        tl.store(v_wide_ptr + out_KD, v_KD.to(v_wide_ptr.dtype.element_ty))


@triton.jit
def _numbers(
    words_KW, scale_K, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, KV: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    even_KW, odd_KW = taken_apart(words_KW, scale_K, KV, ASM)
    return tl.reshape(tl.join(even_KW, odd_KW), (TOKENS, HEAD_DIM)) * scale_K[:, None]


AOT = (
    *(
    AotKernel(
        _widen_kernel,
        {
            "k_ptr": "*i16", "v_ptr": "*i16", "scale_ptr": "*i32", "k_wide_ptr": "*bf16", "v_wide_ptr": "*bf16",
            "source_ptr": "*i32", "count_ptr": "*i32",
            **dict.fromkeys(("stride_block", "stride_head", "stride_token"), "i32:16"),
            **dict.fromkeys(("stride_scale_block", "stride_scale_head"), "i32:16"),
            **dict.fromkeys(("wide_stride_block", "wide_stride_head"), "i32:16"),
        },
        {"stride_scale_token": 1, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "P": 64, "TOKENS": 64, "KV": kv},
        archs=ONE_OF_EACH,
    )
    for kv in ("e4m3", "int8")
    ),
    AotKernel(
        _place_kernel,
        {
            "start_ptr": "*i32", "kv_len_ptr": "*i32", "slots_ptr": "*i32", "table_ptr": "*i32", "source_ptr": "*i32",
            "wide_table_ptr": "*i32", "count_ptr": "*i32", "counts_ptr": "*i32", "items_count_ptr": "*i32",
            "num_rows": "i32", "capacity": "i32", "window": "i32", "stride_table": "i32:16",
        },
        {"FEW": 4, "P": 64, "WINDOW": True, "ROWS": 256},
        archs=ONE_OF_EACH,
    ),
)  # fmt: skip

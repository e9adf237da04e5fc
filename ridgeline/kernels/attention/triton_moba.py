"""MoBA, a mixture of block attention: each query reads its own block of keys and the few past blocks that fit it best.

A block stands for its mean key. The gate scores all past blocks of a query by its product with these means and takes
the best `top` - 1; the own block is always read, in causal order (Lu et al., "MoBA", 2025). With blocks of 2,048 and
top 3, a query of 65,536 reads 4,928 keys on average where causal attention reads 32,768.

Queries side by side choose different blocks, so a tile of neighbours would read nearly all. The work is turned around:

    gate      a tile of queries scores the means, and keeps the best blocks. One launch, no matrix of scores in memory
    sort      (block, query) pairs by block: each block now has the list of its queries
    gathered  a tile of a list, queries gathered row by row, meets the 2,048 keys of its block. Each pair leaves an
              output, in the inputs' dtype, and the logarithm of its sum, as the parts of a split attention do
    own       causal attention inside each block (triton_sdpa.py, blocks as documents)
    merge     a query's parts, weighted by their sums
    backward  the same lists once more: a tile of a block's keys sums over the queries of its list, and a tile of a list
              leaves a part of each query's gradient, which are summed. Choices have no gradient

The number of tiles is not known to the host, so it launches as many as there can be; those beyond the last one leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.kernels.attention.triton_gathered import gathered_gradients, listed, load_gathered
from ridgeline.kernels.attention.triton_sdpa import (
    EXACT,
    LOG2E,
    NOTHING,
    Tiles,
    WholeAttention,
    add_tile,
    ahead_of_time,
    attend_intervals,
    check_same_length,
    interval_gradients,
    load_rows,
    output_products,
    strides_of,
    tiles_of,
)

MOST_BLOCKS = 256  # scores of a tile's queries for all blocks stay in registers


@dataclass(frozen=True)
class Moba:
    """block: tokens of a block of keys. top: how many blocks a query reads, its own included.

    Raises ValueError for a block that is no power of 2 of at least 16, or a top below 1.
    """

    block: int = 2048
    top: int = 3

    def __post_init__(self) -> None:
        if self.block < 16 or self.block & (self.block - 1):
            raise ValueError(f"a block has 16, 32, 64, … tokens, got {self.block}.")
        if self.top < 1:
            raise ValueError(f"a query reads at least its own block, so top is at least 1, got {self.top}.")


def block_means(k_BGTD: torch.Tensor, block: int) -> torch.Tensor:
    """Return the mean key of each whole block, float32: [batch, groups, whole blocks, channels]."""
    whole = k_BGTD.shape[2] // block
    return k_BGTD[:, :, : whole * block].unflatten(2, (whole, block)).mean(3, dtype=torch.float32)


def moba_reference(
    q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, moba: Moba = Moba(), *, scale: float | None = None
) -> torch.Tensor:
    """Return the result of `moba_attention` from its definition: all scores at once, in the inputs' dtype. Blocks are
    chosen by products in float32, as there."""
    length, per_group = q_BHTD.shape[2], q_BHTD.shape[1] // k_BGTD.shape[1]
    k_BHTD, v_BHTD = (each.repeat_interleave(per_group, 1) for each in (k_BGTD, v_BGTD))
    own_T = torch.arange(length, device=q_BHTD.device) // moba.block
    means_BHND = block_means(k_BGTD, moba.block).repeat_interleave(per_group, 1)
    past_TN = torch.arange(means_BHND.shape[2], device=own_T.device) < own_T[:, None]
    gate_BHTN = (q_BHTD.float() @ means_BHND.mT).masked_fill(~past_TN, float("-inf"))
    best = gate_BHTN.topk(min(moba.top - 1, gate_BHTN.shape[-1]), -1)
    seen_BHTN = torch.zeros((*gate_BHTN.shape[:3], int(own_T[-1]) + 1), dtype=torch.bool, device=own_T.device)
    seen_BHTN.scatter_(-1, best.indices, best.values > float("-inf"))
    seen_BHTN |= torch.arange(seen_BHTN.shape[-1], device=own_T.device) == own_T[:, None]
    seen_BHTT = seen_BHTN.repeat_interleave(moba.block, -1)[..., :length].tril()
    scores = q_BHTD @ k_BHTD.mT * (q_BHTD.shape[-1] ** -0.5 if scale is None else scale)
    return torch.softmax(scores.masked_fill(~seen_BHTT, float("-inf")), -1) @ v_BHTD


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit
def _gate_kernel(
    q_ptr, means_ptr, chosen_ptr, q_batch, q_head, q_row, H, PER_GROUP, T, N,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The best past blocks of a tile of queries of one head, best first; -1 where there are no more. [B, H, T, choices]

    means: float32, [B, G, N, D]. Of equal scores the earlier block is taken.
    """
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    queries, channels, blocks = (
        tl.program_id(0) * ROWS + tl.arange(0, ROWS),
        tl.arange(0, WIDTH),
        tl.arange(0, BLOCKS),
    )
    q_ptr += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    q = load_rows(q_ptr, queries, channels, q_row, T, D, False, D == WIDTH)
    means_ptr += (batch * (H // PER_GROUP) + head // PER_GROUP).to(tl.int64) * N * D
    means = load_rows(means_ptr, blocks, channels, D, N, D, False, D == WIDTH)
    if q.dtype == tl.bfloat16:  # three parts have all bits of a mean, and tensor cores add exact products in float32
        scores = tl.zeros([ROWS, BLOCKS], tl.float32)
        for _part in tl.static_range(3):
            part = means.to(tl.bfloat16)
            scores = tl.dot(q, tl.trans(part), scores)
            means -= part.to(tl.float32)
    else:
        scores = tl.dot(q.to(tl.float32), tl.trans(means), input_precision=EXACT)
    scores = tl.where(blocks[None, :] < queries[:, None] // BLOCK, scores, NOTHING)
    chosen_ptr += (tl.program_id(1).to(tl.int64) * T + queries) * CHOICES
    for choice in tl.static_range(CHOICES):
        best = tl.argmax(scores, 1)
        there = tl.max(scores, 1) > NOTHING
        tl.store(chosen_ptr + choice, tl.where(there, best, -1).to(tl.int32), mask=queries < T)
        scores = tl.where(blocks[None, :] == best[:, None], NOTHING, scores)


@triton.jit
def _gathered_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, log_ptr, pairs_ptr, owner_ptr, first_ptr, begins_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    H, PER_GROUP, T, N, LISTS, scale,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile of the queries that chose one block. pairs: (query * choices + choice) of each, sorted by list; a list is
    one block of one head of one sequence. owner: the list of each tile. first: the first tile of each list."""
    owner = tl.load(owner_ptr + tl.program_id(0))
    if owner < LISTS:
        head_at = owner // N
        batch, head = head_at // H, head_at % H
        begin, end = tl.load(begins_ptr + owner), tl.load(begins_ptr + owner + 1)
        at = begin + (tl.program_id(0) - tl.load(first_ptr + owner)) * ROWS + tl.arange(0, ROWS)
        pairs = tl.load(pairs_ptr + at, mask=at < end, other=-1)
        queries, channels = pairs // CHOICES, tl.arange(0, WIDTH)
        q_ptr += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
        rows, inside = queries[:, None] * q_row, (pairs[:, None] >= 0) & (channels[None, :] < D)
        q = tl.load(q_ptr + rows + channels[None, :], mask=inside, other=0.0)
        key = owner % N * BLOCK
        k_ptr += batch.to(tl.int64) * k_batch + (head // PER_GROUP).to(tl.int64) * k_head + key.to(tl.int64) * k_row
        v_ptr += batch.to(tl.int64) * v_batch + (head // PER_GROUP).to(tl.int64) * v_head + key.to(tl.int64) * v_row
        out = tl.zeros([ROWS, WIDTH], tl.float32)
        top, total = tl.full([ROWS], NOTHING, tl.float32), tl.zeros([ROWS], tl.float32)
        for start in range(0, BLOCK, COLUMNS):  # a past block is whole: nothing to mask
            keys = start + tl.arange(0, COLUMNS)
            k = load_rows(k_ptr, keys, channels, k_row, BLOCK, D, True, D == WIDTH)
            v = load_rows(v_ptr, keys, channels, v_row, BLOCK, D, True, D == WIDTH)
            scores = tl.dot(q, tl.trans(k), input_precision=EXACT)
            out, top, total = add_tile(out, top, total, scores, scale, v, False)
        to = head_at.to(tl.int64) * T * CHOICES + pairs
        tl.store(log_ptr + to, top + tl.log2(total), mask=pairs >= 0)
        out = (out / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + to[:, None] * D + channels[None, :], out, mask=inside)


@triton.jit
def _gathered_queries_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, parts_ptr, log_ptr, delta_ptr, pairs_ptr, owner_ptr, first_ptr, begins_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    H, PER_GROUP, T, N, LISTS, scale, natural,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Parts of the gradients of the queries that chose one block, as `_gathered_kernel` leaves parts of outputs. log,
    delta: of all keys that a query sees."""
    owner = tl.load(owner_ptr + tl.program_id(0))
    if owner < LISTS:
        head_at = owner // N
        batch, head = head_at // H, head_at % H
        begin, end = tl.load(begins_ptr + owner), tl.load(begins_ptr + owner + 1)
        at = begin + (tl.program_id(0) - tl.load(first_ptr + owner)) * ROWS + tl.arange(0, ROWS)
        there, channels = at < end, tl.arange(0, WIDTH)
        pairs = tl.load(pairs_ptr + at, mask=there, other=0)
        queries = pairs // CHOICES
        q_ptr += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
        grad_ptr += batch.to(tl.int64) * g_batch + head.to(tl.int64) * g_head
        q = load_gathered(q_ptr, queries, channels, q_row, there, D)
        grad = load_gathered(grad_ptr, queries, channels, g_row, there, D)
        row = head_at.to(tl.int64) * T
        log = tl.load(log_ptr + row + queries, mask=there, other=float("inf"))
        delta = tl.load(delta_ptr + row + queries, mask=there, other=0.0)
        key = owner % N * BLOCK
        k_ptr += batch.to(tl.int64) * k_batch + (head // PER_GROUP).to(tl.int64) * k_head + key.to(tl.int64) * k_row
        v_ptr += batch.to(tl.int64) * v_batch + (head // PER_GROUP).to(tl.int64) * v_head + key.to(tl.int64) * v_row
        dq = tl.zeros([ROWS, WIDTH], tl.float32)
        for start in range(0, BLOCK, COLUMNS):
            keys = start + tl.arange(0, COLUMNS)
            k = load_rows(k_ptr, keys, channels, k_row, BLOCK, D, True, D == WIDTH)
            v = load_rows(v_ptr, keys, channels, v_row, BLOCK, D, True, D == WIDTH)
            weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision=EXACT) * scale - log[:, None])
            slopes = weights * (tl.dot(grad, tl.trans(v), input_precision=EXACT) - delta[:, None])
            dq = tl.dot(slopes.to(k.dtype), k, dq, input_precision=EXACT)
        to = (row * CHOICES + pairs)[:, None] * D + channels[None, :]
        tl.store(parts_ptr + to, dq * natural, mask=there[:, None] & (channels[None, :] < D))


@triton.jit
def _merge_kernel(
    own_ptr, own_log_ptr, parts_ptr, logs_ptr, chosen_ptr, out_ptr, log_ptr, ROWS_ALL,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sum of each row's parts, weighted by their sums of exponentials, and the logarithm of all these. Rows are
    queries of all heads."""
    rows, channels = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    there, inside = rows < ROWS_ALL, (rows[:, None] < ROWS_ALL) & (channels[None, :] < D)
    log = tl.load(own_log_ptr + rows, mask=there, other=0.0)
    top = log
    for choice in tl.static_range(CHOICES):
        at = rows * CHOICES + choice
        taken = there & (tl.load(chosen_ptr + at, mask=there, other=-1) >= 0)
        top = tl.maximum(top, tl.load(logs_ptr + at, mask=taken, other=NOTHING))
    total = tl.exp2(log - top)
    own = tl.load(own_ptr + rows[:, None] * D + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    out = own * total[:, None]
    for choice in tl.static_range(CHOICES):
        at = rows * CHOICES + choice
        taken = there & (tl.load(chosen_ptr + at, mask=there, other=-1) >= 0)
        weight = tl.exp2(tl.load(logs_ptr + at, mask=taken, other=NOTHING) - top)
        part = tl.load(parts_ptr + at[:, None] * D + channels[None, :], mask=inside & taken[:, None], other=0.0)
        out += part.to(tl.float32) * weight[:, None]
        total += weight
    tl.store(log_ptr + rows, top + tl.log2(total), mask=there)
    at = out_ptr + rows[:, None] * D + channels[None, :]
    tl.store(at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


# ---- the function ---------------------------------------------------------------------------------------------------


def choose_blocks(q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, moba: Moba) -> torch.Tensor:
    """Return the past blocks that each query reads, best first, then -1: int32, [B, H, T, top - 1]."""
    (batch, heads, length, size), groups = q_BHTD.shape, k_BGTD.shape[1]
    means_BGND = block_means(k_BGTD, moba.block).contiguous()
    blocks = means_BGND.shape[2]
    if blocks > MOST_BLOCKS:
        raise ValueError(f"{length} tokens have {blocks} blocks of {moba.block}, at most {MOST_BLOCKS} are scored.")
    chosen = torch.empty((batch, heads, length, moba.top - 1), dtype=torch.int32, device=q_BHTD.device)
    width, scored = max(16, triton.next_power_of_2(size)), max(16, triton.next_power_of_2(blocks))
    rows = 64 if q_BHTD.dtype == torch.bfloat16 else max(16, 1024 // scored)  # float32 is on no tensor core: registers
    _gate_kernel[(triton.cdiv(length, rows), batch * heads)](
        q_BHTD, means_BGND, chosen, *strides_of(q_BHTD), heads, heads // groups, length, blocks,
        CHOICES=moba.top - 1, ROWS=rows, BLOCK=moba.block, BLOCKS=scored, D=size, WIDTH=width,
        num_warps=4 if scored <= 64 else 8,
    )  # fmt: skip
    return chosen


class _Moba(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BHTD: Any, k_BGTD: Any, v_BGTD: Any, moba: Moba, scale: float) -> Any:
        (batch, heads, length, size), groups = q_BHTD.shape, k_BGTD.shape[1]
        intervals = own_blocks(length, moba, q_BHTD.device)
        own, own_log = attend_intervals(q_BHTD, k_BGTD, v_BGTD, intervals, scale)
        chosen_BHTC, blocks = choose_blocks(q_BHTD, k_BGTD, moba), length // moba.block
        width, choices = max(16, triton.next_power_of_2(size)), moba.top - 1
        tiles = tiles_of("forward", width, q_BHTD.itemsize)
        pairs, owner, first, begins = listed(chosen_BHTC, blocks, tiles.rows)
        parts = torch.empty((*chosen_BHTC.shape, size), dtype=q_BHTD.dtype, device=q_BHTD.device)
        logs = torch.empty(chosen_BHTC.shape, dtype=torch.float32, device=q_BHTD.device)
        _gathered_kernel[(len(owner),)](
            q_BHTD, k_BGTD, v_BGTD, parts, logs, pairs, owner, first, begins, *strides_of(q_BHTD, k_BGTD, v_BGTD),
            heads, heads // groups, length, blocks, batch * heads * blocks, scale * LOG2E.value, CHOICES=choices,
            ROWS=tiles.rows, COLUMNS=min(tiles.columns, moba.block), BLOCK=moba.block, D=size, WIDTH=width,
            **tiles.launch,
        )  # fmt: skip
        out, log = torch.empty_like(own), torch.empty_like(own_log)
        rows: Any = batch * heads * length
        _merge_kernel[(triton.cdiv(rows, 16),)](
            own, own_log, parts, logs, chosen_BHTC, out, log, rows, CHOICES=choices, ROWS=16, D=size, WIDTH=width,
            num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(q_BHTD, k_BGTD, v_BGTD, out, log, chosen_BHTC)
        ctx.moba, ctx.scale = moba, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Any) -> Any:
        q_BHTD, k_BGTD, v_BGTD, out, log, chosen_BHTC = ctx.saved_tensors
        moba, scale = ctx.moba, ctx.scale
        grad_BHTD = grad_BHTD if grad_BHTD.stride(-1) == 1 else grad_BHTD.contiguous()
        (batch, heads, length, size), blocks = q_BHTD.shape, q_BHTD.shape[2] // moba.block
        delta, qkv = output_products(out, grad_BHTD), (q_BHTD, k_BGTD, v_BGTD)
        intervals = own_blocks(length, moba, q_BHTD.device)
        dq, dk, dv = interval_gradients(qkv, grad_BHTD, log, delta, intervals, scale)
        far = gathered_gradients(qkv, grad_BHTD, log, delta, chosen_BHTC, moba.block, blocks, scale)
        width = max(16, triton.next_power_of_2(size))
        tiles = tiles_of("queries", width, q_BHTD.itemsize)
        pairs, owner, first, begins = listed(chosen_BHTC, blocks, tiles.rows)
        parts = torch.zeros((*chosen_BHTC.shape, size), dtype=torch.float32, device=q_BHTD.device)
        _gathered_queries_kernel[(len(owner),)](
            q_BHTD, k_BGTD, v_BGTD, grad_BHTD, parts, log, delta, pairs, owner, first, begins,
            *strides_of(q_BHTD, k_BGTD, v_BGTD, grad_BHTD), heads, heads // k_BGTD.shape[1], length, blocks,
            batch * heads * blocks, scale * LOG2E.value, scale, CHOICES=moba.top - 1, ROWS=tiles.rows,
            COLUMNS=min(tiles.columns, moba.block), BLOCK=moba.block, D=size, WIDTH=width, **tiles.launch,
        )  # fmt: skip
        return dq + parts.sum(3).to(dq.dtype), dk + far[0], dv + far[1], None, None


def own_blocks(length: int, moba: Moba, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of each query's own block, as `KeyMasks.intervals` does with blocks as documents. The host reads
    nothing back, as it would to check documents, so it goes on launching."""
    at_T = torch.arange(length, dtype=torch.int32, device=device)
    return at_T // moba.block * moba.block, at_T + 1


def moba_attention(
    q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, moba: Moba = Moba(), *, scale: float | None = None
) -> torch.Tensor:
    """Return the attention of whole sequences, each query over its own block and the best past ones: [B, H, T, D].
    Gradients flow to q, k and v, as if the choice of blocks were given.

    q_BHTD, k_BGTD, v_BGTD: one dtype, at most 256 channels a head; H is a multiple of G.
    scale: of scores (default: channels ** -0.5).

    Raises ValueError for shapes that do not fit, and for more than 256 whole blocks.
    """
    check_same_length(q_BHTD, k_BGTD, v_BGTD)
    length, size = q_BHTD.shape[2:]
    scale = size**-0.5 if scale is None else scale
    q_BHTD, k_BGTD, v_BGTD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BHTD, k_BGTD, v_BGTD))
    if moba.top == 1 or length <= moba.block:
        intervals = own_blocks(length, moba, q_BHTD.device)
        out_BHTD, _ = WholeAttention.apply(q_BHTD, k_BGTD, v_BGTD, None, intervals, None, scale)
        return out_BHTD
    return _Moba.apply(q_BHTD, k_BGTD, v_BGTD, moba, scale)


# ---- ahead of time --------------------------------------------------------------------------------------------------

AOT = (
    ahead_of_time(
        _gate_kernel, Tiles(64, 64, 4, 3), 128, "q !means #chosen", "q", "H PER_GROUP T N", "", archs=("sm_90",),
        CHOICES=2, BLOCK=2048, BLOCKS=32,
    ),
    ahead_of_time(
        _gathered_kernel, tiles_of("forward", 128), 128, "q k v out !log #pairs #owner #first #begins", "qkv",
        "H PER_GROUP T N LISTS", "scale", archs=("sm_90",), CHOICES=2, BLOCK=2048,
    ),
    ahead_of_time(
        _gathered_queries_kernel, tiles_of("queries", 128), 128,
        "q k v grad !parts !log !delta #pairs #owner #first #begins", "qkvg", "H PER_GROUP T N LISTS", "scale natural",
        archs=("sm_90",), CHOICES=2, BLOCK=2048,
    ),
)  # fmt: skip

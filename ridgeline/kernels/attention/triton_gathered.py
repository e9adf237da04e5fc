"""Queries that chose blocks of keys, gathered by block: their lists, and the gradients of a block's keys and values.

Queries side by side choose different blocks, so the work of a block is a list of queries, and rows of q are gathered by
it. MoBA has a list for each block and head, native sparse attention for each block and group of heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.kernels.attention.triton_sdpa import (
    EXACT,
    LOG2E,
    ahead_of_time,
    load_rows,
    strides_of,
    tiles_of,
)


def listed(chosen_BLTC: torch.Tensor, blocks: int, rows: int) -> tuple[torch.Tensor, ...]:
    """Return (pairs, owner, first, begins) for tiles of so many rows. int32.

    chosen_BLTC: the blocks that each query chose, -1 for none; L is heads, or groups of them. A list is one block of
        one head of one sequence.
    pairs: query * choices + choice of each, sorted by list.
    owner, first: the list of each tile, and the first tile of each list.
    begins: the place in `pairs` at which each list begins, and the end of the last.

    All is computed on the device; owner has as many tiles as there can be, and beyond the last one the number of lists.
    """
    batch, heads, length, choices = chosen_BLTC.shape
    lists, device = batch * heads * blocks, chosen_BLTC.device

    def numbers(count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int32, device=device)

    key_SP = chosen_BLTC.reshape(batch * heads, length * choices)
    key_SP = torch.where(key_SP >= 0, key_SP + numbers(batch * heads)[:, None] * blocks, lists)
    sorted_P, order_P = key_SP.flatten().sort(stable=True)
    begins = torch.searchsorted(sorted_P, numbers(lists + 1), out_int32=True)
    tiles = (begins.diff() + (rows - 1)) // rows
    behind = tiles.cumsum(0, dtype=torch.int32)
    limit = key_SP.numel() // rows + lists  # a list has less than one tile more than its rows fill
    owner = torch.searchsorted(behind, numbers(limit), right=True, out_int32=True)
    return (order_P % (length * choices)).int(), owner, behind - tiles, begins


@triton.jit
def load_gathered(pointer, rows, channels, stride, there, D: tl.constexpr):
    """Load rows by number; 0 where they are not there, and beyond D channels."""
    at = pointer + rows[:, None] * stride + channels[None, :]
    return tl.load(at, mask=there[:, None] & (channels[None, :] < D), other=0.0)


@triton.jit
def _gathered_keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, log_ptr, delta_ptr, pairs_ptr, begins_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    H, G, L, T, N, scale, natural,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values of one group: sums over the queries of all its heads that chose its block,
    in causal order. L: lists of a sequence for each block, H or G. N: blocks that could be chosen."""
    tile = tl.program_id(0)
    batch, group = tl.program_id(1) // G, tl.program_id(1) % G
    keys, channels = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    k_ptr += batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
    v_ptr += batch.to(tl.int64) * v_batch + group.to(tl.int64) * v_head
    k = load_rows(k_ptr, keys, channels, k_row, T, D, False, D == WIDTH)
    v = load_rows(v_ptr, keys, channels, v_row, T, D, False, D == WIDTH)
    dk, dv = tl.zeros([COLUMNS, WIDTH], tl.float32), tl.zeros([COLUMNS, WIDTH], tl.float32)
    block = tile * COLUMNS // BLOCK
    for within in range(H // G):
        head = group * (H // G) + within
        own = begins_ptr + (batch * L + head // (H // L)) * N + block
        begin, end = tl.load(own, mask=block < N, other=0), tl.load(own + 1, mask=block < N, other=0)
        row = (batch * H + head).to(tl.int64) * T
        q_own = q_ptr + batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
        g_own = grad_ptr + batch.to(tl.int64) * g_batch + head.to(tl.int64) * g_head
        for start in range(begin, end, ROWS):
            at = start + tl.arange(0, ROWS)
            there = at < end
            queries = tl.load(pairs_ptr + at, mask=there, other=0) // CHOICES
            q = load_gathered(q_own, queries, channels, q_row, there, D)
            grad = load_gathered(g_own, queries, channels, g_row, there, D)
            log = tl.load(log_ptr + row + queries, mask=there, other=float("inf"))
            delta = tl.load(delta_ptr + row + queries, mask=there, other=0.0)
            weights = tl.exp2(tl.dot(k, tl.trans(q), input_precision=EXACT) * scale - log[None, :])
            weights = tl.where(keys[:, None] <= queries[None, :], weights, 0.0)
            dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision=EXACT)
            slopes = weights * (tl.dot(v, tl.trans(grad), input_precision=EXACT) - delta[None, :])
            dk = tl.dot(slopes.to(q.dtype), q, dk, input_precision=EXACT)
    at = (batch * G + group).to(tl.int64) * T * D + keys[:, None] * D + channels[None, :]
    inside = (keys[:, None] < T) & (channels[None, :] < D)
    tl.store(dk_ptr + at, (dk * natural).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)


def gathered_gradients(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_BHTD: torch.Tensor,
    log_BHT: torch.Tensor,
    delta_BHT: torch.Tensor,
    chosen_BLTC: torch.Tensor,
    block: int,
    blocks: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of k and v by the queries that chose their blocks.

    log_BHT, delta_BHT: of each query the logarithm to base 2 of its sum of exponentials, and the product of its output
        and that one's gradient.
    block: tokens of a block; blocks: those that could be chosen. L of `chosen_BLTC` is heads, or groups of them.
    """
    q_BHTD, k_BGTD, v_BGTD = qkv
    (batch, heads, length, size), groups = q_BHTD.shape, k_BGTD.shape[1]
    width = max(16, triton.next_power_of_2(size))
    tiles = tiles_of("keys", width, q_BHTD.itemsize)
    pairs, _, _, begins = listed(chosen_BLTC, blocks, tiles.rows)
    dk_BGTD, dv_BGTD = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k_BGTD, v_BGTD))
    columns = min(tiles.columns, block)
    _gathered_keys_kernel[(triton.cdiv(length, columns), batch * groups)](
        q_BHTD, k_BGTD, v_BGTD, grad_BHTD, dk_BGTD, dv_BGTD, log_BHT, delta_BHT, pairs, begins,
        *strides_of(q_BHTD, k_BGTD, v_BGTD, grad_BHTD), heads, groups, chosen_BLTC.shape[1], length, blocks,
        scale * LOG2E.value, scale, CHOICES=chosen_BLTC.shape[3], ROWS=tiles.rows, COLUMNS=columns, BLOCK=block,
        D=size, WIDTH=width, **tiles.launch,
    )  # fmt: skip
    return dk_BGTD, dv_BGTD


# ---- ahead of time --------------------------------------------------------------------------------------------------

AOT = (
    ahead_of_time(
        _gathered_keys_kernel, tiles_of("keys", 128), 128, "q k v grad dk dv !log !delta #pairs #begins", "qkvg",
        "H G L T N", "scale natural", archs=("sm_90",), CHOICES=2, BLOCK=2048,
    ),
)  # fmt: skip

"""The work list of the long rows for hopper.py, made on the device.

Legend:
    R  rows
    I  work items
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.attention.paged.op import PrefillItems

CACHED_BYTES = 24 << 20  # bytes of keys and values that are worked on at a time, about half of the second-level cache


def prefill_items(
    start_R1: Tensor,
    kv_len_R: Tensor,
    slots_R: Tensor,
    num_tokens: int,
    *,
    kv_row_bytes: int,
    few: int = 1,
    queries: int = 128,
    pack: int = 1,
) -> PrefillItems:
    """Make work items of the rows with more than `few` tokens, the longest first within sections that fit the cache.

    num_tokens: T, padding included.
    kv_row_bytes: bytes of one token's keys and values in one layer.
    queries: the queries of an item, 128 or 192. They are tokens times `pack` heads.
    pack: a power of two that divides the heads per key head.
    """
    num_rows = len(slots_R)
    limit = num_tokens // (queries // pack) + num_rows
    table_I4 = torch.empty(limit, 4, dtype=torch.int32, device=slots_R.device)
    count_1, ticket_1 = torch.empty(2, 1, dtype=torch.int32, device=slots_R.device)
    at_once, section = 32, max(1, CACHED_BYTES // kv_row_bytes)
    _items_kernel[(triton.cdiv(limit, at_once),)](
        start_R1, kv_len_R, slots_R, table_I4, count_1, ticket_1, num_rows, section, few,
        ROWS=triton.next_power_of_2(num_rows), ITEMS=at_once, QUERIES=queries // pack,
    )  # fmt: skip
    return PrefillItems(table_I4=table_I4, count_1=count_1, ticket_1=ticket_1, limit=limit, queries=queries, pack=pack)


@triton.jit
def _items_kernel(
    start_ptr, kv_len_ptr, slots_ptr, table_ptr, count_ptr, ticket_ptr, num_rows, section_tokens, few,
    ROWS: tl.constexpr, ITEMS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Place a few items in each program. An item's place is the number of items that go before it."""
    row_R = tl.arange(0, ROWS)
    real_R = row_R < num_rows
    start_R = tl.load(start_ptr + row_R, mask=real_R, other=0).to(tl.int32)
    new_R = tl.load(start_ptr + row_R + 1, mask=real_R, other=0).to(tl.int32) - start_R
    length_R = tl.load(kv_len_ptr + row_R, mask=real_R, other=0).to(tl.int32)
    slot_R = tl.load(slots_ptr + row_R, mask=real_R, other=0).to(tl.int32)
    tiles_R = tl.where(real_R & (new_R > few), (new_R + QUERIES - 1) // QUERIES, 0)
    upto_R = tl.cumsum(tiles_R, 0)
    count = tl.sum(tiles_R, 0)

    item_I = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row_I = tl.sum((upto_R[None, :] <= item_I[:, None]).to(tl.int32), 1)
    mine_IR = row_I[:, None] == row_R[None, :]
    tile_I = item_I - tl.sum(tl.where(mine_IR, (upto_R - tiles_R)[None, :], 0), 1)
    base_R = length_R - new_R
    position_I = tl.sum(tl.where(mine_IR, base_R[None, :], 0), 1) + tile_I * QUERIES
    before_I = items_before(row_R, tiles_R, length_R, base_R, section_tokens, row_I, position_I, mine_IR, QUERIES)
    place_ptr = table_ptr + 4 * before_I
    filled_I = item_I < count
    tl.store(place_ptr, tl.sum(tl.where(mine_IR, slot_R[None, :], 0), 1), mask=filled_I)
    first_I = tl.sum(tl.where(mine_IR, start_R[None, :], 0), 1) + tile_I * QUERIES
    tl.store(place_ptr + 1, first_I, mask=filled_I)
    left_I = tl.sum(tl.where(mine_IR, new_R[None, :], 0), 1) - tile_I * QUERIES
    tl.store(place_ptr + 2, tl.minimum(left_I, QUERIES), mask=filled_I)
    tl.store(place_ptr + 3, position_I, mask=filled_I)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, count)
        tl.store(ticket_ptr, 0)


@triton.jit
def items_before(
    row_R, tiles_R, length_R, base_R, section_tokens, row_I, position_I, mine_IR, QUERIES: tl.constexpr
):  # fmt: skip
    """Return the number of the rows' `tiles_R` items of QUERIES tokens that come before each item. Rows are taken in
    sections of so many keys.

    base_R: the position of a row's first query. row_I, position_I, mine_IR: an item's row, that row among all, and the
    position of its first query.
    """
    tokens_R = tl.where(tiles_R > 0, length_R, 0)
    section_R = (tl.cumsum(tokens_R, 0) - tokens_R) // section_tokens
    section_I = tl.sum(tl.where(mine_IR, section_R[None, :], 0), 1)
    # Row r's tiles are at base, base + QUERIES, …. Those at a later position go before this item, and so does one at
    # an equal position if its row is a lower one. All tiles of an earlier section go before it.
    ahead_IR = position_I[:, None] - base_R[None, :]
    at_or_below_IR = tl.where(ahead_IR < 0, 0, ahead_IR // QUERIES + 1)
    later_IR = tl.maximum(tiles_R[None, :] - at_or_below_IR, 0)
    equal_IR = (ahead_IR >= 0) & (ahead_IR % QUERIES == 0) & (at_or_below_IR <= tiles_R[None, :])
    before_IR = later_IR + (equal_IR & (row_R[None, :] < row_I[:, None])).to(tl.int32)
    before_IR = tl.where(section_R[None, :] == section_I[:, None], before_IR, 0)
    before_IR = tl.where(section_R[None, :] < section_I[:, None], tiles_R[None, :], before_IR)
    return tl.sum(before_IR, 1)


def tile_shape(head_dim: int, group: int, num_tokens: int, num_rows: int) -> tuple[int, int]:
    """Return (queries, pack) of a step's items, with `group` heads per key head.

    Heads of 64 leave registers for a third warpgroup, which hides more latency. But such large items waste more of
    short rows. Heads are packed if rows are too short to fill items.
    """
    queries = 192 if head_dim == 64 and num_tokens >= 4096 * num_rows else 128
    return queries, group & -group if num_tokens < 64 * num_rows else 1

"""Prefill attention over the paged cache for Hopper: bulk tensor copies, warpgroup MMA, specialised warps.

A work item is 128 or 192 queries of one row: consecutive tokens times the heads that share a key head, so that short
rows fill it too. One warp draws items by ticket, one streams key and value tiles, block by block, into two rings of
shared memory; two or three warpgroups own 64 queries each. A warpgroup asks at once for the next tile's scores and for
the product of the weights before them with their values, as in FlashAttention-3 (arXiv 2407.08608); while it works on
the softmax, the tensor cores serve the others. Keys are visited from the newest to the oldest, so tiles that need a
mask come first.

Legend as in op.py; I work items; a table entry is (slot, first token, tokens, position of the first). PACK heads
of a token follow each other in a tile; a unit is PACK heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.attention.op import PrefillItems, RaggedBatch
from ridgeline.kernels.gluon_names import load_tile, viewed
from ridgeline.kernels.launch import launch_options, num_multiprocessors

PANEL = gl.constexpr(64)  # columns in one swizzled panel of shared memory: 128 bytes of a 16-bit type
LOG2E = 1.4426950408889634
CACHED_BYTES = 24 << 20  # keys and values worked on at a time, about half of the second-level cache


def supports(arch: str, dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
    """Whether `prefill_attention` can run: Hopper, 16-bit types, heads of 64 or 128, blocks of 8, 16, … 256 tokens."""
    blocks = 8 <= block_size <= 256 and block_size & (block_size - 1) == 0
    return arch == "sm_90" and dtype in (torch.bfloat16, torch.float16) and head_dim in (64, 128) and blocks


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
    """Work items of the rows with more than `few` tokens, longest first within sections that fit the cache.

    `num_tokens` is T, padding included; `kv_row_bytes` the size of one token's keys and values in one layer; `queries`
    of an item, 128 or 192, are tokens times `pack` heads, a power of two that divides the heads per key head.
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
    """Every program places a few items: an item's place is the number of items that go before it."""
    row_R = tl.arange(0, ROWS)
    real_R = row_R < num_rows
    start_R = tl.load(start_ptr + row_R, mask=real_R, other=0).to(tl.int32)
    new_R = tl.load(start_ptr + row_R + 1, mask=real_R, other=0).to(tl.int32) - start_R
    length_R = tl.load(kv_len_ptr + row_R, mask=real_R, other=0).to(tl.int32)
    slot_R = tl.load(slots_ptr + row_R, mask=real_R, other=0).to(tl.int32)
    tiles_R = tl.where(real_R & (new_R > few), (new_R + QUERIES - 1) // QUERIES, 0)
    tokens_R = tl.where(tiles_R > 0, length_R, 0)
    section_R = (tl.cumsum(tokens_R, 0) - tokens_R) // section_tokens
    upto_R = tl.cumsum(tiles_R, 0)
    count = tl.sum(tiles_R, 0)

    item_I = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    row_I = tl.sum((upto_R[None, :] <= item_I[:, None]).to(tl.int32), 1)
    mine_IR = row_I[:, None] == row_R[None, :]
    tile_I = item_I - tl.sum(tl.where(mine_IR, (upto_R - tiles_R)[None, :], 0), 1)
    base_R = length_R - new_R
    position_I = tl.sum(tl.where(mine_IR, base_R[None, :], 0), 1) + tile_I * QUERIES
    section_I = tl.sum(tl.where(mine_IR, section_R[None, :], 0), 1)

    # Of row r's tiles, at base, base + QUERIES, …, those at a later position go before, as does an equal one of a
    # lower row; in an earlier section all do.
    ahead_IR = position_I[:, None] - base_R[None, :]
    at_or_below_IR = tl.where(ahead_IR < 0, 0, ahead_IR // QUERIES + 1)
    later_IR = tl.maximum(tiles_R[None, :] - at_or_below_IR, 0)
    equal_IR = (ahead_IR >= 0) & (ahead_IR % QUERIES == 0) & (at_or_below_IR <= tiles_R[None, :])
    before_IR = later_IR + (equal_IR & (row_R[None, :] < row_I[:, None])).to(tl.int32)
    before_IR = tl.where(section_R[None, :] == section_I[:, None], before_IR, 0)
    before_IR = tl.where(section_R[None, :] < section_I[:, None], tiles_R[None, :], before_IR)
    place_ptr = table_ptr + 4 * tl.sum(before_IR, 1)
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


def tile_shape(head_dim: int, group: int, num_tokens: int, num_rows: int) -> tuple[int, int]:
    """(queries, pack) of a step's items, with `group` heads per key head.

    Heads of 64 leave registers for a third warpgroup, which hides more; items so large waste more of short rows. Heads
    are packed where rows are too short to fill items.
    """
    queries = 192 if head_dim == 64 and num_tokens >= 4096 * num_rows else 128
    return queries, group & -group if num_tokens < 64 * num_rows else 1


@dataclass(frozen=True, kw_only=True)
class Config:
    """KEYS in a tile, STAGES of each ring, registers per thread. Queries of an item see at most STAGES - 1 tiles more
    than others of it."""

    KEYS: int = 128
    STAGES: int = 2
    CONSUMER_REGS: int = 232
    PRODUCER_REGS: int = 40


def choose(head_dim: int, queries: int) -> Config:
    """Measured on an H200: smaller key tiles are slower at every length."""
    if queries > 128:
        return Config(STAGES=4, CONSUMER_REGS=160, PRODUCER_REGS=24)
    return Config(STAGES=2 if head_dim == 128 else 4)


def prefill_attention(
    q_THD: Tensor,
    k_cache_NGPD: Tensor,
    v_cache_NGPD: Tensor,
    batch: RaggedBatch,
    items: PrefillItems,
    *,
    scale: float,
    out_THD: Tensor,
    window: int | None = None,
    config: Config | None = None,
) -> None:
    """Attention of the rows that `items` lists, as `op.paged_attention_reference`, into `out_THD`.

    Other rows are left alone. Memory that no query sees may hold anything, NaN included. Heads of a query must be
    adjacent; caches' blocks must start at multiples of D elements.
    """
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads, block_size = k_cache_NGPD.shape[1:3]
    longest = None if batch.kv_bound_R is None else int(batch.kv_bound_R.max(initial=1))
    config = config or choose(head_dim, items.queries)
    box = min(block_size, config.KEYS)
    per_kv, pack = num_heads // num_kv_heads, items.pack
    k_XD, v_XD = _rows(k_cache_NGPD), _rows(v_cache_NGPD)
    programs = min(items.limit * num_heads // pack, num_multiprocessors(q_THD.device))
    prefill_kernel[(programs,)](
        _descriptor(q_THD, 64 // pack, pack), _descriptor(k_XD, box), _descriptor(v_XD, box), out_THD,
        items.table_I4, items.count_1, items.ticket_1, _heads_at_once(longest, k_cache_NGPD) * per_kv // pack,
        batch.block_table_SC, scale * LOG2E, out_THD.stride(0), batch.block_table_SC.stride(0),
        k_cache_NGPD.stride(0) // head_dim, k_cache_NGPD.stride(1) // head_dim,
        v_cache_NGPD.stride(0) // head_dim, v_cache_NGPD.stride(1) // head_dim, max(len(k_XD), len(v_XD)),
        UNITS=num_heads // pack, PER_KV=per_kv, PACK=pack, P=block_size, BOX=box, D=head_dim,
        KEYS=config.KEYS, STAGES=config.STAGES, WINDOW=window or 0,
        CONSUMERS=items.queries // 64, CONSUMER_REGS=config.CONSUMER_REGS, PRODUCER_REGS=config.PRODUCER_REGS,
        num_warps=4, **launch_options(q_THD.device),
    )  # fmt: skip


def _rows(cache_NGPD: Tensor) -> Tensor:
    """The cache's memory, gaps between blocks included, as rows of D elements."""
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
    """Key heads whose part of the longest row about fits the cache, a divisor of their number; all if not known."""
    num_kv_heads, _, head_dim = k_cache_NGPD.shape[1:]
    heads = num_kv_heads
    while longest is not None and heads % 2 == 0 and heads * longest * head_dim * 4 > 2 * CACHED_BYTES:
        heads //= 2
    return heads


@gluon.jit
def _item(w, table_ptr, count, units_at_once, real):
    """Work index → its table entry and unit. All items of `units_at_once` units come before the next units' items.
    An entry of zeros if not `real`."""
    part = w // gl.maximum(count * units_at_once, 1)
    rest = w - part * (count * units_at_once)
    entry_ptr = table_ptr + 4 * (rest // units_at_once)
    slot = gl.load(entry_ptr, mask=real, other=0)
    token = gl.load(entry_ptr + 1, mask=real, other=0)
    tokens = gl.load(entry_ptr + 2, mask=real, other=0)
    position = gl.load(entry_ptr + 3, mask=real, other=0)
    return slot, token, tokens, position, part * units_at_once + rest % units_at_once


@gluon.jit
def _tiles(position, tokens, KEYS: gl.constexpr, WINDOW: gl.constexpr):
    """(newest, oldest) key tile that any of the item's tokens sees."""
    newest = (position + tokens - 1) // KEYS
    oldest = position * 0
    if WINDOW > 0:
        oldest = gl.maximum(position - WINDOW + 1, 0) // KEYS
    return newest, oldest


@gluon.jit
def _blocks(row_ptr, first, begin, end, P: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr):
    """The block of every box of a tile, -1 where nobody sees a key of it."""
    blocks = ()
    for b in gl.static_range(KEYS // BOX):
        key = first + b * BOX
        seen = (key < end) & (key + BOX > begin)
        blocks = blocks + (gl.load(row_ptr + key // P, mask=seen, other=-1),)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@gluon.jit
def _load_keys(
    desc, tile, bar, blocks, first, block_rows, head_row, nowhere,
    AT: gl.constexpr, P: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """One key or value tile: boxes of `BOX` tokens, each within one block, 64 columns at a time."""
    layout: gl.constexpr = desc.layout
    boxes = viewed(tile, [D // PANEL * (KEYS // BOX), BOX, PANEL], layout)
    mbarrier.expect(bar, KEYS * D * 2)
    for b in gl.static_range(KEYS // BOX):
        # A box nobody sees is addressed outside the cache, where copies read zeros.
        block = blocks[AT + b]
        row = gl.where(block >= 0, block * block_rows + head_row + (first + b * BOX) % P, nowhere)
        for panel in gl.static_range(D // PANEL):
            load_tile(desc, [row, panel * PANEL], bar, boxes.index(panel * (KEYS // BOX) + b))


@gluon.jit
def _tell(slot, value):
    slot.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _hear(slot, WARPS: gl.constexpr):
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def _scheduler(
    table_ptr, count_ptr, ticket_ptr, units_at_once, news, bars, UNITS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Draws items, always one ahead of the others, and tells them; an item without tokens at the end."""
    news_full: gl.constexpr = 5
    count = gl.load(count_ptr)
    w = gl.program_id(0)
    round = 0
    more = True
    while more:
        more = w < count * UNITS
        slot, token, tokens, position, unit = _item(gl.where(more, w, 0), table_ptr, count, units_at_once, more)
        here = round % 2
        mbarrier.wait(bars[news_full + 1].index(here), ((round // 2) & 1) ^ 1)
        _tell(news.index(here * 8), token)
        _tell(news.index(here * 8 + 1), tokens)
        _tell(news.index(here * 8 + 2), position)
        _tell(news.index(here * 8 + 3), unit)
        _tell(news.index(here * 8 + 4), slot)
        mbarrier.arrive(bars[news_full].index(here), count=1)
        if more:
            # As many tickets are drawn as there are items; the last one makes the counter ready for the next launch.
            drawn = gl.atomic_add(ticket_ptr, 1, sem="relaxed")
            if drawn == count * UNITS - 1:
                gl.store(ticket_ptr, 0)
            w = drawn + gl.num_programs(0)
        round += 1
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _news(news, bars, round, WARPS: gl.constexpr):
    """The round's item: (first token, tokens, position of the first, unit, slot); no tokens at the end."""
    news_full: gl.constexpr = 5
    here = round % 2
    mbarrier.wait(bars[news_full].index(here), (round // 2) & 1)
    token = _hear(news.index(here * 8), WARPS)
    tokens = _hear(news.index(here * 8 + 1), WARPS)
    position = _hear(news.index(here * 8 + 2), WARPS)
    unit = _hear(news.index(here * 8 + 3), WARPS)
    slot = _hear(news.index(here * 8 + 4), WARPS)
    mbarrier.arrive(bars[news_full + 1].index(here), count=1)
    return token, tokens, position, unit, slot


@gluon.jit
def _producer(
    descs, places, q, rings,
    PER_KV: gl.constexpr, PACK: gl.constexpr, P: gl.constexpr, BOX: gl.constexpr,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Fills the rings in the order in which they are drained: K0 Q K1 V0 K2 V1 … of item after item."""
    q_desc, k_desc, v_desc = descs
    k, v, news, bars = rings
    blocks_ptr, columns, k_block_rows, k_head_rows, v_block_rows, v_head_rows, nowhere = places
    q_layout: gl.constexpr = q_desc.layout
    q_full, q_empty, k_full, v_full, empty, _news_full, _news_empty = bars
    base = 0
    round = 0
    token, tokens, position, unit, slot = _news(news, bars, 0, 1)
    while tokens > 0:
        here = round % 2
        newest, oldest = _tiles(position, tokens, KEYS, WINDOW)
        end = position + tokens
        begin = position * 0
        if WINDOW > 0:
            begin = gl.maximum(position - WINDOW + 1, 0)
        group = unit * PACK // PER_KV
        row_ptr = blocks_ptr + slot.to(gl.int64) * columns
        tiles = newest - oldest + 1
        blocks = _blocks(row_ptr, newest * KEYS, begin, end, P, BOX, KEYS)
        blocks = blocks + blocks
        for i in range(tiles + 1):
            first = (newest - i) * KEYS
            # Asked for a tile ahead. Blocks of the tile before go to the values, which come a tile later than keys.
            next_blocks = _blocks(row_ptr, gl.maximum(first - KEYS, 0), begin, end, P, BOX, KEYS)
            # Key tile `step` and the value tile before it take the places of two that were used together.
            step = base + i
            mbarrier.wait(empty.index(step % STAGES), ((step // STAGES) & 1) ^ 1)
            if i < tiles:
                _load_keys(
                    k_desc, k.index(step % STAGES), k_full.index(step % STAGES), blocks, first,
                    k_block_rows, group * k_head_rows, nowhere, 0, P, BOX, D, KEYS,
                )  # fmt: skip
            if i == 0:
                mbarrier.wait(q_empty.index(here), ((round // 2) & 1) ^ 1)
                mbarrier.expect(q_full.index(here), CONSUMERS * 64 * D * 2)
                for part in gl.static_range(CONSUMERS):
                    panels = viewed(q[part].index(here), [D // PANEL, 64 // PACK, PACK, PANEL], q_layout)
                    for panel in gl.static_range(D // PANEL):
                        at = [token + part * (64 // PACK), unit * PACK, panel * PANEL]
                        load_tile(q_desc, at, q_full.index(here), panels.index(panel))
            else:
                s = (step - 1) % STAGES
                _load_keys(
                    v_desc, v.index(s), v_full.index(s), blocks, first + KEYS, v_block_rows, group * v_head_rows,
                    nowhere, KEYS // BOX, P, BOX, D, KEYS,
                )  # fmt: skip
            for b in gl.static_range(KEYS // BOX):
                next_blocks = next_blocks + (blocks[b],)  # noqa: RUF005
            blocks = next_blocks
        base += tiles
        round += 1
        token, tokens, position, unit, slot = _news(news, bars, round, 1)


@gluon.jit
def _zero_rows(tile, begin, end, D: gl.constexpr, KEYS: gl.constexpr):
    """Rows begin … end - 1 of a value tile become 0: 0 · NaN must never reach the sum."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    tile_layout: gl.constexpr = tile.layout
    atoms = viewed(tile, [D // PANEL * (KEYS // 8), 8, PANEL], tile_layout)
    row = gl.arange(0, 8, gl.SliceLayout(1, layout))
    for a in range(begin // 8, (end + 7) // 8):
        at = gl.expand_dims(row, 1) + a * 8
        keep = ((at < begin) | (at >= end)).broadcast_to([8, PANEL])
        for panel in gl.static_range(D // PANEL):
            atom = atoms.index(panel * (KEYS // 8) + a)
            x = atom.load(layout)
            atom.store(gl.where(keep, x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def _masked(s, first_key, position, WINDOW: gl.constexpr, KEYS: gl.constexpr, PACK: gl.constexpr):
    """Scores of keys a query must not see become -inf, whatever they were (NaN too)."""
    layout: gl.constexpr = s.type.layout
    key = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, layout)), 0)
    last = gl.expand_dims(position - first_key + gl.arange(0, 64, gl.SliceLayout(1, layout)) // PACK, 1)
    seen = key <= last
    if WINDOW > 0:
        seen = seen & (key > last - WINDOW)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _softmax(s, m, scale_log2):
    """(new maximum, weights relative to it, by how much the old weights shrink)."""
    new = gl.maximum(m, gl.max(s, 1))
    shift = new * scale_log2
    shrink = gl.exp2((m - new) * scale_log2)
    return new, gl.exp2(s * scale_log2 - gl.expand_dims(shift, 1)), shrink


@gluon.jit
def _as_column(x, like):
    """One value per row, to be broadcast over the columns of `like`."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, like.type.layout)), 1)


@gluon.jit
def _clean(
    v, step, tile, tokens, position, bars, BOX: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Make an item's newest values, if this tile is them, safe beyond its last key. No product may be under way."""
    end = (position + tokens - 1) % KEYS + 1
    if (end % BOX != 0) & (tile == (position + tokens - 1) // KEYS):
        here = step % STAGES
        mbarrier.wait(bars[3].index(here), (step // STAGES) & 1)
        _zero_rows(v.index(here), end, (end + BOX - 1) // BOX * BOX, D, KEYS)


@gluon.jit
def _clean_behind(
    v, step, position, bars, BOX: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Make an item's oldest values, which this step is, safe before the first key that the window leaves. As above."""
    begin = gl.maximum(position - WINDOW + 1, 0) % KEYS
    if begin % BOX != 0:
        here = step % STAGES
        mbarrier.wait(bars[3].index(here), (step // STAGES) & 1)
        _zero_rows(v.index(here), begin // BOX * BOX, begin, D, KEYS)


@gluon.constexpr_function
def _wide(D):
    """8 neighbouring columns in a thread, to be stored at once; rows stay in the warp where products leave them."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *([0, 32 << i] for i in range((D // 32).bit_length() - 1))],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, D],
    )


@gluon.jit
def _finish(
    o, total, out_ptr, out_stride, token, tokens, unit, dtype: gl.constexpr, part: gl.constexpr,
    PACK: gl.constexpr,
):  # fmt: skip
    """Write 64 queries' outputs, those that exist."""
    D: gl.constexpr = o.shape[1]
    layout: gl.constexpr = _wide(D)
    o = o * _as_column(1 / total, o)
    out = gl.convert_layout(o.to(dtype), layout)
    row = part * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    at = (token + row // PACK).to(gl.int64) * out_stride + (unit * PACK + row % PACK) * D
    pointers = out_ptr + gl.expand_dims(at, 1) + gl.expand_dims(column, 0)
    gl.store(pointers, out, mask=gl.expand_dims(row // PACK < tokens, 1))


@gluon.jit
def _steps(
    first, steps, step, last, o, p, m, total, q, k, v, bars, position, tokens, scale_log2,
    out_ptr, out_stride, token_before, tokens_before, unit_before, part: gl.constexpr,
    PACK: gl.constexpr, BEGINS: gl.constexpr, MASKED: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Key tiles first, first - 1, …: each one's scores are computed together with the values of the tile before it.

    BEGINS: the first is an item's newest, so the weights before it are the last of the item before, which is finished
    on the way. No product is under way when a step begins or ends, or ptxas would serialize them all.
    """
    _q_full, _q_empty, k_full, v_full, empty, _news_full, _news_empty = bars
    p_layout: gl.constexpr = p.type.layout
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    dtype: gl.constexpr = p.dtype
    for i in range(steps):
        here = step % STAGES
        before = (last + STAGES) % STAGES
        mbarrier.wait(k_full.index(here), (step // STAGES) & 1)
        mbarrier.wait(v_full.index(before), (last // STAGES) & 1, pred=last >= 0)
        nothing = gl.zeros([64, KEYS], gl.float32, s_layout)
        s = warpgroup_mma(q, k.index(here).permute((1, 0)), nothing, use_acc=False, is_async=True)
        o = warpgroup_mma(p, v.index(before), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        if MASKED:
            s = _masked(s, (first - i) * KEYS, position + part * (64 // PACK), WINDOW, KEYS, PACK)
        done = total
        if BEGINS:
            m = gl.where(i == 0, gl.full_like(m, -1e30), m)
            total = gl.where(i == 0, gl.zeros_like(total), total)
        m, weights, shrink = _softmax(s, m, scale_log2)
        total = total * shrink + gl.sum(weights, 1)
        next_p = gl.convert_layout(weights.to(dtype), p_layout)
        # How much of the softmax runs beside this product is left to ptxas: neither all nor nothing was as fast.
        o = warpgroup_mma_wait(0, deps=(o,))
        if BEGINS:  # noqa: SIM102
            if i == 0:
                for passed in range(last + 1, step):
                    mbarrier.arrive(empty.index(passed % STAGES), count=1)
        mbarrier.arrive(empty.index(here), count=1)
        if BEGINS:  # noqa: SIM102
            if i == 0:
                _finish(o, done, out_ptr, out_stride, token_before, tokens_before, unit_before, dtype, part, PACK)
                o = gl.zeros_like(o)
                _clean(v, step, first, tokens, position, bars, BOX, D, KEYS, STAGES)
        o = o * _as_column(shrink, o)
        p = next_p
        last = step
        step += 1
    return step, last, o, p, m, total


@gluon.jit
def _consumer(
    q_tiles, rings, out, scale_log2, part: gl.constexpr,
    PACK: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """64 queries of every item. An item's first scores are computed while the last values of the one before come in."""
    k, v, news, bars = rings
    out_ptr, out_stride = out
    q_full, q_empty, _k_full, v_full, _empty, _news_full, _news_empty = bars
    dtype: gl.constexpr = q_tiles.dtype
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o = gl.zeros([64, D], gl.float32, o_layout)
    p = gl.zeros([64, KEYS], dtype, gl.DotOperandLayout(0, o_layout, 2))
    m = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
    step = 0
    last = step - 1  # whose weights have not met their values yet
    round = 0
    token_before = 0
    tokens_before = 0
    unit_before = 0
    token, tokens, position, unit, _slot = _news(news, bars, 0, 4)
    while tokens > 0:
        q = q_tiles.index(round % 2)
        newest, oldest = _tiles(position, tokens, KEYS, WINDOW)
        mine = position + part * (64 // PACK)
        # Tiles that only later queries of the item see are passed by.
        own = gl.minimum(newest, (mine + 64 // PACK - 1) // KEYS)
        step += newest - own
        newest = own
        # The newest tile and tiles that causality cuts, then whole ones, then those that the window cuts.
        whole = gl.minimum(newest - 1, (mine + 1) // KEYS - 1)
        cut = oldest
        if WINDOW > 0:
            cut = gl.maximum(
                gl.minimum((gl.maximum(mine + 64 // PACK - WINDOW, 0) + KEYS - 1) // KEYS, whole + 1), oldest
            )
        whole = gl.minimum(gl.maximum(whole, cut - 1), newest - 1)
        mbarrier.wait(q_full.index(round % 2), (round // 2) & 1)
        step, last, o, p, m, total = _steps(
            newest, newest - whole, step, last, o, p, m, total, q, k, v, bars, position, tokens, scale_log2,
            out_ptr, out_stride, token_before, tokens_before, unit_before, part,
            PACK, True, True, BOX, D, KEYS, STAGES, WINDOW,
        )  # fmt: skip
        step, last, o, p, m, total = _steps(
            whole, whole + 1 - cut, step, last, o, p, m, total, q, k, v, bars, position, tokens, scale_log2,
            out_ptr, out_stride, token_before, tokens_before, unit_before, part,
            PACK, False, False, BOX, D, KEYS, STAGES, WINDOW,
        )  # fmt: skip
        if WINDOW > 0:
            rest = gl.minimum(cut - 1, newest - 1)
            step, last, o, p, m, total = _steps(
                rest, rest + 1 - oldest, step, last, o, p, m, total, q, k, v, bars, position, tokens, scale_log2,
                out_ptr, out_stride, token_before, tokens_before, unit_before, part,
                PACK, False, True, BOX, D, KEYS, STAGES, WINDOW,
            )  # fmt: skip
            _clean_behind(v, last, position, bars, BOX, D, KEYS, STAGES, WINDOW)
        mbarrier.arrive(q_empty.index(round % 2), count=1)
        token_before, tokens_before, unit_before = token, tokens, unit
        round += 1
        token, tokens, position, unit, _slot = _news(news, bars, round, 4)
    if step > 0:
        before = last % STAGES
        mbarrier.wait(v_full.index(before), (last // STAGES) & 1)
        o = warpgroup_mma(p, v.index(before), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        _finish(o, total, out_ptr, out_stride, token_before, tokens_before, unit_before, dtype, part, PACK)


@gluon.jit
def _barriers(number: gl.constexpr, count: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def prefill_kernel(
    q_desc, k_desc, v_desc, out_ptr, table_ptr, count_ptr, ticket_ptr, units_at_once, blocks_ptr, scale_log2,
    out_stride, columns, k_block_rows, k_head_rows, v_block_rows, v_head_rows, nowhere,
    UNITS: gl.constexpr, PER_KV: gl.constexpr, PACK: gl.constexpr, P: gl.constexpr, BOX: gl.constexpr,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    CONSUMERS: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = k_desc.layout
    q0 = gl.allocate_shared_memory(dtype, [2, 64, D], layout)  # a consumer's queries of two items
    q1 = gl.allocate_shared_memory(dtype, [2, 64, D], layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], layout)
    news = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = _barriers(2, 1), _barriers(2, CONSUMERS)
    k_full, v_full, empty = _barriers(STAGES, 1), _barriers(STAGES, 1), _barriers(STAGES, CONSUMERS)
    news_full, news_empty = _barriers(2, 1), _barriers(2, CONSUMERS + 1)
    fence_async_shared()
    if PDL:
        gdc_wait()
    bars = (q_full, q_empty, k_full, v_full, empty, news_full, news_empty)
    descs = (q_desc, k_desc, v_desc)
    places = (blocks_ptr, columns, k_block_rows, k_head_rows, v_block_rows, v_head_rows, nowhere)
    rings, out = (k, v, news, bars), (out_ptr, out_stride)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (q0, rings, out, scale_log2, 0, PACK, BOX, D, KEYS, STAGES, WINDOW)),
                (_consumer, (q1, rings, out, scale_log2, 1, PACK, BOX, D, KEYS, STAGES, WINDOW)),
                (_producer, (descs, places, (q0, q1), rings, PER_KV, PACK, P, BOX, D, KEYS, STAGES, WINDOW, 2)),
                (_scheduler, (table_ptr, count_ptr, ticket_ptr, units_at_once, news, bars, UNITS, PDL)),
            ],
            [4, 1, 1],
            [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )  # fmt: skip
    else:
        q2 = gl.allocate_shared_memory(dtype, [2, 64, D], layout)
        gl.warp_specialize(
            [
                (_consumer, (q0, rings, out, scale_log2, 0, PACK, BOX, D, KEYS, STAGES, WINDOW)),
                (_consumer, (q1, rings, out, scale_log2, 1, PACK, BOX, D, KEYS, STAGES, WINDOW)),
                (_consumer, (q2, rings, out, scale_log2, 2, PACK, BOX, D, KEYS, STAGES, WINDOW)),
                (_producer, (descs, places, (q0, q1, q2), rings, PER_KV, PACK, P, BOX, D, KEYS, STAGES, WINDOW, 3)),
                (_scheduler, (table_ptr, count_ptr, ticket_ptr, units_at_once, news, bars, UNITS, PDL)),
            ],
            [4, 4, 1, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )  # fmt: skip

"""Attention's work list. It is made on the device, so that a captured graph serves rows of any length.

Rows with few tokens are bound by reading their keys. These are cut into items of about equal length, just enough to
fill the GPU (split-KV, as in Flash-Decoding). Longer rows are bound by arithmetic and are cut into query tiles. Rows
with a few tokens more, which would leave most of a tile and of the GPU idle, are cut into items if all rows bring
equally many, so that no row pays for products that a longer one needs. The host sizes the tables and the grids by the
most pieces that there can be; programs beyond the counts end at once.

Rows with equal first blocks may read these together (cascade.py). A row's items are then cut from the rest of its keys.

Legend:
    R  rows
    I  items
    J  query tiles
    T  tokens
    G  key/value heads
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.attention.paged.cascade import make_cascade, pieces_of
from ridgeline.kernels.attention.paged.cost import ITEM_PAIRS
from ridgeline.kernels.attention.paged.op import AttentionShape, PrefillItems, Schedule
from ridgeline.kernels.base.launch import compute_capability, launch_options, num_multiprocessors
from ridgeline.kernels.base.tree import NODES

KEY_TILE = 64  # items begin and end at multiples of it (but for the last), so kernels' key tiles must divide it
WHOLE = 256  # so few keys are not split: one program reads them sooner than several could add up their parts
DOT_ROWS = 16  # rows of the smallest matrix product: heads of a group times tokens of an item
# Where all rows bring equally many tokens, as those that verify drafts do, products may have more rows, and of wide
# heads fewer: these fit the registers of an item (sm_90, 16 bits: 250 of heads of 128, 214 of heads of 512).
EQUAL_ROWS, EQUAL_WIDE_ROWS, NARROW_BYTES = 64, 32, 256
HOPPER_TOKENS = 256  # in smaller steps a tile of 128 queries of one head is mostly empty
# From so few tokens on hopper.py runs where a row has so many keys, which it cuts into pieces.
SMALL_HOPPER_TOKENS, DEEP_KEYS = 64, 4096
SPLIT_TOKENS = 2048  # larger steps are not captured, and would compile the list of pieces while they are due
SPLIT_WAVES = 8  # behind so many waves of items the last one costs too little for pieces
TILE_ROWS = 128  # queries of a tile, tokens times heads of a group
TILE_BYTES = 64 << 10  # so large may a tile's queries be; with twice as many of 512 in 16 bits their sums spill
# Steps of fewer tokens take smaller tiles, so that there are more of them: 128 tokens of Qwen3-0.6B went from 7.5 to
# 6.0 µs (docs/log.md).
FEW_TOKENS, FEW_ROWS = 512, 64


def make_schedule(start_R1: Tensor, kv_len_R: Tensor, slots_R: Tensor, shape: AttentionShape) -> Schedule:
    """Make the schedule by some small kernels."""
    num_tokens, tokens_each, num_heads, num_kv_heads, window, cache_NGPD, prefix_4R, *_ = shape
    head_bytes, item_queries, trees, fixed = shape.head_bytes, shape.item_queries, shape.trees, shape.fixed
    device, num_rows = kv_len_R.device, len(slots_R)
    group = num_heads // num_kv_heads
    few = 0 if fixed else max(1, DOT_ROWS // group)
    equal_rows = ITEM_PAIRS if item_queries else EQUAL_ROWS if head_bytes <= NARROW_BYTES else EQUAL_WIDE_ROWS
    equal = max(few, equal_rows // group)
    all_short = not fixed and 0 < tokens_each <= equal
    few = tokens_each if all_short else few
    rows = FEW_ROWS if num_tokens < FEW_TOKENS and not fixed else TILE_ROWS
    tile_tokens = max(1, (item_queries or min(rows, TILE_BYTES // max(1, head_bytes))) // group)
    programs = num_kv_heads * (triton.cdiv(max(1, few) * group, item_queries) if item_queries else 1)  # of an item
    target = item_target(num_rows, programs, device, waves=1 if item_queries else 2)
    max_items = target + num_rows
    cache_NGPD = None if all_short or fixed or trees or shape.ahead else cache_NGPD
    certain = cache_NGPD is not None and hopper_is_faster(num_tokens, cache_NGPD)
    max_tiles = (
        0
        if all_short or (certain and not shape.widened)
        else min(num_tokens // (few + 1), num_rows) + num_tokens // tile_tokens
    )
    cascade = None
    if prefix_4R is not None and window is None and not fixed and not trees and tokens_each <= 1:
        cascade = make_cascade(start_R1, kv_len_R, slots_R, shape, KEY_TILE, WHOLE, max_items)
    rows = 16  # 16, 64, 256, …: few sizes, since each is one more compilation
    while rows < num_rows:
        rows *= 4
    items_each = max(1, min(16, 16384 // rows))
    item_programs = triton.cdiv(max_items, items_each)
    schedule = Schedule(
        items_I8=torch.empty(max_items, 8, dtype=torch.int32, device=device),
        tiles_J4=torch.empty(max_tiles, 4, dtype=torch.int32, device=device),
        counts_2=torch.empty(2, dtype=torch.int32, device=device),
        arrivals=torch.empty(max_items * num_kv_heads, dtype=torch.int32, device=device),
        few=few,
        tile_tokens=tile_tokens,
        window=window,
        fixed=fixed,
        cascade=cascade,
        trees=trees,
    )
    _schedule_kernel[(item_programs + triton.cdiv(max_tiles, items_each),)](
        start_R1,
        kv_len_R,
        slots_R,
        schedule.items_I8,
        schedule.tiles_J4,
        schedule.counts_2,
        schedule.arrivals,
        cascade.rows_R4 if cascade else schedule.counts_2,  # any pointer will do: it is not read
        cascade.items_I3 if cascade else schedule.counts_2,
        num_rows,
        max_items,
        max_tiles,
        item_programs,
        target,
        window or 0,
        FEW=few,
        TILE_TOKENS=tile_tokens,
        KEY_TILE=KEY_TILE,
        WHOLE=WHOLE,
        NUM_KV_HEADS=num_kv_heads,
        KV_HEADS=triton.next_power_of_2(num_kv_heads),
        ROWS=rows,
        ITEMS=items_each,
        WINDOW=window is not None,
        NODES=NODES if trees else 0,
        CASCADE=cascade is not None,
        ONE_WAVE=item_queries > 0,
        **launch_options(device),
    )
    if cache_NGPD is None or not (certain or _may_be_deep(shape, cache_NGPD)):
        return schedule
    return replace(schedule, hopper=_for_hopper(start_R1, kv_len_R, slots_R, shape, schedule, certain))


def _may_be_deep(shape: AttentionShape, cache_NGPD: Tensor) -> bool:
    """Return True if hopper.py should do the long rows of this small step where they have many keys."""
    few = SMALL_HOPPER_TOKENS <= shape.num_tokens < HOPPER_TOKENS
    few &= not shape.most_keys or shape.most_keys >= DEEP_KEYS
    return few and shape.window is None and not shape.widened and _hopper_can(cache_NGPD)


def _for_hopper(
    start_R1: Tensor, kv_len_R: Tensor, slots_R: Tensor, shape: AttentionShape, schedule: Schedule, certain: bool
) -> PrefillItems:
    """Return the long rows' work for hopper.py. Not `certain`: the device decides whether it runs."""
    from ridgeline.kernels.attention.paged.hopper import choose
    from ridgeline.kernels.attention.paged.hopper_items import prefill_items, tile_shape
    from ridgeline.kernels.attention.paged.hopper_pieces import may_be_cut, prefill_pieces

    num_tokens, heads, kv_heads, cache_NGPD = shape.num_tokens, shape.num_heads, shape.num_kv_heads, shape.cache_NGPD
    assert cache_NGPD is not None
    head_dim, item = cache_NGPD.shape[3], cache_NGPD.element_size()
    queries, pack = tile_shape(head_dim, heads // kv_heads, num_tokens, len(slots_R))
    rows, row_bytes = (start_R1, kv_len_R, slots_R), 2 * kv_heads * head_dim * item
    waves = num_tokens * heads / (TILE_ROWS * num_multiprocessors(cache_NGPD.device))
    key_tile = choose(head_dim, queries).KEYS
    cuts = may_be_cut(shape.most_keys or None, key_tile)
    cuts = (
        cuts and shape.window is None and queries == TILE_ROWS and waves <= SPLIT_WAVES and num_tokens <= SPLIT_TOKENS
    )
    if cuts or not certain:
        return prefill_pieces(
            *rows, schedule.counts_2, num_tokens, kv_row_bytes=row_bytes, few=schedule.few, pack=pack,
            units=heads // pack, key_tile=key_tile, deep=0 if certain else DEEP_KEYS,
        )  # fmt: skip
    return prefill_items(*rows, num_tokens, kv_row_bytes=row_bytes, few=schedule.few, queries=queries, pack=pack)


def fixed_schedule(start_R1: Tensor, kv_len_R: Tensor, slots_R: Tensor, shape: AttentionShape) -> Schedule:
    """Make a schedule with which a query's result does not depend on what runs beside it."""
    return make_schedule(start_R1, kv_len_R, slots_R, shape._replace(fixed=True))


def hopper_is_faster(num_tokens: int, cache_NGPD: Tensor) -> bool:
    """Return True if hopper.py should do the long rows of a step of so many tokens."""
    return num_tokens >= HOPPER_TOKENS and _hopper_can(cache_NGPD)


def _hopper_can(cache_NGPD: Tensor) -> bool:
    if compute_capability(cache_NGPD.device) != (9, 0):
        return False
    from ridgeline.kernels.attention.paged.hopper import supports

    return supports("sm_90", cache_NGPD.dtype, cache_NGPD.shape[3], cache_NGPD.shape[2])


def item_target(num_rows: int, programs: int, device: torch.device, waves: int = 2) -> int:
    """Return the number of items that the short rows' keys should give if they were one row. programs: those of an
    item, one per key head or more. waves: the programs that a multiprocessor should get."""
    return max(waves * num_multiprocessors(device) // programs, num_rows)


# Not specialized, so that one compilation serves uncaptured steps, whose sizes all differ
@triton.jit(do_not_specialize=["num_rows", "max_items", "max_tiles", "item_programs", "target", "window"])
def _schedule_kernel(
    start_ptr,
    kv_len_ptr,
    slots_ptr,
    items_ptr,
    tiles_ptr,
    counts_ptr,
    arrivals_ptr,
    shared_rows_ptr,
    shared_items_ptr,
    num_rows,
    max_items,
    max_tiles,
    item_programs,
    target,
    window,
    FEW: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    WINDOW: tl.constexpr,
    NODES: tl.constexpr,
    CASCADE: tl.constexpr,
    ONE_WAVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ITEMS entries of one table: the first programs write items, the rest tiles.

    ONE_WAVE: a multiprocessor holds one program, so items are a little longer, lest those of rows of the same length be
        just too many to run at once.

    Every program counts all rows' pieces for itself. An entry's row is the number of rows whose pieces all come before
    the entry.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    makes_items = program < item_programs
    row_R = tl.arange(0, ROWS)
    real_R = row_R < num_rows
    first_R = tl.load(start_ptr + row_R, mask=real_R, other=0).to(tl.int32)
    tokens_R = tl.load(start_ptr + row_R + 1, mask=real_R, other=0).to(tl.int32) - first_R
    kv_len_R = tl.load(kv_len_ptr + row_R, mask=real_R, other=0).to(tl.int32)
    span_R = kv_len_R - _first_key(kv_len_R, tokens_R, window, KEY_TILE, WINDOW, NODES)
    if CASCADE:
        span_R -= tl.load(shared_rows_ptr + row_R * 4, mask=real_R, other=0)
    short_R = (tokens_R > 0) & (tokens_R <= FEW)
    total = tl.sum(tl.where(short_R, span_R, 0))
    if ONE_WAVE:
        total += total // 16
    chunk = tl.maximum(tl.cdiv(tl.cdiv(total, target), KEY_TILE), 1) * KEY_TILE
    items_R = tl.where(short_R, pieces_of(span_R, chunk, WHOLE), 0)
    tiles_R = tl.where(tokens_R > FEW, tl.cdiv(tokens_R, TILE_TOKENS), 0)
    pieces_R = tl.where(makes_items, items_R, tiles_R)
    end_R = tl.cumsum(pieces_R, 0)
    count = tl.sum(pieces_R)
    if program == 0:
        tl.store(counts_ptr, tl.sum(items_R))
        tl.store(counts_ptr + 1, tl.sum(tiles_R))

    entry_I = tl.where(makes_items, program, program - item_programs) * ITEMS + tl.arange(0, ITEMS)
    before_IR = end_R[None, :] <= entry_I[:, None]
    row_I = tl.sum(before_IR.to(tl.int32), 1)
    first_entry_I = tl.max(tl.where(before_IR, end_R[None, :], 0), 1)
    real_I = entry_I < count
    slot_I = tl.load(slots_ptr + row_I, mask=real_I, other=0).to(tl.int32)
    token_I = tl.load(start_ptr + row_I, mask=real_I, other=0).to(tl.int32)
    tokens_I = tl.load(start_ptr + row_I + 1, mask=real_I, other=0).to(tl.int32) - token_I
    kv_len_I = tl.load(kv_len_ptr + row_I, mask=real_I, other=0).to(tl.int32)
    piece_I = entry_I - first_entry_I
    if makes_items:
        first_key_I = _first_key(kv_len_I, tokens_I, window, KEY_TILE, WINDOW, NODES)
        if CASCADE:
            first_key_I += tl.load(shared_rows_ptr + row_I * 4, mask=real_I, other=0)
            for field in tl.static_range(3):
                shared_I = tl.load(shared_rows_ptr + row_I * 4 + 1 + field, mask=real_I, other=0)
                tl.store(shared_items_ptr + entry_I * 3 + field, shared_I, mask=real_I)
        span_I = kv_len_I - first_key_I
        pieces_I = pieces_of(span_I, chunk, WHOLE)
        # A row's items are equally long: never more than chunk, so the last is not empty.
        even_I = tl.cdiv(tl.cdiv(span_I, pieces_I), KEY_TILE) * KEY_TILE
        begin_I = first_key_I + piece_I * even_I
        item_I = items_ptr + entry_I * 8
        tl.store(item_I, slot_I, mask=real_I)
        tl.store(item_I + 1, token_I, mask=real_I)
        tl.store(item_I + 2, tokens_I, mask=real_I)
        tl.store(item_I + 3, kv_len_I, mask=entry_I < max_items)  # 0: no item
        tl.store(item_I + 4, begin_I, mask=real_I)
        tl.store(item_I + 5, tl.minimum(begin_I + even_I, kv_len_I), mask=real_I)
        tl.store(item_I + 6, first_entry_I, mask=real_I)
        tl.store(item_I + 7, pieces_I, mask=real_I)
        head_G = tl.arange(0, KV_HEADS)
        arrivals_IG = arrivals_ptr + entry_I[:, None] * NUM_KV_HEADS + head_G[None, :]
        tl.store(
            arrivals_IG,
            tl.zeros((ITEMS, KV_HEADS), tl.int32),
            mask=(entry_I < max_items)[:, None] & (head_G < NUM_KV_HEADS)[None, :],
        )
    else:
        # The last tile sees most keys and starts first, so that short ones fill the end.
        offset_I = (tl.cdiv(tokens_I, TILE_TOKENS) - 1 - piece_I) * TILE_TOKENS
        tile_I = tiles_ptr + entry_I * 4
        tl.store(tile_I, slot_I, mask=real_I)
        tl.store(tile_I + 1, token_I + offset_I, mask=real_I)
        tl.store(tile_I + 2, tl.minimum(tokens_I - offset_I, TILE_TOKENS), mask=real_I)
        tl.store(tile_I + 3, kv_len_I - tokens_I + offset_I, mask=real_I)


@triton.jit
def _first_key(kv_len, tokens, window, KEY_TILE: tl.constexpr, WINDOW: tl.constexpr, NODES: tl.constexpr):
    """Return the beginning of a row's visible keys, rounded down to a tile. NODES: with trees, the most nodes of one: a
    node's position is at most so much smaller than its place."""
    if WINDOW:
        if NODES:
            tokens = tl.maximum(tokens, NODES)
        return tl.maximum(kv_len - tokens - window + 1, 0) // KEY_TILE * KEY_TILE
    return kv_len * 0

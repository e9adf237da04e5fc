"""The two warps of hopper_kernel.py that compute nothing: one draws work items, one has their tiles copied.

The legend is that of hopper_kernel.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from ridgeline.kernels.hopper.gluon_names import load_tile, viewed

PANEL = gl.constexpr(64)  # columns in one swizzled panel of shared memory: 128 bytes of a 16-bit type


@gluon.jit
def _item(w, table_ptr, count, units_at_once, real, SPLIT: gl.constexpr):
    """Return the table entry, the unit of work index `w`, and with SPLIT the rest of the entry, or zeros if not `real`.
    All items of `units_at_once` units come before the items of the next units."""
    part = w // gl.maximum(count * units_at_once, 1)
    rest = w - part * (count * units_at_once)
    entry_ptr = table_ptr + (8 if SPLIT else 4) * (rest // units_at_once)
    slot = gl.load(entry_ptr, mask=real, other=0)
    token = gl.load(entry_ptr + 1, mask=real, other=0)
    tokens = gl.load(entry_ptr + 2, mask=real, other=0)
    position = gl.load(entry_ptr + 3, mask=real, other=0)
    piece = (slot, slot, slot)  # not read
    if SPLIT:
        begin = gl.load(entry_ptr + 4, mask=real, other=0)
        end = gl.load(entry_ptr + 5, mask=real, other=0)
        piece = (begin, end, gl.load(entry_ptr + 6, mask=real, other=0))
    return slot, token, tokens, position, part * units_at_once + rest % units_at_once, piece


@gluon.jit
def _tiles(position, tokens, piece, KEYS: gl.constexpr, WINDOW: gl.constexpr, SPLIT: gl.constexpr):
    """Return the (newest, oldest) key tile that any of the item's tokens sees and that its piece has."""
    newest = (position + tokens - 1) // KEYS
    oldest = position * 0
    if WINDOW > 0:
        oldest = gl.maximum(position - WINDOW + 1, 0) // KEYS
    if SPLIT:
        newest = gl.minimum(newest, piece[1] - 1)
        oldest = piece[0]
    return newest, oldest


@gluon.jit
def _blocks(row_ptr, first, begin, end, P: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr):
    """Return the block of every box of a tile, or -1 for a box of which no query sees a key."""
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
    """Copy one key or value tile, as boxes of `BOX` tokens that lie within one block, 64 columns at a time."""
    layout: gl.constexpr = desc.layout
    boxes = viewed(tile, [D // PANEL * (KEYS // BOX), BOX, PANEL], layout)
    mbarrier.expect(bar, KEYS * D * 2)
    for b in gl.static_range(KEYS // BOX):
        # A box that no query sees is addressed outside the cache, where copies read zeros.
        block = blocks[AT + b]
        row = gl.where(block >= 0, block * block_rows + head_row + (first + b * BOX) % P, nowhere)
        for panel in gl.static_range(D // PANEL):
            load_tile(desc, [row, panel * PANEL], bar, boxes.index(panel * (KEYS // BOX) + b))


@gluon.jit
def _tell(slot, value):
    """Write an int32 to shared memory, for other warps."""
    slot.store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _hear(slot, WARPS: gl.constexpr):
    """Read an int32 that another warp has written to shared memory."""
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def _scheduler(
    table_ptr, count_ptr, ticket_ptr, units_at_once, news, bars, UNITS: gl.constexpr, SPLIT: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Draw items, always one ahead of the other warps, and pass them on; at the end pass on an item without tokens."""
    news_full: gl.constexpr = 5
    count = gl.load(count_ptr)
    w = gl.program_id(0)
    round = 0
    more = True
    while more:
        more = w < count * UNITS
        slot, token, tokens, position, unit, piece = _item(
            gl.where(more, w, 0), table_ptr, count, units_at_once, more, SPLIT
        )
        here = round % 2
        mbarrier.wait(bars[news_full + 1].index(here), ((round // 2) & 1) ^ 1)
        _tell(news.index(here * 8), token)
        _tell(news.index(here * 8 + 1), tokens)
        _tell(news.index(here * 8 + 2), position)
        _tell(news.index(here * 8 + 3), unit)
        _tell(news.index(here * 8 + 4), slot)
        if SPLIT:
            for field in gl.static_range(3):
                _tell(news.index(here * 8 + 5 + field), piece[field])
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
def _news(news, bars, round, WARPS: gl.constexpr, SPLIT: gl.constexpr):
    """Return the round's item: (first token, tokens, position of the first, unit, slot, piece). At the end it has
    no tokens."""
    news_full: gl.constexpr = 5
    here = round % 2
    mbarrier.wait(bars[news_full].index(here), (round // 2) & 1)
    token = _hear(news.index(here * 8), WARPS)
    tokens = _hear(news.index(here * 8 + 1), WARPS)
    position = _hear(news.index(here * 8 + 2), WARPS)
    unit = _hear(news.index(here * 8 + 3), WARPS)
    slot = _hear(news.index(here * 8 + 4), WARPS)
    piece = (slot, slot, slot)  # not read
    if SPLIT:
        begin, end = _hear(news.index(here * 8 + 5), WARPS), _hear(news.index(here * 8 + 6), WARPS)
        piece = (begin, end, _hear(news.index(here * 8 + 7), WARPS))
    mbarrier.arrive(bars[news_full + 1].index(here), count=1)
    return token, tokens, position, unit, slot, piece


@gluon.jit
def _producer(
    descs, places, q, rings,
    PER_KV: gl.constexpr, PACK: gl.constexpr, P: gl.constexpr, BOX: gl.constexpr,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, CONSUMERS: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """Fill the rings in the order in which they are drained: K0 Q K1 V0 K2 V1 … of item after item."""
    q_desc, k_desc, v_desc = descs
    k, v, news, bars = rings
    blocks_ptr, columns, k_block_rows, k_head_rows, v_block_rows, v_head_rows, nowhere = places
    q_layout: gl.constexpr = q_desc.layout
    QUEUE: gl.constexpr = q[0].shape[0]
    q_full, q_empty, k_full, v_full, empty, _news_full, _news_empty = bars
    base = 0
    round = 0
    token, tokens, position, unit, slot, piece = _news(news, bars, 0, 1, SPLIT)
    while tokens > 0:
        here = round % QUEUE
        newest, oldest = _tiles(position, tokens, piece, KEYS, WINDOW, SPLIT)
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
            # Block ids are loaded a tile ahead. Those of the tile before serve the values, which follow a tile later.
            next_blocks = _blocks(row_ptr, gl.maximum(first - KEYS, 0), begin, end, P, BOX, KEYS)
            # Key tile `step` and the value tile before it replace two tiles that were used together.
            step = base + i
            mbarrier.wait(empty.index(step % STAGES), ((step // STAGES) & 1) ^ 1)
            if i < tiles:
                _load_keys(
                    k_desc, k.index(step % STAGES), k_full.index(step % STAGES), blocks, first,
                    k_block_rows, group * k_head_rows, nowhere, 0, P, BOX, D, KEYS,
                )  # fmt: skip
            if i == 0:
                mbarrier.wait(q_empty.index(here), ((round // QUEUE) & 1) ^ 1)
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
        token, tokens, position, unit, slot, piece = _news(news, bars, round, 1, SPLIT)

"""Prefill attention over the paged cache for Hopper: bulk tensor copies, warpgroup MMA, specialised warps.

A work item is 128 or 192 queries of one row: consecutive tokens, times the heads that share a key head, so that short
rows fill it too. A table entry is (slot, first token, tokens, position of the first). PACK heads of a token follow each
other in a tile, and a unit is PACK heads. Where items are too few for the device, an entry may be a piece of an item's
keys (SPLIT, hopper_pieces.py).

One warp draws items by ticket. One warp streams key and value tiles, block by block, into two rings of shared memory.
Two or three warpgroups own 64 queries each. A warpgroup starts two products at once: the next tile's scores, and the
product of the weights before them with their values, as in FlashAttention-3 (arXiv 2407.08608). While it works on the
softmax, the tensor cores serve the other warpgroups. With heads of 128 and 256 the exponentials run beside its own
product, too (BESIDE, rung 12 of the ladder); with heads of 64 that was 9 % slower. Keys are visited from the newest to
the oldest, so tiles that need a mask come first.

The legend is that of op.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from ridgeline.kernels.attention.paged.hopper_copies import PANEL, _news, _producer, _scheduler, _tiles
from ridgeline.kernels.hopper.gluon_names import barriers, viewed

LOG2E = gl.constexpr(1.4426950408889634)
CODE = gl.constexpr(64)  # as in hopper_pieces.py
GROWN = gl.constexpr(8.0)  # the power of 2 by which a row's maximum may grow before its output is rescaled


@gluon.jit
def zero_rows(tile, begin, end, D: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr = 4):
    """Set rows begin … end - 1 of a value tile to 0: 0 · NaN must never reach the sum. WARPS: those that do it."""
    EACH: gl.constexpr = 8 * PANEL // (32 * WARPS)  # columns of a thread
    ACROSS: gl.constexpr = PANEL // EACH
    layout: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
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
    """Return the scores with -inf for keys that a query must not see, whatever these scores were (NaN too)."""
    layout: gl.constexpr = s.type.layout
    key = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, layout)), 0)
    last = gl.expand_dims(position - first_key + gl.arange(0, 64, gl.SliceLayout(1, layout)) // PACK, 1)
    seen = key <= last
    if WINDOW > 0:
        seen = seen & (key > last - WINDOW)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _softmax(s, m, total, scale_log2, BESIDE: gl.constexpr):
    """Return (maxima, weights, sums, the factor by which the old weights shrink, the largest growth of a maximum).

    With BESIDE maxima are exponents of 2, and each thread keeps its own sums. A maximum stays as it is until it has
    grown by GROWN, so that outputs are seldom rescaled. Each row decides for itself: its bits do not depend on others.
    """
    if BESIDE:
        new = gl.maximum(m, gl.max(s, 1) * scale_log2)
        grown = new - m
        new = gl.where(grown > GROWN, new, m)
        shrink = gl.exp2(m - new)
        # This vote's barriers keep ptxas from moving the wait for the product before the exponentials.
        most = gl.max(grown, 0)
        weights = gl.exp2(s * scale_log2 - gl.expand_dims(new, 1))
        return new, weights, total * _as_column(shrink, total) + _own_sums(weights), shrink, most
    else:
        new = gl.maximum(m, gl.max(s, 1))
        shift = new * scale_log2
        shrink = gl.exp2((m - new) * scale_log2)
        weights = gl.exp2(s * scale_log2 - gl.expand_dims(shift, 1))
        return new, weights, total * shrink + gl.sum(weights, 1), shrink, GROWN


@gluon.jit
def _own_sums(weights):
    """Return the sums of each thread's own weights, [64, 4]: no thread asks another."""
    keys: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([64, keys // 8, 4, 2]), 3), 1)


@gluon.jit
def _begun(
    sinks_ptr, unit, begin, scale_log2, m, total, SINKS: gl.constexpr, PACK: gl.constexpr, BESIDE: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """Return the maxima and the sums with which an item's softmax begins: nothing, or the sinks alone. begin: with
    SPLIT, the piece's oldest tile. The sinks are part of the oldest piece."""
    if SINKS:
        head = unit * PACK + gl.arange(0, 64, m.type.layout) % PACK
        sink = gl.load(sinks_ptr + head).to(gl.float32) * (LOG2E if BESIDE else LOG2E / scale_log2)
        own = gl.full_like(total, 0.25 if BESIDE else 1.0)  # a quarter of each of a row's four threads
        if SPLIT:
            sink = gl.where(begin == 0, sink, -1e30)
            own = gl.where(begin == 0, own, 0.0)
        return sink, own
    else:
        return gl.full_like(m, -1e30), gl.zeros_like(total)


@gluon.jit
def _as_column(x, like):
    """Return one value per row in a form that broadcasts over the columns of `like`."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, like.type.layout)), 1)


@gluon.jit
def _clean(
    v, step, tile, tokens, position, bars, BOX: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Zero the values behind the item's last key, if this tile is the item's newest. No product may be under way."""
    end = (position + tokens - 1) % KEYS + 1
    if (end % BOX != 0) & (tile == (position + tokens - 1) // KEYS):
        here = step % STAGES
        mbarrier.wait(bars[3].index(here), (step // STAGES) & 1)
        zero_rows(v.index(here), end, (end + BOX - 1) // BOX * BOX, D, KEYS)


@gluon.jit
def _clean_behind(
    v, step, position, bars, BOX: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Zero the values before the first key that the window leaves, in the item's oldest tile, which this step is. No
    product may be under way."""
    begin = gl.maximum(position - WINDOW + 1, 0) % KEYS
    if begin % BOX != 0:
        here = step % STAGES
        mbarrier.wait(bars[3].index(here), (step // STAGES) & 1)
        zero_rows(v.index(here), begin // BOX * BOX, begin, D, KEYS)


@gluon.constexpr_function
def _wide(D):
    """Return a layout with 8 neighbouring columns in a thread, so that they are stored at once. Rows stay in the warp
    in which products leave them."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *([0, 32 << i] for i in range((D // 32).bit_length() - 1))],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, D],
    )


@gluon.jit
def _finish(
    o, total, m, scale_log2, out, item, dtype: gl.constexpr, part: gl.constexpr, PACK: gl.constexpr,
    BESIDE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Write the outputs of 64 queries, of those that exist, and the logarithms of their sums if these are wanted. With
    SPLIT those of pieces are left for the kernel that adds them up."""
    if BESIDE:
        total = gl.convert_layout(gl.sum(total, 1), m.type.layout)
    else:
        m = m * scale_log2
    o = o * _as_column(1 / total, o)
    if SPLIT:
        if item[3] % CODE > 1:
            _leave(o, total, m, out, item[2], item[3], part, SPLIT)
        else:
            _write(o, total, m, out, item, dtype, part, PACK)
    else:
        _write(o, total, m, out, item, dtype, part, PACK)


@gluon.jit
def _leave(o, total, m, out, unit, code, part: gl.constexpr, UNITS: gl.constexpr):
    """Keep a piece's outputs and the logarithms of its sums."""
    D: gl.constexpr = o.shape[1]
    _out, _stride, _lse, parts_ptr, part_lse_ptr = out
    piece = code // (CODE * CODE) + code // CODE % CODE
    first = ((piece * UNITS + unit) * 2 + part) * 64
    row = first + gl.arange(0, 64, gl.SliceLayout(1, o.type.layout))
    column = gl.arange(0, D, gl.SliceLayout(0, o.type.layout))
    at = gl.expand_dims(row.to(gl.int64) * D, 1) + gl.expand_dims(column, 0)
    gl.store(parts_ptr + at, o)
    gl.store(part_lse_ptr + first + gl.arange(0, 64, m.type.layout), m + gl.log2(total))


@gluon.jit
def _write(o, total, m, out, item, dtype: gl.constexpr, part: gl.constexpr, PACK: gl.constexpr):
    """Write the outputs of 64 queries, of those that exist, and the logarithms of their sums if these are wanted."""
    D: gl.constexpr = o.shape[1]
    out_ptr, out_stride, lse_ptr, _parts, _part_lse = out
    token, tokens, unit, _code = item
    if lse_ptr is not None:
        query = part * 64 + gl.arange(0, 64, m.type.layout)
        place = (token + query // PACK).to(gl.int64) * (out_stride // D) + unit * PACK + query % PACK
        lse = (m + gl.log2(total)) / LOG2E
        gl.store(lse_ptr + place, lse, mask=query // PACK < tokens)
    layout: gl.constexpr = _wide(D)
    y = gl.convert_layout(o.to(dtype), layout)
    row = part * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    at = (token + row // PACK).to(gl.int64) * out_stride + (unit * PACK + row % PACK) * D
    pointers = out_ptr + gl.expand_dims(at, 1) + gl.expand_dims(column, 0)
    gl.store(pointers, y, mask=gl.expand_dims(row // PACK < tokens, 1))


@gluon.jit
def _steps(
    first, steps, step, last, o, p, m, total, begun, q, k, v, bars, position, tokens, scale_log2,
    out, item_before, part: gl.constexpr,
    PACK: gl.constexpr, BEGINS: gl.constexpr, MASKED: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, BESIDE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Visit key tiles first, first - 1, …. Each tile's scores are computed together with the values of the tile before
    it.

    begun: the maxima and the sums to begin an item with.
    BEGINS: the first tile is an item's newest. The weights before it are then the last of the item before, which is
    finished on the way. No product is under way when a step begins or ends, or ptxas would serialize them all.
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
        done, done_m = total, m
        if BEGINS:
            m = gl.where(i == 0, begun[0], m)
            total = gl.where(i == 0, begun[1], total)
        m, weights, total, shrink, grown = _softmax(s, m, total, scale_log2, BESIDE)
        next_p = gl.convert_layout(weights.to(dtype), p_layout)
        if BESIDE:
            o, next_p = warpgroup_mma_wait(0, deps=(o, next_p))
        else:  # all exponentials of a tile beside this product were slower
            o = warpgroup_mma_wait(0, deps=(o,))
        if BEGINS:  # noqa: SIM102
            if i == 0:
                for passed in range(last + 1, step):
                    mbarrier.arrive(empty.index(passed % STAGES), count=1)
        mbarrier.arrive(empty.index(here), count=1)
        if BEGINS:  # noqa: SIM102
            if i == 0:
                _finish(o, done, done_m, scale_log2, out, item_before, dtype, part, PACK, BESIDE, SPLIT)
                o = gl.zeros_like(o)
                _clean(v, step, first, tokens, position, bars, BOX, D, KEYS, STAGES)
        if BESIDE:
            if grown > GROWN:
                o = o * _as_column(shrink, o)
        else:
            o = o * _as_column(shrink, o)
        p = next_p
        last = step
        step += 1
    return step, last, o, p, m, total


@gluon.jit
def _consumer(
    q_tiles, rings, out, logits, part: gl.constexpr,
    PACK: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Attend with 64 queries of every item. An item's first scores are computed while the last values of the item
    before arrive."""
    k, v, news, bars = rings
    sinks_ptr, scale_log2 = logits
    QUEUE: gl.constexpr = q_tiles.shape[0]
    q_full, q_empty, _k_full, v_full, _empty, _news_full, _news_empty = bars
    dtype: gl.constexpr = q_tiles.dtype
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    o = gl.zeros([64, D], gl.float32, o_layout)
    p = gl.zeros([64, KEYS], dtype, gl.DotOperandLayout(0, o_layout, 2))
    m = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
    BESIDE: gl.constexpr = D > 64
    total = _own_sums(gl.zeros([64, KEYS], gl.float32, s_layout)) if BESIDE else gl.zeros_like(m)
    step = 0
    last = step - 1  # the step whose weights have not been multiplied with their values yet
    round = 0
    token_before = 0
    tokens_before = 0
    unit_before = 0
    code_before = 0
    token, tokens, position, unit, _slot, piece = _news(news, bars, 0, 4, SPLIT)
    while tokens > 0:
        q = q_tiles.index(round % QUEUE)
        newest, oldest = _tiles(position, tokens, piece, KEYS, WINDOW, SPLIT)
        mine = position + part * (64 // PACK)
        # Tiles that only later queries of the item see are skipped.
        own = gl.minimum(newest, (mine + 64 // PACK - 1) // KEYS)
        step += newest - own
        newest = own
        # First the newest tile and those that causality cuts, then whole tiles, then those that the window cuts.
        whole = gl.minimum(newest - 1, (mine + 1) // KEYS - 1)
        cut = oldest
        if WINDOW > 0:
            cut = gl.maximum(
                gl.minimum((gl.maximum(mine + 64 // PACK - WINDOW, 0) + KEYS - 1) // KEYS, whole + 1), oldest
            )
        whole = gl.minimum(gl.maximum(whole, cut - 1), newest - 1)
        begun = _begun(sinks_ptr, unit, piece[0], scale_log2, m, total, SINKS, PACK, BESIDE, SPLIT)
        item_before = (token_before, tokens_before, unit_before, code_before)
        mbarrier.wait(q_full.index(round % QUEUE), (round // QUEUE) & 1)
        step, last, o, p, m, total = _steps(
            newest, newest - whole, step, last, o, p, m, total, begun, q, k, v, bars, position, tokens, scale_log2,
            out, item_before, part,
            PACK, True, True, BOX, D, KEYS, STAGES, WINDOW, BESIDE, SPLIT,
        )  # fmt: skip
        step, last, o, p, m, total = _steps(
            whole, whole + 1 - cut, step, last, o, p, m, total, begun, q, k, v, bars, position, tokens, scale_log2,
            out, item_before, part,
            PACK, False, False, BOX, D, KEYS, STAGES, WINDOW, BESIDE, SPLIT,
        )  # fmt: skip
        if WINDOW > 0:
            rest = gl.minimum(cut - 1, newest - 1)
            step, last, o, p, m, total = _steps(
                rest, rest + 1 - oldest, step, last, o, p, m, total, begun, q, k, v, bars, position, tokens, scale_log2,
                out, item_before, part,
                PACK, False, True, BOX, D, KEYS, STAGES, WINDOW, BESIDE, SPLIT,
            )  # fmt: skip
            _clean_behind(v, last, position, bars, BOX, D, KEYS, STAGES, WINDOW)
        mbarrier.arrive(q_empty.index(round % QUEUE), count=1)
        token_before, tokens_before, unit_before = token, tokens, unit
        if SPLIT:
            code_before = piece[2]
        round += 1
        token, tokens, position, unit, _slot, piece = _news(news, bars, round, 4, SPLIT)
    if step > 0:
        before = last % STAGES
        mbarrier.wait(v_full.index(before), (last // STAGES) & 1)
        o = warpgroup_mma(p, v.index(before), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        item = (token_before, tokens_before, unit_before, code_before)
        _finish(o, total, m, scale_log2, out, item, dtype, part, PACK, BESIDE, SPLIT)


@gluon.jit
def prefill_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, sinks_ptr, table_ptr, count_ptr, ticket_ptr, units_at_once, blocks_ptr,
    scale_log2, out_stride, columns, k_block_rows, k_head_rows, v_block_rows, v_head_rows, nowhere,
    parts_ptr, part_lse_ptr,
    UNITS: gl.constexpr, PER_KV: gl.constexpr, PACK: gl.constexpr, P: gl.constexpr, BOX: gl.constexpr,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, QUEUE: gl.constexpr, WINDOW: gl.constexpr,
    SINKS: gl.constexpr, SPLIT: gl.constexpr, CONSUMERS: gl.constexpr, CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend with all items of the table, by programs that draw them by ticket.

    QUEUE: items whose queries are in shared memory at a time.
    lse: float32 [T, H], where the natural logarithms of the softmax's sums are written, or None.
    SPLIT: 0, or UNITS: then entries of the table may be pieces of items' keys (hopper_pieces.py), for two consumers.
        Their outputs go to parts [pieces, UNITS, 2, 64, D], and the logarithms of their sums to part_lse [pieces,
        UNITS, 2, 64], in float32.
    """
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = k_desc.layout
    q0 = gl.allocate_shared_memory(dtype, [QUEUE, 64, D], layout)  # one consumer's queries
    q1 = gl.allocate_shared_memory(dtype, [QUEUE, 64, D], layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], layout)
    news = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = barriers(QUEUE, 1), barriers(QUEUE, CONSUMERS)
    k_full, v_full, empty = barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
    news_full, news_empty = barriers(2, 1), barriers(2, CONSUMERS + 1)
    fence_async_shared()
    if PDL:
        gdc_wait()
    bars = (q_full, q_empty, k_full, v_full, empty, news_full, news_empty)
    descs = (q_desc, k_desc, v_desc)
    places = (blocks_ptr, columns, k_block_rows, k_head_rows, v_block_rows, v_head_rows, nowhere)
    rings, out = (k, v, news, bars), (out_ptr, out_stride, lse_ptr, parts_ptr, part_lse_ptr)
    logits = (sinks_ptr, scale_log2)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (q0, rings, out, logits, 0, PACK, BOX, D, KEYS, STAGES, WINDOW, SINKS, SPLIT)),
                (_consumer, (q1, rings, out, logits, 1, PACK, BOX, D, KEYS, STAGES, WINDOW, SINKS, SPLIT)),
                (_producer, (descs, places, (q0, q1), rings, PER_KV, PACK, P, BOX, D, KEYS, STAGES, WINDOW, 2, SPLIT)),
                (_scheduler, (table_ptr, count_ptr, ticket_ptr, units_at_once, news, bars, UNITS, SPLIT, PDL)),
            ],
            [4, 1, 1],
            [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )  # fmt: skip
    else:
        q2 = gl.allocate_shared_memory(dtype, [QUEUE, 64, D], layout)
        q = (q0, q1, q2)
        gl.warp_specialize(
            [
                (_consumer, (q0, rings, out, logits, 0, PACK, BOX, D, KEYS, STAGES, WINDOW, SINKS, SPLIT)),
                (_consumer, (q1, rings, out, logits, 1, PACK, BOX, D, KEYS, STAGES, WINDOW, SINKS, SPLIT)),
                (_consumer, (q2, rings, out, logits, 2, PACK, BOX, D, KEYS, STAGES, WINDOW, SINKS, SPLIT)),
                (_producer, (descs, places, q, rings, PER_KV, PACK, P, BOX, D, KEYS, STAGES, WINDOW, 3, SPLIT)),
                (_scheduler, (table_ptr, count_ptr, ticket_ptr, units_at_once, news, bars, UNITS, SPLIT, PDL)),
            ],
            [4, 4, 1, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
        )  # fmt: skip

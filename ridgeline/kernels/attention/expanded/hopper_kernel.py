"""Attention over expanded latents for Hopper: bulk tensor copies, warpgroup MMA, specialised warps.

A program has 128 queries of one row and one head. One warp streams tiles of keys, of their rotated parts, and of values
into rings of shared memory, from the newest keys to the oldest. Two warpgroups have 64 queries each. Scores are the sum
of two products, since the rotated parts belong to all heads. As in the ladder's rung 12 (attention/ladder/pingpong.py,
after FlashAttention-3, arXiv 2407.08608) a warpgroup starts a tile's scores together with the product of the weights
before them with their values, and its softmax runs beside that product.

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.attention.paged.hopper_kernel import (
    GROWN,
    _as_column,
    _masked,
    _own_sums,
    _softmax,
    _wide,
    zero_rows,
)
from ridgeline.kernels.hopper.gluon_names import barrier, barriers, load_tile

KEY = gl.constexpr(128)
ROPE = gl.constexpr(64)
VALUE = gl.constexpr(128)


@gluon.jit
def _copy(descs, place, heads_at, q_tiles, rings, bars, KEYS: gl.constexpr, STAGES: gl.constexpr):
    """Fill the rings, from the newest tile of keys to the oldest."""
    q_desc, rotated_desc, k_desc, r_desc, v_desc = descs
    first, first_key, steps, _position, _left, _length = place
    q_column, rotated_column, kv_column = heads_at
    k, r, v = rings
    q_full, k_full, v_full, k_empty, v_empty = bars
    if steps > 0:
        mbarrier.expect(q_full.index(0), 128 * (KEY + ROPE) * 2)
        for part in gl.static_range(2):
            load_tile(q_desc, [first + part * 64, q_column], q_full.index(0), q_tiles[part])
            load_tile(rotated_desc, [first + part * 64, rotated_column], q_full.index(0), q_tiles[2 + part])
    for i in range(steps):
        here = i % STAGES
        key = first_key + (steps - 1 - i) * KEYS
        mbarrier.wait(k_empty.index(here), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(k_full.index(here), KEYS * (KEY + ROPE) * 2)
        load_tile(k_desc, [key, kv_column], k_full.index(here), k.index(here))
        load_tile(r_desc, [key, 0], k_full.index(here), r.index(here))
        mbarrier.wait(v_empty.index(here), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(v_full.index(here), KEYS * VALUE * 2)
        load_tile(v_desc, [key, kv_column], v_full.index(here), v.index(here))


@gluon.jit
def _scores(q, rotated, keys, r, KEYS: gl.constexpr):
    """Start both products of 64 queries with a tile of keys."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    nothing = gl.zeros([64, KEYS], gl.float32, layout)
    s = warpgroup_mma(rotated, r.permute((1, 0)), nothing, use_acc=False, is_async=True)
    return warpgroup_mma(q, keys.permute((1, 0)), s, is_async=True)


@gluon.jit
def _steps(
    begin, end, o, p, m, total, q, rotated, rings, bars, steps, mine, scale,
    MASKED: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Attend to the tiles begin … end - 1, counted from the newest, whose scores are computed together with the values
    of the tile before. No product is under way before and behind."""
    k, r, v = rings
    _q_full, k_full, v_full, k_empty, v_empty = bars
    dtype: gl.constexpr = q.dtype
    p_layout: gl.constexpr = p.type.layout
    for i in range(begin, end):
        here = i % STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(k_full.index(here), (i // STAGES) & 1)
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        s = _scores(q, rotated, k.index(here), r.index(here), KEYS)
        o = warpgroup_mma(p, v.index(before), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_empty.index(here), count=1)
        if MASKED:
            s = _masked(s, (steps - 1 - i) * KEYS, mine, 0, KEYS, 1)
        m, weights, total, shrink, grown = _softmax(s, m, total, scale, True)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        o, p = warpgroup_mma_wait(0, deps=(o, p))
        mbarrier.arrive(v_empty.index(before), count=1)
        if grown > GROWN:
            o = o * _as_column(shrink, o)
    return o, p, m, total


@gluon.jit
def _attend(
    q, rotated, rings, bars, place, out_ptr, stride_out, scale, PART: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Attend with 64 queries. out_ptr: of the head."""
    first, _first_key, steps, position, left, length = place
    k, r, v = rings
    q_full, k_full, v_full, k_empty, _v_empty = bars
    dtype: gl.constexpr = q.dtype
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUE, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    mine = position + PART * 64  # of the first query
    if steps > 0:
        mbarrier.wait(q_full.index(0), 0)
        mbarrier.wait(k_full.index(0), 0)
        s = _scores(q, rotated, k.index(0), r.index(0), KEYS)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(0), count=1)
        s = _masked(s, (steps - 1) * KEYS, mine, 0, KEYS, 1)
        real = length - (steps - 1) * KEYS
        if real < KEYS:  # what lies behind the row's last key may be NaN
            mbarrier.wait(v_full.index(0), 0)
            zero_rows(v.index(0), real, KEYS, VALUE, KEYS)
            barrier()
        m = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, s_layout))
        total = _own_sums(gl.zeros([64, KEYS], gl.float32, s_layout))
        m, weights, total, _shrink, _grown = _softmax(s, m, total, scale, True)
        p = gl.convert_layout(weights.to(dtype), p_layout)
        o = gl.zeros([64, VALUE], gl.float32, o_layout)
        cut = gl.maximum(steps - (mine + 1) // KEYS, 1)  # from there on every query sees whole tiles
        o, p, m, total = _steps(
            1, cut, o, p, m, total, q, rotated, rings, bars, steps, mine, scale, True, KEYS, STAGES
        )  # fmt: skip
        o, p, m, total = _steps(
            cut, steps, o, p, m, total, q, rotated, rings, bars, steps, mine, scale, False, KEYS, STAGES
        )  # fmt: skip
        last = (steps - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((steps - 1) // STAGES) & 1)
        o = warpgroup_mma(p, v.index(last), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        o = o * _as_column(1 / gl.sum(total, 1), o)
        layout: gl.constexpr = _wide(VALUE)
        y = gl.convert_layout(o.to(dtype), layout)
        row = PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        column = gl.arange(0, VALUE, gl.SliceLayout(0, layout))
        at = (first + row).to(gl.int64) * stride_out
        pointers = out_ptr + gl.expand_dims(at, 1) + gl.expand_dims(column, 0)
        gl.store(pointers, y, mask=gl.expand_dims(row < left, 1))


@gluon.jit(do_not_specialize=["num_tiles", "heads", "at_once"])
def expanded_hopper_kernel(
    q_desc, rotated_desc, k_desc, r_desc, v_desc, out_ptr, tiles_ptr, kv_len_ptr, num_tiles, heads, at_once, scale,
    stride_out, head_out, head_q, head_rotated, head_kv, KEYS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Attend with the queries of one tile and one head. A tile is (row, its first token in the step, the row's tokens
    from there on, the row's first key), those with the most keys first. at_once: heads whose tiles run together, so
    that keys and values stay in the second-level cache."""
    dtype: gl.constexpr = q_desc.dtype
    layout: gl.constexpr = k_desc.layout
    q0 = gl.allocate_shared_memory(dtype, [64, KEY], layout)
    q1 = gl.allocate_shared_memory(dtype, [64, KEY], layout)
    rotated0 = gl.allocate_shared_memory(dtype, [64, ROPE], layout)
    rotated1 = gl.allocate_shared_memory(dtype, [64, ROPE], layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, KEYS, KEY], layout)
    r = gl.allocate_shared_memory(dtype, [STAGES, KEYS, ROPE], layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, KEYS, VALUE], layout)
    q_full, k_full, v_full = barriers(1), barriers(STAGES), barriers(STAGES)
    k_empty, v_empty = barriers(STAGES, 2), barriers(STAGES, 2)
    fence_async_shared()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = gl.program_id(0)
    section = n // (num_tiles * at_once)
    rest = n - section * num_tiles * at_once
    here = gl.minimum(at_once, heads - section * at_once)
    tile = rest // here
    head = section * at_once + rest % here
    tiles_ptr += 4 * tile
    first = gl.load(tiles_ptr + 1)
    left = gl.load(tiles_ptr + 2)
    first_key = gl.load(tiles_ptr + 3)
    length = gl.load(kv_len_ptr + gl.load(tiles_ptr)).to(gl.int32)
    position = length - left
    steps = gl.where(position < 0, 0, (position + gl.minimum(left, 128) + KEYS - 1) // KEYS)  # 0: a stopped row
    place = (first, first_key, steps, position, left, length)
    descs = (q_desc, rotated_desc, k_desc, r_desc, v_desc)
    heads_at = (head * head_q, head * head_rotated, head * head_kv)
    rings, bars = (k, r, v), (q_full, k_full, v_full, k_empty, v_empty)
    out_ptr += head.to(gl.int64) * head_out
    gl.warp_specialize(
        [
            (_attend, (q0, rotated0, rings, bars, place, out_ptr, stride_out, scale, 0, KEYS, STAGES)),
            (_attend, (q1, rotated1, rings, bars, place, out_ptr, stride_out, scale, 1, KEYS, STAGES)),
            (_copy, (descs, place, heads_at, (q0, q1, rotated0, rotated1), rings, bars, KEYS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip

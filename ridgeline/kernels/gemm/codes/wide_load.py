"""The loads of wide.py: codes and scales of the units to come, which two warpgroups ask for themselves, and x, which a
warp of its own streams.

The legend is that of wide.py.
"""

# mypy: disable-error-code="misc"
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from ridgeline.kernels.gemm.codes.fragments_kernel import _groups
from ridgeline.kernels.hopper.gluon_names import load_rows
from ridgeline.kernels.hopper.ring import load_tokens


@gluon.jit
def _item(item, TILES: gl.constexpr, SPLIT: gl.constexpr):
    """Return (pair of row tiles, token tile, part). Programs of one row tile run side by side."""
    rest = item // TILES
    return rest // SPLIT, item % TILES, rest % SPLIT


@gluon.jit
def _next(tile, step, STEPS: gl.constexpr):
    """Return the tile and the step behind these."""
    return tile + gl.where(step == STEPS - 1, gl.num_programs(0), 0), gl.where(step == STEPS - 1, 0, step + 1)


@gluon.jit
def _begun(
    item, from_, outputs,
    WHICH: gl.constexpr, TILES: gl.constexpr, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr,
    MANY: gl.constexpr, SPLIT: gl.constexpr, BITS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Return the places where an item's codes and numbers begin, and its first unit."""
    ROWS: gl.constexpr = MANY * 64
    pair, _, part = _item(item, TILES, SPLIT)
    row = pair * (2 * ROWS) + WHICH * ROWS if GATE == "" else pair * ROWS + WHICH * outputs
    tile = (row // 16).to(gl.int64)
    at, outer = tile * (UNITS * UNIT // GROUP * 16), tile * (UNITS * UNIT // 256 * 16)
    codes = from_[0] + tile * (UNITS * UNIT * BITS)
    return (codes, from_[1] + at, from_[2] + at, from_[3] + outer, from_[4] + outer), part * (UNITS // SPLIT)


@gluon.jit
def _ring(DEPTH: gl.constexpr, TILES: gl.constexpr, WORDS: gl.constexpr):
    """Return shared memory for a plane of DEPTH units."""
    return gl.allocate_shared_memory(gl.int16, [DEPTH, TILES, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _ask_plane(ring, codes, unit, more, first: gl.constexpr, WORDS: gl.constexpr, UNITS: gl.constexpr):
    """Copy the words of a plane of a unit of each tile to `ring` [tiles, words]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    tile = gl.arange(0, ring.shape[0], gl.SliceLayout(1, layout))
    word = gl.arange(0, ring.shape[1], gl.SliceLayout(0, layout))
    at = (tile * (UNITS * WORDS))[:, None] + (unit * WORDS + first + word)[None, :]
    load_rows(ring, codes + at, mask=((tile >= 0) & more)[:, None])


@gluon.jit
def _ask(
    low, high, codes, slot, unit, more, UNIT: gl.constexpr, UNITS: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr
):
    """Copy a unit's codes to a slot of the rings."""
    _ask_plane(low.index(slot), codes, unit, more, 0, UNIT * (LOW + HIGH), UNITS)
    if HIGH:
        _ask_plane(high.index(slot), codes, unit, more, UNIT * LOW, UNIT * (LOW + HIGH), UNITS)
    async_copy.commit_group()


@gluon.constexpr_function
def _held(many, groups):
    """Return the layout [R, G] in which threads load scales: those of their rows of the sums, groups together."""
    registers = [[0, 1 << i] for i in range(groups.bit_length() - 1)]
    registers += [[8, 0]] + [[64 << i, 0] for i in range(many.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64 * many, groups])


@gluon.jit
def _scales(pointer, unit, more, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr):
    """Ask for the scales of a unit: [R, G]."""
    COUNT: gl.constexpr = _groups(UNIT, GROUP)
    layout: gl.constexpr = _held(MANY, COUNT)
    row = gl.arange(0, MANY * 64, gl.SliceLayout(1, layout))
    group = gl.arange(0, COUNT, gl.SliceLayout(0, layout))
    if GROUP > UNIT:
        unit = unit // (GROUP // UNIT)
    at_R = row // 16 * (UNITS * UNIT // GROUP * 16) + row % 16 * COUNT
    at = at_R[:, None] + (unit * (16 * COUNT) + group)[None, :]
    return gl.load(pointer + at, mask=((row >= 0) & more)[:, None])


@gluon.jit
def _fetch(
    at, unit, more, UNIT: gl.constexpr, UNITS: gl.constexpr, GROUP: gl.constexpr, MANY: gl.constexpr,
    ZEROS: gl.constexpr, NESTED: gl.constexpr,
):  # fmt: skip
    """Ask for the numbers of a unit: scales, zeros or minima, outer scales, outer minima. Scales stand for what there
    is not."""
    scale = _scales(at[1], unit, more, UNIT, UNITS, GROUP, MANY)
    zero, outer, outer_minimum = scale, scale, scale
    if ZEROS != "middle":
        zero = _scales(at[2], unit, more, UNIT, UNITS, GROUP, MANY)
    if NESTED:
        outer = _scales(at[3], unit, more, UNIT, UNITS, 256, MANY)
        if ZEROS == "minimum":
            outer_minimum = _scales(at[4], unit, more, UNIT, UNITS, 256, MANY)
    return (scale, zero, outer, outer_minimum)


@gluon.jit
def _producer(
    x_desc, x, full, empty, items, tokens, UNIT: gl.constexpr, UNITS: gl.constexpr, TOKENS: gl.constexpr,
    TILES: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fill the ring with units of x, for all items of this program."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, token_tile, part = _item(item, TILES, SPLIT)
        for step in range(UNITS // SPLIT):
            here = count % STAGES
            mbarrier.wait(empty.index(here), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(here), TOKENS * UNIT * 2)
            first = (part * (UNITS // SPLIT) + step) * UNIT
            load_tokens(x_desc, x, full, here, token_tile * TOKENS, first, tokens, UNIT // x.shape[2])
            count += 1

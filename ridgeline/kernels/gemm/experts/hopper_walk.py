"""The division of the experts' products among the programs of the Hopper kernels, from the counts on the device.

An item is a tile of one expert's weight rows times a tile of its pairs. Items are ordered by expert, then by row tile,
then by token tile, so that those that read the same weights are neighbours. Experts without pairs have none.

Functions here use `gl` alone, so that a test can run them in Python over all programs.

Legend:
    E  experts
    S  slots of a vector over experts, a power of two
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def slots(experts):
    """Return the least power of two that holds so many experts, 32 or more."""
    return max(32, 1 << (int(experts) - 1).bit_length())


@gluon.jit
def tell(table, place, value):
    """Write an int32 to shared memory, for other warps."""
    table.index(place).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def hear(table, place):
    """Read an int32 that other warps have written to shared memory."""
    return gl.max(table.index(place).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _added(a, b):
    return a + b


@gluon.jit
def share(program, programs, total):
    """Return (first, end) of a program's blocks. Shares differ by one block at most, and larger ones come first."""
    each = total // programs
    rest = total - each * programs
    begin = program * each + gl.minimum(program, rest)
    return begin, begin + each + gl.where(program < rest, 1, 0)


@gluon.jit
def owner(block, programs, total):
    """Return the program whose share has this block."""
    each = total // programs
    rest = total - each * programs
    large = rest * (each + 1)
    return gl.where(block < large, block // (each + 1), rest + (block - large) // gl.maximum(each, 1))


@gluon.jit
def counts_of(start_ptr, E: gl.constexpr):
    """Return (experts, their first pairs, how many pairs each has) as vectors that every warp holds whole.

    They are read from the second-level cache: a kernel may read them before it has waited for the one ahead.
    """
    i_S = gl.arange(0, slots(E), gl.BlockedLayout([slots(E) // 32], [32], [gl.num_warps()], [0]))
    start_S = gl.load(start_ptr + i_S, mask=i_S < E, other=0, cache_modifier=".cg")
    end_S = gl.load(start_ptr + i_S + 1, mask=i_S < E, other=0, cache_modifier=".cg")
    return i_S, start_S, end_S - start_S


@gluon.jit
def begin_share(
    i_S, start_S, count_S, program, programs,
    E: gl.constexpr, TOKENS: gl.constexpr, TILES: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Return (first and end block of the program, blocks of all programs, the first block's expert, its item's place
    among the expert's items, the expert's first pair, how many pairs it has).

    The blocks of all items in order are cut into equal shares. A share may begin and end within an item.
    """
    units_S = (count_S + (TOKENS - 1)) // TOKENS
    end_S = gl.associative_scan(units_S, 0, _added)
    total = gl.sum(units_S, 0) * (TILES * BLOCKS)
    begin, end = share(program, programs, total)
    item = begin // BLOCKS
    passed_S = (end_S * TILES <= item) & (i_S < E)
    expert = gl.sum(gl.where(passed_S, 1, 0), 0)
    before = gl.max(gl.where(passed_S, end_S, 0), 0)
    first = gl.sum(gl.where(i_S == expert, start_S, 0), 0)
    count = gl.sum(gl.where(i_S == expert, count_S, 0), 0)
    return begin, end, total, expert, item - before * TILES, first, count


@gluon.jit
def next_piece(counts, at, end, expert, place, first, count, TOKENS: gl.constexpr, TILES: gl.constexpr):
    """Return (expert, place, first, count) of the item behind this one. at: the next block of the share. counts: the
    experts' numbers of pairs, in shared memory.

    Behind the last item of an expert comes the next expert that has pairs. There is one if the share has not ended.
    """
    place += 1
    if (at < end) & (place == (count + (TOKENS - 1)) // TOKENS * TILES):
        place = place * 0
        first += count
        count = count * 0
        while count == 0:
            expert += 1
            count = hear(counts, expert)
    return expert, place, first, count


@gluon.jit
def find_item(
    start_ptr, item, before, expert, first, count, E: gl.constexpr, TOKENS: gl.constexpr, TILES: gl.constexpr
):  # fmt: skip
    """Return (items before the expert, expert, its first pair, how many pairs it has) for a work item that is no
    earlier than that expert's. The expert is E behind the last item."""
    items = (count + (TOKENS - 1)) // TOKENS * TILES
    while (expert < E) & (item - before >= items):
        before += items
        first += count
        expert += 1
        count = gl.load(start_ptr + expert + 1, mask=expert < E, other=0) - first
        items = (count + (TOKENS - 1)) // TOKENS * TILES
    return before, expert, first, count

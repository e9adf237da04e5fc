"""The stretches of rows that programs of the gated delta rule run on Hopper, and the states at both ends.

A program runs a row, a part of one while the next part is prepared (plan.py), or a segment of one (segments.py).

Legend: that of hopper_chunks.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS, CARRIES, OUTPUTS = 0, 1, 2  # what a program runs: a row, a segment for its effect, a segment for its outputs

_ROWS, _CARRIES = gl.constexpr(ROWS), gl.constexpr(CARRIES)


@gluon.jit
def piece_of(span, piece):
    """Return the first token of a piece and the one behind it: a row up to its mark, and from there on."""
    first, middle, behind = span
    return gl.where(piece == 0, first, middle), gl.where(piece == 0, middle, behind)


@gluon.jit
def span_of(at, part, part_chunks, tables, SHORT: gl.constexpr, RUN: gl.constexpr):
    """Return (place, row, whether it has tokens here, whether it began before) and the span (first token, its mark or
    where there is none the first token again, the token behind), which is empty if the row has none here.

    at: the row, or the segment.
    tables: (start_ptr, marks_ptr, first_ptr, length_ptr, row_ptr, of_ptr)
    """
    start_ptr, marks_ptr, first_ptr, length_ptr, row_ptr, of_ptr = tables
    row, length = at, at * 0
    if RUN != _ROWS:
        length = gl.load(length_ptr + at)
        row = gl.where(length > 0, gl.load(row_ptr + at), 0)
    start, end = gl.load(start_ptr + row), gl.load(start_ptr + row + 1)
    live = end - start > SHORT
    if RUN != _ROWS:
        live = live & (length > 0)
        first = gl.load(first_ptr + at)
        behind = first + length
        middle = first
        began = live & (length < 0)
    else:
        low, high = gl.load(of_ptr + row), gl.load(of_ptr + row + 1)
        here, after = gl.maximum(low, part * part_chunks), gl.minimum(high, (part + 1) * part_chunks)
        live = live & (here < after)
        began = here > low
        first = gl.load(first_ptr + here, mask=live, other=0)
        behind = gl.load(first_ptr + after, mask=live & (after < high), other=0)
        behind = gl.where(after < high, behind, end)
        middle = gl.minimum(gl.maximum(start + gl.load(marks_ptr + row), first), behind)
    return (at, row, live, began), (first, gl.where(live, middle, first), gl.where(live, behind, first))


@gluon.jit
def cells_of(column_step, key_step, K: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """Return the places of a state's cells, [columns, keys]."""
    column = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, layout)), 1)
    key = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, layout)), 0)
    return column * column_step + key * key_step


@gluon.jit
def state_before(
    where, span, tile, head, pointers, states_block,
    G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, RUN: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return C columns of the state that a program begins with, [columns, keys]."""
    at, row, live, began = where
    states_ptr, carried_ptr, reads_ptr, writes_ptr, fresh_ptr, _, _, _ = pointers
    if RUN == _ROWS:
        columns = cells_of(1, V, K, C, layout)  # of a state in its block, [keys, values]
        block = gl.where(began, gl.load(writes_ptr + row), gl.load(reads_ptr + row))
        exists = (columns >= 0) & (began | (gl.load(fresh_ptr + row) == 0)) & live
        state_ptr = states_ptr + block * states_block + head * (K * V) + tile * C
        state = gl.load(state_ptr + columns, mask=exists, other=0.0)
    else:
        cells = cells_of(K, 1, K, C, layout)
        if RUN == _CARRIES:
            same = cells - cells // K * (K + 1) == tile * C - V
            state = gl.where(same & (tile >= V // C), 1.0, 0.0)
        else:
            state = gl.load(carried_ptr + ((at.to(gl.int64) * G + head) * (V + K) + tile * C) * K + cells)
    return state


@gluon.jit
def leave(
    piece, where, span, tile, head, state, pointers, states_block,
    G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, RUN: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Write the state behind a piece, where it is wanted."""
    at, row, live, _ = where
    states_ptr, carried_ptr, _, writes_ptr, _, marks_ptr, marked_ptr, start_ptr = pointers
    columns = cells_of(1, V, K, C, layout)
    states_ptr += head * (K * V) + tile * C
    mark = gl.load(marks_ptr + row)
    marked = gl.load(start_ptr + row) + mark
    if RUN == _ROWS:
        at_mark = (piece == 0) & (mark > 0) & (marked > span[0]) & (marked <= span[2])
        if live & ((piece == 1) | at_mark):
            block = gl.where(piece == 1, gl.load(writes_ptr + row), gl.load(marked_ptr + row))
            gl.store(states_ptr + block * states_block + columns, state)
    elif live & (piece == 1):
        if RUN == _CARRIES:
            cells = cells_of(K, 1, K, C, layout)
            gl.store(carried_ptr + ((at.to(gl.int64) * G + head) * (V + K) + tile * C) * K + cells, state)
        else:
            if (span[2] == marked) & (mark > 0):
                gl.store(states_ptr + gl.load(marked_ptr + row) * states_block + columns, state)
            if span[2] == gl.load(start_ptr + row + 1):
                gl.store(states_ptr + gl.load(writes_ptr + row) * states_block + columns, state)

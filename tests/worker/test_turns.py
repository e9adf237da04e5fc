"""Rows cut into chunks: every token is in one, in order, and a mark ends one."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.kernels.turns import Turns, rows_of


def pieces(length: int, mark: int, size: int) -> list[int]:
    """The lengths of a row's chunks, in order."""
    found = []
    for part in (mark, length - mark):
        found += [min(size, part - start) for start in range(0, part, size)]
    return found


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1)), min_size=1, max_size=6), st.sampled_from((1, 4, 16)))
def test_chunks_hold_every_token_once_and_end_at_marks(rows: list[tuple[int, float]], size: int) -> None:
    lengths = [length for length, _ in rows]
    marks = [int(length * share) for length, share in rows]
    turns: Turns = rows_of(lengths, list(range(1, len(rows) + 1)), torch.device("cpu"))
    turns = replace(turns, marks_R=torch.tensor(marks, dtype=torch.int32))
    chunks = turns.chunks(size)
    expected, token = [], 0
    for row, (length, mark) in enumerate(zip(lengths, marks, strict=True)):
        assert int(chunks.of_R1[row]) == len(expected)
        for count in pieces(length, mark, size):
            expected.append((token, count, row))
            token += count
    found = list(zip(chunks.first_C.tolist(), chunks.length_C.tolist(), chunks.row_C.tolist(), strict=True))
    assert found[: len(expected)] == expected
    assert set(found[len(expected) :]) <= {(0, 0, len(rows))}
    assert int(chunks.of_R1[-1]) == len(expected)

"""The tokens of a step divided into consecutive pieces, one stretch of the step for each rank.

States that every token replaces by the next need that: a rank that has consecutive tokens of a row can say what all of
them together do to a state. (Attention asks for another division, `core.plan.stripes`.) A row that lies on one rank
alone is one piece, so that no more than ranks - 1 rows are cut.

Legend:
    R  rows
    N  ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple


class Piece(NamedTuple):
    """Consecutive tokens of a row on one rank. marked: they end at the row's mark."""

    rank: int
    row: int
    tokens: int
    marked: bool = False


def bounds_of(tokens: int, ranks: int) -> list[int]:
    """Return the first token of each rank, then the number of tokens.

    >>> bounds_of(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [tokens * rank // ranks for rank in range(ranks + 1)]


def pieces_of(num_tokens_R: Sequence[int], marks_R: Sequence[int], bounds_N1: Sequence[int]) -> Iterator[Piece]:
    """Yield the pieces of a step's rows in the order of tokens. marks_R: the number of a row's tokens in front of its
    mark, at which a piece ends; 0: it has none. bounds_N1: as `bounds_of`.

    >>> list(pieces_of([5, 2], [1, 0], [0, 3, 7]))[:3]
    [Piece(rank=0, row=0, tokens=1, marked=True), Piece(rank=0, row=0, tokens=2, marked=False), \
Piece(rank=1, row=0, tokens=2, marked=False)]
    """
    ends = list(accumulate(num_tokens_R))
    marks = {end - tokens + mark for end, tokens, mark in zip(ends, num_tokens_R, marks_R, strict=True) if mark}
    rank = row = 0
    for start, end in pairwise(sorted({0, *bounds_N1, *ends, *marks})):
        while bounds_N1[rank + 1] <= start:
            rank += 1
        while ends[row] <= start:
            row += 1
        yield Piece(rank, row, end - start, end in marks)

"""Tokens dealt out to ranks like cards: the token at position p belongs to rank p % ranks, and is the p // ranks-th
there (striped attention, arXiv 2311.09431).

So the ranks' parts of a row are equally long to within one token, wherever a chunk begins. The keys that a query of one
rank sees on another are a beginning of that rank's keys, and the next query of the same rank sees one more. That is
plain causal attention, so the pieces of a divided row need no kernels of their own.

Everything follows from `held`. It works alike on numbers, on arrays and on tensors of integers.
"""

from __future__ import annotations

from typing import TypeVar

N = TypeVar("N")


def held(length: N, rank: int, ranks: int) -> N:
    """Return the number of the positions 0 … length - 1 that belong to a rank. Counted back from a negative length:
    minus the number of those that lie between.

    >>> [held(5, rank, 3) for rank in range(3)]
    [2, 2, 1]
    """
    return (length + (ranks - 1 - rank)) // ranks  # type: ignore[operator,return-value]

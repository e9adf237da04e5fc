"""The bytes that an exchange of tokens moves over a rank's link. They bound it, since it computes next to nothing."""

from __future__ import annotations


def swap_bytes(capacity: int, width: int, *, used: int, ranks: int, itemsize: float) -> tuple[float, float]:
    """Return the bytes that a rank sends for (dispatch, combine) by all-to-all: a row for every place, whatever is
    routed."""
    rows = float((ranks - 1) * capacity)
    return rows * (itemsize * width + 8 * used), rows * itemsize * width


def rows_bytes(
    tokens: float, capacity: int, width: int, *, used: int, ranks: int, reached: float, itemsize: float
) -> tuple[float, float]:
    """Return the bytes that a rank sends for (dispatch, combine) where rows go only to the ranks that need them. A
    header of `used` experts and weights goes for every place.

    tokens: of each rank. reached: on how many ranks a token's experts lie, its own included (`devices_of_token`).
    """
    rows = itemsize * width * tokens * reached * (ranks - 1) / ranks  # by symmetry one in `ranks` stays
    return rows + 8.0 * used * (ranks - 1) * capacity, rows


def words_bytes(
    tokens: float, capacity: int, width: int, *, used: int, ranks: int, reached: float, itemsize: float
) -> tuple[float, float]:
    """Return the bytes that a rank sends for (dispatch, combine) if every 32 bits carry the number of their message."""
    sent = rows_bytes(tokens, capacity, width, used=used, ranks=ranks, reached=reached, itemsize=itemsize)
    return 2 * sent[0], 2 * sent[1]

"""The sizes of steps that a GPU's worker captures as graphs. A smaller step is padded to the next one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Larger steps are not captured: there the host launches op by op faster than the device works, and padding costs more.
MIXED_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)


def row_buckets(max_rows: int, apart: int = 8) -> list[int]:
    """Return the rows of the decode buckets: powers of two up to `apart`, and from there on its multiples up to
    max_rows. A step in a bucket that is too large wastes little, and each bucket takes time at start."""
    powers = (1 << power for power in range((apart - 1).bit_length()))
    return sorted({min(rows, max_rows) for rows in (*powers, *range(apart, max_rows + apart, apart))})


def at_least(buckets: Sequence[int], wanted: int) -> int:
    """Return the smallest bucket that holds `wanted`, or 0, which no bucket has, if `wanted` is beyond the largest."""
    index = bisect_left(buckets, wanted)
    return buckets[index] if index < len(buckets) else 0

"""Rows that run a tile of fixed size at a time, the last filled up with zeros.

torch's functions on CPUs choose loops, and orders of sums, by the shapes that they are given. If the shape is always
the same, a row's bits depend on the row alone, not on how many others a step has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

FIXED_TILES = "fixed_tiles"  # the name of implementations that run so
ROWS = 32  # a product of so many rows reads a weight as fast as it comes from memory


def in_tiles(function: Callable[..., Sequence[Tensor]], *given: Tensor | None) -> list[Tensor]:
    """Return the results of the function for all rows, called with `ROWS` rows of each tensor at a time."""
    count = next(len(each) for each in given if each is not None)
    missing = -count % ROWS
    if missing or count == 0:
        given = tuple(None if x is None else F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing or ROWS)) for x in given)
    parts = []
    for start in range(0, max(count, 1), ROWS):
        tile = [None if x is None else x[start : start + ROWS].contiguous() for x in given]
        parts.append(function(*tile))
    return [torch.cat(part)[:count] if len(part) > 1 else part[0][:count] for part in zip(*parts, strict=True)]

"""Rows with room behind each, so that a product of fewer columns can be read together with them.

What makes an activation leaves the room empty. A linear map with an adapter writes the adapter's thin product into it
and multiplies [row, thin product] by [weight, adapter] at once, in place of a product that is added to another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROOM = 64  # columns
_MARK = "room"  # the entry of a tensor's own dictionary that says that the room is not another tensor's


def roomy(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return undefined numbers, rows of a matrix with room where their width is a multiple of `ROOM`, others dense."""
    if len(shape) != 2 or shape[1] % ROOM:
        return torch.empty(shape, dtype=dtype, device=device)
    rows, width = shape
    memory = torch.empty(rows * (width + ROOM), dtype=dtype, device=device).untyped_storage()
    found = torch.empty(0, dtype=dtype, device=device).set_(memory, 0, (rows, width), (width + ROOM, 1))
    found.__dict__[_MARK] = True
    return found


def with_room(x_TI: Tensor, columns: int) -> Tensor | None:
    """Return the rows with so many columns behind them, [T, I + columns], in the same memory; None where no room was
    left. What is written there does not count as a change of x."""
    if columns > ROOM or not x_TI.__dict__.get(_MARK, False):
        return None
    rows, width = x_TI.shape
    return x_TI.data.as_strided((rows, width + columns), (width + ROOM, 1))

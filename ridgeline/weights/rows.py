"""The order of a checkpoint's rows, where that is not ours."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from ridgeline.core.specs.model import Source


def in_our_order(stored: Tensor, source: Source) -> Tensor:
    """Return a checkpoint's tensor, or something that it has for every so many of its rows, with rows in our order."""
    order = _order(len(stored), source)
    return stored if order is None else stored.index_select(0, order.to(stored.device))


def in_their_order(ours: Tensor, source: Source) -> Tensor:
    """Return the inverse of `in_our_order`."""
    order = _order(len(ours), source)
    return ours if order is None else ours.index_select(0, order.argsort().to(ours.device))


def reorders(source: Source) -> bool:
    """Return True if a source's rows have another order than ours."""
    return any(each is not None for each in (source.heads, source.rotated, source.axes, source.turns))


def our_shares(source: Source) -> tuple[int, ...]:
    """Return the shares of the projections that a source holds head by head, in our order."""
    return source.shares[::-1] if source.backwards else source.shares


def divides_heads(source: Source, rows: int, block: int) -> bool:
    """Return True if every projection has whole blocks of so many rows in each head of a source with `rows` rows."""
    head, total = rows // (source.heads or 1), sum(source.shares)
    return all(head * share % (total * block) == 0 for share in source.shares)


def _order(rows: int, source: Source) -> Tensor | None:
    """Return, for each of our rows, its index in the checkpoint, or None if both have one order."""
    if not reorders(source):
        return None
    if source.axes is not None:  # head, columns or rows, half, pair
        return torch.arange(rows).view(source.axes, 2, 2, -1).flip(1).transpose(1, 2).flatten()
    if source.turns is not None:  # projection, head, pair, columns or rows, half
        index = torch.arange(rows).view(3, source.turns, -1, 2, 2)
        return torch.cat((index[:2].flip(3).permute(0, 1, 4, 3, 2).flatten(), index[2].flatten()))
    if source.heads is None:
        return _halves(rows, source)
    index_HR, total = torch.arange(rows).view(source.heads, -1), sum(source.shares)
    ends = [index_HR.shape[1] * end // total for end in accumulate(source.shares)]
    parts = index_HR.tensor_split(ends[:-1], dim=1)
    return torch.cat([part.flatten() for part in (parts[::-1] if source.backwards else parts)])


def _halves(rows: int, source: Source) -> Tensor:
    """Return `_order` of heads of which the first rows rotate in neighbouring pairs."""
    index_HR = torch.arange(rows).view(source.interleaved or 1, -1)
    turned_HR, rest_HR = index_HR[:, : source.rotated], index_HR[:, source.rotated :]
    return torch.cat((turned_HR[:, ::2], turned_HR[:, 1::2], rest_HR), dim=1).flatten()

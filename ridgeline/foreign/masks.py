"""The masks of transformers, told apart: a query sees all tokens before it, or a window of them. Others are refused.

transformers describes a mask by a function of the places of a query and a key. It is asked for enough of them to tell
masks apart that differ anywhere by their nature: next to the diagonal, at powers of two, at the ends of the context and
at the edges of the window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LONGEST = 1 << 20  # of the contexts in which a mask is asked for


class Mask(NamedTuple):
    """window: how many tokens a query sees, itself included; None: all before it."""

    window: int | None


def mask_of(seen_by: MaskFunction, context: int) -> Mask | None:
    """Return the mask that a function describes within a context, or None if it is none that we know."""
    last = min(context, LONGEST) - 1
    end_1 = torch.tensor([last])
    reach = int(_seen(seen_by, end_1, torch.arange(last + 1)).sum())
    window = reach if reach <= last else None
    place_Q = _places(last, window)
    expected_QK = place_Q[None, :] <= place_Q[:, None]
    if window is not None:
        expected_QK &= place_Q[None, :] > place_Q[:, None] - window
    return Mask(window) if torch.equal(_seen(seen_by, place_Q, place_Q), expected_QK) else None


def _seen(seen_by: MaskFunction, query_Q: Tensor, key_K: Tensor) -> Tensor:
    """Return which of these keys each of these queries sees: bool [Q, K]."""
    zero = torch.zeros((), dtype=torch.int64)
    found = seen_by(zero, zero, query_Q[:, None], key_K[None, :])
    return found.expand(len(query_Q), len(key_K)).bool()


def _places(last: int, window: int | None) -> Tensor:
    """Return the places at which masks are compared."""
    edges = [0, last, *(1 << power for power in range(21))]
    if window is not None:
        edges += [window * times for times in (1, 2, 3)] + [last - window, last // 2]
    near = {edge + step for edge in edges for step in range(-3, 4)} | set(range(40))
    return torch.tensor(sorted(place for place in near if 0 <= place <= last))

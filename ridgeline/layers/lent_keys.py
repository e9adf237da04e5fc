"""Layers that attend to the keys and values of an earlier layer, and make none themselves.

Such a layer is given the earlier layer's state, and its projection of the step's tokens. What it stores is what is
there already, so one operation serves all layers.

Legend:
    T  tokens of the step
    X  columns of a fused projection
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.layers.attention import Attends
from ridgeline.layers.heads import Heads

Lent = dict[int, tuple[Tensor, Heads]]  # layer → its projection without queries, and its heads


class Lending:
    """The state of a layer whose keys and values later layers attend to."""

    def __init__(self, state: Attends, lent: Lent, layer: int) -> None:
        self._state, self._lent, self._layer = state, lent, layer

    def attend(
        self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, buffer: Rounded | None = None
    ) -> Tensor | Rounded:
        """Attend as the state does, and keep the projection."""
        self._lent[self._layer] = qkv_TX[:, heads.spec.q_size :], heads
        return self._state.attend(qkv_TX, positions_T, heads, buffer)


class Borrowing:
    """The state of a layer that projects queries alone."""

    def __init__(self, state: Attends, lent: tuple[Tensor, Heads]) -> None:
        self._state, self._lent = state, lent

    def attend(
        self, q_TX: Tensor, positions_T: Tensor, heads: Heads, buffer: Rounded | None = None
    ) -> Tensor | Rounded:
        """Attend with these queries to the earlier layer's keys and values."""
        kv_TX, theirs = self._lent
        heads = theirs._replace(q_norm_D=heads.q_norm_D, softmax=heads.softmax)
        return self._state.attend(torch.cat((q_TX, kv_TX), dim=-1), positions_T, heads, buffer)


def state_of(states: Any, layer: int, borrows: int | None, lends: bool, lent: Lent) -> Any:
    """Return the state that a layer is called with. borrows: the layer whose keys and values it attends to."""
    if borrows is not None:
        return Borrowing(states[borrows], lent[borrows])
    return Lending(states[layer], lent, layer) if lends else states[layer]

"""Layers that attend to the keys and values of an earlier layer, and make none themselves; and layers that attend to
the tokens that an earlier layer's indexer has chosen.

The first are given the earlier layer's state, and its projection of the step's tokens. What they store is what is there
already, so one operation serves all layers.

Legend:
    T  tokens of the step
    X  columns of a fused projection, or of a head's queries
    H  heads
    W  numbers that are kept of a token
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.layers.attention import Attends
from ridgeline.layers.heads import Heads
from ridgeline.layers.indexer import Index
from ridgeline.layers.latent_attention import AttendsToLatents, Latents

# layer → its projection without queries, and its heads; or its choice
Lent = dict[int, tuple[Tensor, Heads] | Index]


class Lending:
    """The state of a layer whose keys and values later layers attend to, or whose choice they take."""

    def __init__(self, state: Any, lent: Lent, layer: int) -> None:
        self._state, self._lent, self._layer = state, lent, layer

    def attend(
        self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, buffer: Rounded | None = None
    ) -> Tensor | Rounded:
        """Attend as the state does, and keep the projection."""
        self._lent[self._layer] = qkv_TX[:, heads.spec.q_size :], heads
        found: Tensor | Rounded = self._state.attend(qkv_TX, positions_T, heads, buffer)
        return found

    def attend_to_latents(
        self, q_THX: Tensor, latent_TW: Tensor, positions_T: Tensor, latents: Latents, index: Index | None
    ) -> Tensor:
        """Attend as the state does, and keep the choice."""
        assert index is not None
        self._lent[self._layer] = index
        found: Tensor = self._state.attend_to_latents(q_THX, latent_TW, positions_T, latents, index)
        return found


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


class Chosen:
    """The state of a layer of latent attention that takes an earlier layer's choice."""

    def __init__(self, state: AttendsToLatents, index: Index) -> None:
        self._state, self._index = state, index

    def attend_to_latents(
        self, q_THX: Tensor, latent_TW: Tensor, positions_T: Tensor, latents: Latents, index: None
    ) -> Tensor:
        """Attend to the tokens of the earlier choice."""
        return self._state.attend_to_latents(q_THX, latent_TW, positions_T, latents, self._index)


def state_of(states: Any, layer: int, borrows: int | None, lends: bool, lent: Lent) -> Any:
    """Return the state that a layer is called with. borrows: the layer whose keys or choice it takes."""
    if borrows is not None:
        found = lent[borrows]
        return Chosen(states[layer], found) if isinstance(found, Index) else Borrowing(states[borrows], found)
    return Lending(states[layer], lent, layer) if lends else states[layer]

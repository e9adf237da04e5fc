"""Transfers: the effect of a piece of a row on the state in front of it, as numbers that ranks can exchange.

A piece is run without the state in front of it. Its effect on any such state follows from its tokens alone, and the
effect of two neighbouring pieces is the composition of both. So ranks that hold pieces of a row exchange transfers, and
no tokens, to know every state between the pieces.

Legend:
    R  pieces
    T  tokens
    H  heads
    K  first width of a state, or 1
    V  second width of a state
    w  inputs that a convolution keeps
    X  channels
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 4096  # tokens whose contributions are added up at once, so that no long piece needs much memory


@dataclass(frozen=True)
class Transfer:
    """The effect of each of some pieces on a state. All fields are tensors by piece."""

    def after(self, states_R: Tensor) -> Tensor:
        """Return the states behind the pieces, from those in front of them."""
        raise NotImplementedError

    @staticmethod
    def begun(states_R: Tensor, fresh_R: Tensor) -> Tensor:
        """Return the states in front of rows, of which fresh ones have none yet."""
        return states_R.masked_fill(fresh_R.view(-1, *[1] * (states_R.dim() - 1)), 0)


@dataclass(frozen=True)
class Decayed(Transfer):
    """S ← left · S + added, where `left` has a number for each number of S, or for several."""

    left: Tensor
    added: Tensor

    def after(self, states_R: Tensor) -> Tensor:
        return torch.addcmul(self.added, self.left, states_R)


@dataclass(frozen=True)
class Affine(Transfer):
    """S ← matrix · S + added, for states [R, H, K, V] and matrices [R, H, K, K]."""

    matrix: Tensor
    added: Tensor

    def after(self, states_R: Tensor) -> Tensor:
        return self.matrix @ states_R + self.added


@dataclass(frozen=True)
class Shifted(Transfer):
    """A convolution's tail, [R, w, X], of which a piece's last inputs push the oldest out.

    last_RwX: the piece's last inputs, the newest one last. count_R11: how many of them there are; what lies in front of
    them is not looked at.
    """

    last_RwX: Tensor
    count_R11: Tensor

    def after(self, states_R: Tensor) -> Tensor:
        kept = states_R.shape[1]
        place_w1 = torch.arange(kept, device=states_R.device)[:, None]
        old = place_w1 < kept - self.count_R11
        index_Rw1 = torch.where(old, place_w1 + self.count_R11, place_w1 + kept)
        both_RX = torch.cat((states_R, self.last_RwX.to(states_R.dtype)), 1)
        return both_RX.gather(1, index_Rw1.expand_as(states_R))


def wide(x: Tensor) -> Tensor:
    """Return x in float32, or as it is if it has more digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def decayed(spans: Sequence[tuple[int, int]], log_THK: Tensor, sums: Callable[[slice, Tensor], Tensor]) -> Decayed:
    """Return the transfers of pieces whose tokens do S ← exp(log) · S + (an outer product).

    spans: the first token of each piece, and the first one behind it.
    sums: returns the sum over some tokens of their outer products, [H, K, V], given what later ones of them leave of
        each, [T, H, K].
    """
    left, added = [], []
    for start, end in spans:
        logs, states = [], []
        for first in range(start, max(end, start + 1), BLOCK):
            tokens = slice(first, min(first + BLOCK, end))
            logs.append(log_THK[tokens].sum(0))
            states.append(sums(tokens, behind(log_THK[tokens]).exp()))
        state = states[0]
        for log_HK, sum_HKV in zip(logs[1:], states[1:], strict=True):
            state = torch.addcmul(sum_HKV, log_HK.exp()[..., None], state)
        left.append(torch.stack(logs).sum(0).exp()[..., None])
        added.append(state)
    return Decayed(torch.stack(left), torch.stack(added))


def behind(log_TH: Tensor) -> Tensor:
    """Return the sums of the logarithms behind each token, added up from the end."""
    return torch.cat((log_TH[1:], torch.zeros_like(log_TH[:1]))).flip(0).cumsum(0).flip(0)

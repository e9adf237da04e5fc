"""The loop that the references of recurrent ops share: row by row, and in each row token by token.

A reference gives its rule for one token, in float64. Where states lie, begin, are marked and go to is said here alone.
Implementations in plain torch run rows of one token all at once (`Singles`).

Legend:
    D  rows of one token
    H  heads
    J  numbers of a token's decay: K, or 1
    K  width of a query or key
    N  block ids
    T  tokens of the step
    V  width of a value
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.scans.metadata import ScanMetadata

# Takes (a token's number, the state before it), and returns (the token's output, the state after it)
Rule = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def begun(state: Tensor, fresh: bool) -> Tensor:
    """Return a row's state before its first token, in float64: what its block holds, or zeros if the row is fresh."""
    return (torch.zeros_like(state) if fresh else state).double()


def recurrence(
    rule: Rule,
    states_N: Tensor,
    metadata: ScanMetadata,
    like_T: Tensor,
    begun: Callable[[Tensor, bool], Tensor] = begun,
) -> Tensor:
    """Return the outputs of the rows' tokens, dense and of the shape and dtype of `like_T`, and replace the rows'
    states. Outputs of tokens behind the last row's are zeros.

    begun: returns a row's state before its first token, given (what its block holds, whether the row is fresh).
    """
    out_T = torch.zeros_like(like_T, memory_format=torch.contiguous_format)
    for row in metadata.rows():
        state = begun(states_N[row.reads], row.fresh)
        for token in range(row.start, row.end):
            out, state = rule(token, state)
            out_T[token] = out.to(out_T.dtype)
            if token + 1 - row.start == row.mark:
                states_N[row.marked] = state.to(states_N.dtype)
        states_N[row.writes] = state.to(states_N.dtype)
    return out_T


def decaying(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, left_THJ: Tensor, scale: float, beta_TH: Tensor | None = None
) -> Rule:
    """Return the rule of a state [H, K, V] from keys to values that decays. Each token does

        S ← left · S;    S ← S + k ⊗ v;    o = Sᵀ q · scale

    With the delta rule's strengths β, it adds β (v - Sᵀ k) in place of v. All tensors are float64.
    """

    def rule(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        k_HK, added_HV = k_THK[token], v_THV[token]
        state = left_THJ[token, :, :, None] * state
        if beta_TH is not None:
            added_HV = beta_TH[token, :, None] * (added_HV - torch.einsum("hkv,hk->hv", state, k_HK))
        state = state + k_HK[:, :, None] * added_HV[:, None]
        return torch.einsum("hkv,hk->hv", state, q_THK[token]) * scale, state

    return rule


class Singles(NamedTuple):
    """The rows of one token, and these tokens."""

    metadata: ScanMetadata
    row_D: Tensor
    token_D: Tensor

    @staticmethod
    def of(metadata: ScanMetadata) -> Singles:
        row_D = (metadata.start_R1.diff() == 1).nonzero()[:, 0]
        return Singles(metadata, row_D, metadata.start_R1[row_D].long())

    def begun(self, states_N: Tensor) -> Tensor:
        """Return the states before the tokens, as copies."""
        states_D = states_N.index_select(0, self.metadata.reads_R[self.row_D])
        fresh_D = self.metadata.fresh_R[self.row_D]
        return states_D.masked_fill_(fresh_D.view(-1, *[1] * (states_D.dim() - 1)), 0)

    def keep(self, states_N: Tensor, states_D: Tensor) -> None:
        """Store the states after the tokens, which are those at marks too."""
        for blocks_R in (self.metadata.writes_R, self.metadata.marked_R):
            states_N.index_copy_(0, blocks_R[self.row_D], states_D.to(states_N.dtype))

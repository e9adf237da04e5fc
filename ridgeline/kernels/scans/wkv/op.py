"""RWKV's weighted mean of values, over rows of unlike lengths.

Every channel by itself takes the mean of the values so far. A token's value weighs exp(k), which decays with each token
behind it; the newest one weighs exp(bonus + k).

Peng et al., "RWKV: Reinventing RNNs for the Transformer Era", arXiv 2305.13048, section 3.1 and appendix D.

Legend:
    N  block ids
    R  rows
    T  tokens of the step
    X  channels
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.scans.metadata import Inputs, ScanMetadata
from ridgeline.kernels.scans.recurrence import recurrence

NOTHING = -1e38  # the exponent of a state in which no token is


@dataclass(frozen=True)
class WkvInputs(Inputs):
    """decay_X: the logarithm of what is left of a weight after a token, below 0. bonus_X: both float32."""

    k_TX: Tensor
    v_TX: Tensor
    decay_X: Tensor
    bonus_X: Tensor
    of_tokens = ("k_TX", "v_TX")


def wkv(given: WkvInputs, states_N3X: Tensor, metadata: ScanMetadata) -> Tensor:
    """Return o_TX, dense and of v's dtype, and replace the rows' states.

    A state is three numbers a channel: a sum of weighted values a, the sum of the weights b, and the exponent p of a
    common factor, so that exp(p) · a and exp(p) · b are what is meant and nothing overflows. Each token does

        o = (exp(p) · a + exp(bonus + k) · v) / (exp(p) · b + exp(bonus + k))
        exp(p) · (a, b) ← exp(p + decay) · (a, b) + exp(k) · (v, 1)

    states_N3X: float32. It may be strided by block id. A state that begins has the exponent NOTHING, and zeros.
    """
    k_TX, v, decay, bonus = (x.double() for x in (given.k_TX, given.v_TX, given.decay_X, given.bonus_X))

    def rule(token: int, state_3X: Tensor) -> tuple[Tensor, Tensor]:
        (a, b, p), k = state_3X, k_TX[token]
        top = torch.maximum(p, bonus + k)
        old, new = (p - top).exp(), (bonus + k - top).exp()
        mean_X = (old * a + new * v[token]) / (old * b + new)
        top = torch.maximum(p + decay, k)
        old, new = (p + decay - top).exp(), (k - top).exp()
        return mean_X, torch.stack((old * a + new * v[token], old * b + new, top))

    return recurrence(rule, states_N3X, metadata, given.v_TX, lambda state_3X, fresh: begun(state_3X, fresh).double())


def begun(state_3X: Tensor, fresh: bool) -> Tensor:
    """Return a row's state before its first token."""
    if not fresh:
        return state_3X
    nothing_3X = torch.zeros_like(state_3X)
    nothing_3X[2] = NOTHING
    return nothing_3X


WKV = Op(
    "wkv",
    wkv,
    (
        Implementation("triton", "ridgeline.kernels.scans.wkv.triton:wkv", on_gpu),
        Implementation("torch", "ridgeline.kernels.scans.wkv.torch_ops:wkv"),
        Implementation("batch_invariant", "ridgeline.kernels.scans.wkv.triton:wkv_in_order", on_gpu),
    ),
)

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

from ridgeline.kernels.op import Implementation, Op, on_gpu
from ridgeline.kernels.turns import Turns, turns_of

NOTHING = -1e38  # the exponent of a state in which no token is


def wkv(k_TX: Tensor, v_TX: Tensor, decay_X: Tensor, bonus_X: Tensor, states_N3X: Tensor, turns: Turns) -> Tensor:
    """Return o_TX, dense and of v's dtype, and replace the rows' states.

    A state is three numbers a channel: a sum of weighted values a, the sum of the weights b, and the exponent p of a
    common factor, so that exp(p) · a and exp(p) · b are what is meant and nothing overflows. Each token does

        o = (exp(p) · a + exp(bonus + k) · v) / (exp(p) · b + exp(bonus + k))
        exp(p) · (a, b) ← exp(p + decay) · (a, b) + exp(k) · (v, 1)

    decay_X: the logarithm of what is left of a weight after a token, below 0. bonus_X: both float32.
    states_N3X: float32. It may be strided by block id. A state that begins has the exponent NOTHING, and zeros.
    """
    decay, bonus = decay_X.double(), bonus_X.double()
    o_TX = torch.zeros_like(v_TX, memory_format=torch.contiguous_format)
    for row in turns.rows():
        a, b, p = begun(states_N3X[row.reads], row.fresh).double()
        for token in range(row.start, row.end):
            k, v = k_TX[token].double(), v_TX[token].double()
            top = torch.maximum(p, bonus + k)
            old, new = (p - top).exp(), (bonus + k - top).exp()
            o_TX[token] = ((old * a + new * v) / (old * b + new)).to(o_TX.dtype)
            top = torch.maximum(p + decay, k)
            old, new = (p + decay - top).exp(), (k - top).exp()
            a, b, p = old * a + new * v, old * b + new, top
            if token + 1 - row.start == row.mark:
                states_N3X[row.marked] = torch.stack((a, b, p)).to(states_N3X.dtype)
        states_N3X[row.writes] = torch.stack((a, b, p)).to(states_N3X.dtype)
    return o_TX


def begun(state_3X: Tensor, fresh: bool) -> Tensor:
    """Return a row's state before its first token."""
    if not fresh:
        return state_3X
    nothing_3X = torch.zeros_like(state_3X)
    nothing_3X[2] = NOTHING
    return nothing_3X


@dataclass(frozen=True)
class Case:
    """A case for tests and benchmarks.

    rows: the tokens of each row.
    marks: the mark of each row; (): no row has one.
    fresh: the rows that begin with nothing.
    padding: tokens behind the last row's.
    large: the spread of the keys. The exponents of large ones overflow.
    """

    rows: tuple[int, ...]
    channels: int = 48
    marks: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    padding: int = 0
    large: float = 1.0

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Turns]:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        turns = turns_of(self.rows, device, self.marks, self.fresh, self.padding)
        k_TX, v_TX = self.large * normal(turns.num_tokens, self.channels), normal(turns.num_tokens, self.channels)
        k_TX[sum(self.rows) :] = torch.nan
        decay_X, bonus_X = -(normal(self.channels) - 2).exp(), normal(self.channels)
        states_N3X = normal(3 * len(self.rows) + 2, 3, self.channels)
        states_N3X[:, 1] = states_N3X[:, 1].abs() + 1
        states_N3X[torch.cat((turns.reads_R[turns.fresh_R], turns.reads_R.new_zeros(1)))] = torch.nan
        return k_TX.to(dtype), v_TX.to(dtype), decay_X, bonus_X, states_N3X, turns


CASES = (
    Case((1,)),
    Case((1, 1, 1), channels=96, fresh=(1,)),
    Case((5, 1, 0, 130, 2), marks=(2, 1, 0, 64, 0), fresh=(0, 3), padding=3),
    Case((70, 3, 1, 65), channels=40, marks=(70, 1, 0, 30), fresh=(1,), large=50.0),
)

WKV = Op(
    "wkv",
    wkv,
    (
        Implementation("triton", "ridgeline.kernels.wkv.triton:wkv", on_gpu),
        Implementation("torch", "ridgeline.kernels.wkv.torch_ops:wkv"),
        Implementation("batch_invariant", "ridgeline.kernels.wkv.triton:wkv_in_order", on_gpu),
    ),
)

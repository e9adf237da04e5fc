"""Attention of a decoder's tokens to an encoder's output.

Legend:
    T  tokens: of the step, or of encoder inputs
    M  model width
    X  columns of a projection: H D of queries, 2 G D of keys and values
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from ridgeline.core.specs.model import AttentionSpec, CrossAttentionSpec
from ridgeline.kernels.attention.paged.op import Softmax
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm


class AttendsAcross(Protocol):
    """The state of one layer of cross attention: what is kept of requests' encoder inputs."""

    def attend(self, q_TX: Tensor, softmax: Softmax) -> Tensor:
        """Attend with the step's queries to all keys of their requests: [T, H * D]."""

    def write(self, kv_TX: Tensor, spec: AttentionSpec) -> None:
        """Store the keys and values of the encoder inputs that the step brings."""


class CrossAttention(nn.Module):
    """Queries of a step's tokens, and keys and values that are made once of an encoder's output."""

    def __init__(self, spec: CrossAttentionSpec, width: int, build: Build) -> None:
        super().__init__()
        self.spec = own = spec.attention
        bias = own.qkv_bias
        self.q = Linear(width, (own.q_size,), bias, build.within("q"), pending=build.pending)
        self.kv = Linear(width, (own.kv_size, own.kv_size), bias, build.within("kv"))
        self.out = Linear(own.q_size, (width,), own.out_bias, build.within("out"), over=build.sums)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: AttendsAcross
    ) -> tuple[Tensor, Tensor]:
        """Return (what attention adds to the residual, the residual before it): [T, M] each."""
        q_TX, residual_TM = self.q.normed(norm, x_TM, residual_TM)
        return self.out(state.attend(q_TX, Softmax(self.spec.scale))), residual_TM

    def encode(self, encoded_TM: Tensor, state: AttendsAcross) -> None:
        """Store the keys and values of an encoder's output."""
        state.write(self.kv(encoded_TM), self.spec)

"""Attention of a decoder's tokens to an encoder's output.

Legend:
    T  tokens: of the step, or of encoder inputs
    M  model width
    X  columns of a projection: H D of queries, 2 G D of keys and values
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from ridgeline.core.specs.model import AttentionSpec, CrossAttentionSpec
from ridgeline.kernels.attention.paged.op import Softmax
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm


class AttendsAcross(Protocol):
    """The state of one layer of cross attention: what is kept of requests' encoder inputs.

    seen_T1: bool, the step's tokens that see any; None: all do.
    """

    @property
    def seen_T1(self) -> Tensor | None: ...

    def attend(self, q_TX: Tensor, softmax: Softmax) -> Tensor:
        """Attend with the step's queries to all keys of their requests: [T, H * D]."""

    def write(self, kv_TX: Tensor, spec: AttentionSpec) -> None:
        """Store the keys and values of the encoder inputs that the step brings."""


def crossing(layers: Iterable[nn.Module]) -> list[tuple[int, CrossAttention]]:
    """Return the numbers of a decoder's layers of cross attention, with their mixers."""
    return [(n, mixer) for n, layer in enumerate(layers) if isinstance(mixer := layer.mixer, CrossAttention)]


class CrossAttention(nn.Module):
    """Queries of a step's tokens, and keys and values that are made once of an encoder's output."""

    def __init__(self, spec: CrossAttentionSpec, width: int, build: Build) -> None:
        super().__init__()
        self.spec = own = spec.attention
        bias = own.qkv_bias
        self.q = Linear(width, (own.q_size,), bias, build.within("q"), pending=build.pending)
        self.kv = Linear(spec.read_width or width, (own.kv_size, own.kv_size), bias, build.within("kv"))
        self.out = Linear(own.q_size, (width,), own.out_bias, build.within("out"), over=build.sums)
        norm = own.qk_norm
        self.q_norm = None if norm is None else Norm(norm, own.head_dim, build)
        self.k_norm = None if norm is None else Norm(norm, own.head_dim, build)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: AttendsAcross
    ) -> tuple[Tensor, Tensor]:
        """Return (what attention adds to the residual, the residual before it): [T, M] each."""
        q_TX, residual_TM = self.q.normed(norm, x_TM, residual_TM)
        attended_TX = state.attend(self._normed(self.q_norm, q_TX), Softmax(self.spec.scale))
        if state.seen_T1 is not None:
            attended_TX = attended_TX.masked_fill(~state.seen_T1, 0)
        return self.out(attended_TX), residual_TM

    def encode(self, encoded_TM: Tensor, state: AttendsAcross) -> None:
        """Store the keys and values of an encoder's output."""
        kv_TX, keys = self.kv(encoded_TM), self.spec.kv_size
        if self.k_norm is not None:
            kv_TX = torch.cat((self._normed(self.k_norm, kv_TX[:, :keys]), kv_TX[:, keys:]), dim=1)
        state.write(kv_TX, self.spec)

    def _normed(self, norm: Norm | None, x_TX: Tensor) -> Tensor:
        """Return heads that are normalised one by one."""
        if norm is None:
            return x_TX
        return norm(x_TX.reshape(-1, self.spec.head_dim))[0].view(x_TX.shape)

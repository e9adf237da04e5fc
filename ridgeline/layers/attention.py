"""Attention layers. What they remember between steps is not theirs: a `MixerState` holds it.

Legend: T tokens, B sequences, S tokens per sequence (T = B * S), M model width, H query heads, G key/value heads,
D head width, X = (H + 2 G) D.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.core.model_spec import AttentionSpec
from ridgeline.layers.build import Build
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.layers.rotary import Rotary


class MixerState(Protocol):
    """What came before, for every layer."""

    def attend(self, mixer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        """Normalise and rotate the step's heads, remember keys and values, attend with the queries.

        qkv: [T, (H + 2 G) D], the fused projection. Returns [T, H * D].
        """


class Attention(nn.Module):
    """Causal grouped-query attention with fused q, k, v projection. layer: index in `spec.layers`."""

    def __init__(self, layer: int, spec: AttentionSpec, width: int, rotary: Rotary | None, build: Build) -> None:
        super().__init__()
        self.layer = layer
        self.spec = spec
        self.qkv = Linear(width, (spec.q_size, spec.kv_size, spec.kv_size), spec.qkv_bias, build)
        self.out = Linear(spec.q_size, (width,), spec.out_bias, build)
        self.q_norm = Norm(spec.qk_norm, spec.head_dim, build) if spec.qk_norm else None
        self.k_norm = Norm(spec.qk_norm, spec.head_dim, build) if spec.qk_norm else None
        self.rotary = rotary

    def forward(
        self, norm: Norm, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: MixerState
    ) -> tuple[Tensor, Tensor]:
        """(what attention adds to the residual, the residual before it): [T, M] each."""
        qkv_TX, residual_TM = self.qkv.normed(norm, x_TM, residual_TM)
        return self.out(state.attend(self, qkv_TX, positions_T)), residual_TM

    def heads(self, qkv_TX: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normalised and rotated: [T, H, D] and [T, G, D] twice."""
        q_THD, k_TGD, v_TGD = (
            part.unflatten(-1, (-1, self.spec.head_dim)) for part in qkv_TX.split(self.qkv.parts, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TGD = self.q_norm(q_THD)[0], self.k_norm(k_TGD)[0]
        if self.rotary is not None:
            q_THD, k_TGD = self.rotary(q_THD, k_TGD, positions_T)
        return q_THD, k_TGD, v_TGD


class DenseCausal:
    """A `MixerState` without memory: T is `batch` sequences of equal length. For training and tests."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def attend(self, mixer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        q_BHSD, k_BGSD, v_BGSD = (
            x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in mixer.heads(qkv_TX, positions_T)
        )
        spec = mixer.spec
        mask_SS = _window_mask(q_BHSD.shape[2], spec.window, q_BHSD.device)
        out_BHSD = F.scaled_dot_product_attention(
            q_BHSD,
            k_BGSD,
            v_BGSD,
            attn_mask=mask_SS,
            is_causal=mask_SS is None,
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )
        return out_BHSD.transpose(1, 2).flatten(0, 1).flatten(1)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """bool [length, length], True where a query (row) may see a key; None where plain causality says it all."""
    if window is None or window >= length:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)

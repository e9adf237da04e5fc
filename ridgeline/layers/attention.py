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
    """Causal grouped-query attention with fused q, k, v projection. layer: index in `spec.layers`. slopes_H: float32,
    what each head's score loses per token of distance; None without ALiBi."""

    slopes_H: Tensor | None

    def __init__(self, layer: int, spec: AttentionSpec, width: int, rotary: Rotary | None, build: Build) -> None:
        super().__init__()
        self.layer = layer
        self.spec = spec
        self.qkv = Linear(width, (spec.q_size, spec.kv_size, spec.kv_size), spec.qkv_bias, build.within("qkv"))
        self.out = Linear(spec.q_size, (width,), spec.out_bias, build.within("out"))
        widths = (spec.q_size, spec.kv_size) if spec.qk_norm_whole else (spec.head_dim, spec.head_dim)
        self.q_norm, self.k_norm = (Norm(spec.qk_norm, w, build) if spec.qk_norm else None for w in widths)
        self.rotary = rotary
        slopes_H = alibi_slopes(spec.num_heads).to(build.device) if spec.alibi else None
        self.register_buffer("slopes_H", slopes_H, persistent=False)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: MixerState
    ) -> tuple[Tensor, Tensor]:
        """(what attention adds to the residual, the residual before it): [T, M] each."""
        qkv_TX, residual_TM = self.qkv.normed(norm, x_TM, residual_TM)
        if self.spec.qk_norm_whole and self.q_norm is not None and self.k_norm is not None:
            q_TX, k_TX, v_TX = qkv_TX.split(self.qkv.parts, dim=-1)
            qkv_TX = torch.cat((self.q_norm(q_TX)[0], self.k_norm(k_TX)[0], v_TX), dim=-1)
        return self.out(state.attend(self, qkv_TX, positions_T)), residual_TM

    @property
    def head_norms(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Weights and eps of the norms of single heads, which the mixer's state applies."""
        if self.q_norm is None or self.k_norm is None or self.spec.qk_norm_whole:
            return None, None, 0.0
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps

    def heads(self, qkv_TX: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normalised and rotated: [T, H, D] and [T, G, D] twice."""
        q_THD, k_TGD, v_TGD = (
            part.unflatten(-1, (-1, self.spec.head_dim)) for part in qkv_TX.split(self.qkv.parts, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None and not self.spec.qk_norm_whole:
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
        if spec.softcap is not None or spec.alibi:
            return _scored(q_BHSD, k_BGSD, v_BGSD, spec, mixer.slopes_H).transpose(1, 2).flatten(0, 1).flatten(1)
        length = q_BHSD.shape[2]
        plain = spec.window is None or spec.window >= length
        mask_SS = None if plain else _seen(length, spec.window, q_BHSD.device)
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


def _scored(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, spec: AttentionSpec, slopes_H: Tensor | None) -> Tensor:
    """Attention whose scores change before the softmax, in float32."""
    per_kv, length = spec.num_heads // spec.num_kv_heads, q_BHSD.shape[2]
    k_BHSD, v_BHSD = (x.repeat_interleave(per_kv, dim=1) for x in (k_BGSD, v_BGSD))
    scores_BHSS = spec.scale * (q_BHSD.float() @ k_BHSD.float().transpose(-1, -2))
    if spec.softcap is not None:
        scores_BHSS = spec.softcap * torch.tanh(scores_BHSS / spec.softcap)
    if slopes_H is not None:
        position_S = torch.arange(length, device=q_BHSD.device)
        scores_BHSS = scores_BHSS + slopes_H[:, None, None] * (position_S - position_S[:, None])
    seen_SS = _seen(length, spec.window, q_BHSD.device)
    weights_BHSS = scores_BHSS.masked_fill(~seen_SS, -torch.inf).softmax(-1)
    return (weights_BHSS @ v_BHSD.float()).to(q_BHSD.dtype)


def alibi_slopes(num_heads: int) -> Tensor:
    """float32 [H]: powers of 2^(-8/n) for n heads, n a power of two; for the heads beyond, every other power of the
    next n's (Press et al., arXiv 2108.12409)."""
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    slopes += [2 ** (-4 * (2 * head + 1) / whole) for head in range(num_heads - whole)]
    return torch.tensor(slopes, dtype=torch.float32)


def _seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """bool [length, length], True where a query (row) may see a key."""
    causal_SS = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal_SS if window is None else causal_SS.triu(1 - window)

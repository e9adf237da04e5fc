"""The mixers of a conformer: a convolution behind a gate, and attention to near places. Sounds lie packed.

Legend:
    T  positions of all sounds
    M  width of the listener
    C  channels
    K  inputs that make an output
    J  blocks of positions, each of one sound
    B  positions of a block
    S  places that a block's positions see together
    W  distances that are seen
    H  heads
    D  head width
"""

from __future__ import annotations

from collections.abc import Callable
from math import log

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.core.specs.conformer import GluConvSpec, NearAttentionSpec
from ridgeline.core.specs.model import Sines
from ridgeline.kernels.attention.packed.op import PackedRows
from ridgeline.layers.build import Build
from ridgeline.layers.embedding import SinePositions
from ridgeline.layers.encoder.packed import PackedViews
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm

BLOCK = 16  # positions; keys of a block are those and the ones that its first position sees


class GluConv(nn.Module):
    """The mixer of a `GluConvSpec`."""

    def __init__(self, spec: GluConvSpec, width: int, build: Build) -> None:
        super().__init__()
        self.spec, self.ops, channels = spec, build.ops, spec.channels
        self.parts = (channels, channels)  # of the shift
        self.glu_in = Linear(width, (2 * channels,), spec.bias, build.within("glu_in"))
        self.shift = build.parameter(2 * channels) if spec.shifted else None
        self.conv = EarlierTaps(channels, spec.length, spec.bias, build)
        self.pointwise = None
        if spec.pointwise:
            self.pointwise = Linear(channels, (channels,), spec.bias, build.within("pointwise"))
        self.norm = None if spec.norm is None else Norm(spec.norm, channels, build)
        self.out = Linear(channels, (width,), spec.bias, build.within("out"))

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: PackedViews
    ) -> tuple[Tensor, Tensor]:
        """Return (what the convolution adds to the residual, the residual before it): [T, M] each."""
        ab_TC, residual_TM = self.glu_in.normed(norm, x_TM, residual_TM)
        a_TC, b_TC = (ab_TC if self.shift is None else ab_TC + self.shift).chunk(2, dim=-1)
        y_TC = self.conv(a_TC * (b_TC.sigmoid() if self.spec.gate == "sigmoid" else F.silu(b_TC)), state.rows)
        if self.pointwise is not None:
            y_TC = self.pointwise(y_TC)
        if self.norm is not None:
            y_TC = self.norm(y_TC)[0]
        return self.out(self.ops.activation(y_TC, "silu")), residual_TM


class EarlierTaps(nn.Module):
    """A convolution of every channel with its own last inputs, within a sound."""

    def __init__(self, channels: int, length: int, bias: bool, build: Build) -> None:
        super().__init__()
        self.length = length
        self.weight = build.parameter(channels, length)
        self.bias = build.parameter(channels) if bias else None

    def forward(self, x_TC: Tensor, rows: PackedRows) -> Tensor:
        """Return [T, C] of [T, C], added up in float32."""
        earlier_TK = rows.table(("earlier", self.length), lambda n_R: _earlier(n_R, self.length), x_TC.device)
        with_zero_TC = F.pad(x_TC, (0, 0, 0, 1))  # what lies before a sound
        y_TC = (
            torch.zeros_like(x_TC, dtype=torch.float32) if self.bias is None else self.bias.float().repeat(len(x_TC), 1)
        )
        for tap in range(self.length):
            y_TC.addcmul_(with_zero_TC[earlier_TK[:, tap]].float(), self.weight[:, tap].float())
        return y_TC.to(x_TC.dtype)


def _earlier(num_tokens_R: np.ndarray, length: int) -> np.ndarray:
    """Return the positions that make each output, the oldest first; T: there is none: [T, K]."""
    total = int(num_tokens_R.sum())
    first_T = np.repeat(np.cumsum(num_tokens_R) - num_tokens_R, num_tokens_R)
    found_TK = np.arange(total)[:, None] + np.arange(1 - length, 1)
    return np.where(found_TK < first_T[:, None], total, found_TK)


class NearAttention(nn.Module):
    """The mixer of a `NearAttentionSpec`."""

    def __init__(self, spec: NearAttentionSpec, width: int, build: Build) -> None:
        super().__init__()
        self.spec, size = spec, spec.num_heads * spec.head_dim
        plain = build.within("distances").unclipped()
        self.qkv = Linear(width, (size,) * 3, False, build.within("qkv"))
        self.distances = Linear(width, (size,), False, plain)
        self.growth = build.parameter(spec.head_dim)
        self.out = Linear(size, (width,), False, build.within("out"))
        self.sines = SinePositions(Sines(steps=max(width // 2 - 1, 1)), spec.window, width, build)

    def forward(
        self, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None, positions_T: Tensor, state: PackedViews
    ) -> tuple[Tensor, Tensor]:
        """Return (what attention adds to the residual, the residual before it): [T, M] each."""
        spec, rows, device = self.spec, state.rows, x_TM.device
        qkv_TX, residual_TM = self.qkv.normed(norm, x_TM, residual_TM)
        q_THD, k_THD, v_THD = (x.unflatten(1, (spec.num_heads, -1)).float() for x in qkv_TX.chunk(3, dim=-1))
        q_THD = q_THD * (F.softplus(self.growth.float()) * (spec.head_dim**-0.5 / log(2)))

        def table(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Tensor:
            return rows.table((name, spec.window), make, device)

        asks_JB, sees_JS = table("asks", _blocks), table("sees", lambda n_R: _seen(n_R, spec.window))
        q_JHBD = q_THD[asks_JB].transpose(1, 2)
        k_JHSD, v_JHSD = (x[sees_JS.clamp(min=0)].transpose(1, 2) for x in (k_THD, v_THD))
        by_distance_WHD = self.distances(self.sines.table_ZM).unflatten(1, (spec.num_heads, -1)).float()
        apart_BS = _distances(spec.window, device)
        bias_JHBW = q_JHBD @ by_distance_WHD.permute(1, 2, 0)
        bias_JHBS = bias_JHBW.gather(-1, apart_BS.clamp(0, spec.window - 1).expand(*bias_JHBW.shape[:2], -1, -1))
        scores_JHBS = spec.softcap * torch.tanh((spec.key_scale * (q_JHBD @ k_JHSD.mT) + bias_JHBS) / spec.softcap)
        seen_JBS = (sees_JS >= 0)[:, None] & (apart_BS >= 0) & (apart_BS < spec.window)
        scores_JHBS = scores_JHBS.masked_fill(~seen_JBS[:, None], -1e9)
        found_JBX = (scores_JHBS.softmax(-1) @ v_JHSD).transpose(1, 2).flatten(2)
        return self.out(found_JBX.flatten(0, 1)[table("places", _places)].to(x_TM.dtype)), residual_TM


def _distances(window: int, device: torch.device) -> Tensor:
    """Return the distance of each place that a block sees from each of its positions: int64 [B, S]."""
    place_S = torch.arange(1 - window, BLOCK, device=device)
    return torch.arange(BLOCK, device=device)[:, None] - place_S


def _firsts(num_tokens_R: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first position of each block, and the first position and the end of its sound: [J, 1] each."""
    blocks_R, begin_R = -(-num_tokens_R // BLOCK), np.cumsum(num_tokens_R) - num_tokens_R
    begin_J, end_J = (np.repeat(each, blocks_R) for each in (begin_R, begin_R + num_tokens_R))
    number_J = np.arange(blocks_R.sum()) - np.repeat(np.cumsum(blocks_R) - blocks_R, blocks_R)
    return (begin_J + BLOCK * number_J)[:, None], begin_J[:, None], end_J[:, None]


def _blocks(num_tokens_R: np.ndarray) -> np.ndarray:
    """Return the positions of each block. Those behind a sound are its last one: [J, B]."""
    first_J1, _, end_J1 = _firsts(num_tokens_R)
    return np.minimum(first_J1 + np.arange(BLOCK), end_J1 - 1)


def _seen(num_tokens_R: np.ndarray, window: int) -> np.ndarray:
    """Return the places that each block sees; -1: none: [J, S]."""
    first_J1, begin_J1, end_J1 = _firsts(num_tokens_R)
    found_JS = first_J1 + np.arange(1 - window, BLOCK)
    return np.where((found_JS < begin_J1) | (found_JS >= end_J1), -1, found_JS)


def _places(num_tokens_R: np.ndarray) -> np.ndarray:
    """Return the place of each position among those of all blocks: [T]."""
    first_J1, _, end_J1 = _firsts(num_tokens_R)
    place_JB = np.arange(len(first_J1) * BLOCK).reshape(-1, BLOCK)
    return place_JB[first_J1 + np.arange(BLOCK) < end_J1]

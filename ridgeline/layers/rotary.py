"""Rotary position embedding: the table of angles and its use.

Legend: T tokens, H query heads, G key/value heads, D head width, P positions, R rotated width, r = R / 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.model_spec import RopeSpec
from ridgeline.layers.build import Build


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Radians per position of each rotated pair: float32 [r]. Raises ModelLoadError for an unknown scaling."""
    exponents_r = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    inv_freq_r = 1.0 / spec.theta**exponents_r
    if spec.scaling is None:
        return inv_freq_r
    scaling = dict(spec.scaling)
    if scaling["rope_type"] != "llama3":
        raise ModelLoadError(f"rotary scaling {scaling['rope_type']!r} is not supported; known: llama3.")
    return _llama3(inv_freq_r, {name: float(value) for name, value in scaling.items() if name != "rope_type"})


def _llama3(inv_freq_r: Tensor, scaling: dict[str, float]) -> Tensor:
    """Slow frequencies down by `factor`, keep fast ones, blend between (Llama 3.1's long-context scaling).

    A pair that turns fewer than low_freq_factor times within the original context is slow, more than
    high_freq_factor times is fast.
    """
    turns_r = scaling["original_max_position_embeddings"] * inv_freq_r / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept_r = ((turns_r - low) / (high - low)).clamp(0, 1)
    return kept_r * inv_freq_r + (1 - kept_r) * inv_freq_r / scaling["factor"]


def cos_sin_table(spec: RopeSpec, positions: int) -> Tensor:
    """float32 [positions, R]: row p holds the cosines of p's angles, then their sines."""
    angles_Pr = torch.arange(positions, dtype=torch.float32).outer(inverse_frequencies(spec))
    return torch.cat((angles_Pr.cos(), angles_Pr.sin()), dim=-1)


class Rotary(nn.Module):
    """Shared by all layers with the same `RopeSpec`. The table stays float32 whatever the model's dtype."""

    cos_sin_PR: Tensor

    def __init__(self, spec: RopeSpec, positions: int, build: Build) -> None:
        super().__init__()
        self.ops = build.ops
        self.register_buffer("cos_sin_PR", cos_sin_table(spec, positions).to(build.device), persistent=False)

    def forward(self, q_THD: Tensor, k_TGD: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.rope(q_THD, k_TGD, self.cos_sin_PR, positions_T)

"""Rotary position embedding: the table of angles.

Legend: P positions, R rotated width, r = R / 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.model_spec import RopeNumber, RopeSpec

Scaling = dict[str, RopeNumber]

_AT_ONCE = 1 << 21  # elements of a piece


def inverse_frequencies(spec: RopeSpec, positions: int) -> tuple[Tensor, float]:
    """(radians per position of each rotated pair, float32 [r]; what cosines and sines are multiplied by).

    positions: the longest context of this run, which decides for the scalings that depend on the length: theirs is
    fixed at load, since keys in the cache cannot be rotated again. Raises ModelLoadError for an unknown scaling.
    """
    exponents_r = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    scaling = dict(spec.scaling or ())
    kind = scaling.get("rope_type", "default")
    if kind == "dynamic":
        return 1.0 / _stretched_base(spec, scaling, positions) ** exponents_r, 1.0
    inv_freq_r = 1.0 / spec.theta**exponents_r
    match kind:
        case "default":
            return inv_freq_r, 1.0
        case "linear":  # position interpolation: Chen et al., arXiv 2306.15595
            return inv_freq_r / _number(scaling, "factor"), 1.0
        case "llama3":
            return _llama3(inv_freq_r, scaling), 1.0
        case "yarn":
            return _yarn(spec, inv_freq_r, scaling), _number(scaling, "attention_factor")
        case "longrope":
            return _longrope(inv_freq_r, scaling, positions), _number(scaling, "attention_factor")
    raise ModelLoadError(f"rotary scaling {kind!r} is not supported.")


def _stretched_base(spec: RopeSpec, scaling: Scaling, positions: int) -> float:
    """Dynamic NTK: the base that turns the slowest pair over `positions` as far as theta does over the original
    context times the factor's part (bloc97, 2023; as in transformers)."""
    length, factor = _number(scaling, "original_max_position_embeddings"), _number(scaling, "factor")
    stretch = factor * max(positions, length) / length - (factor - 1)
    return float(spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2)))


def _llama3(inv_freq_r: Tensor, scaling: Scaling) -> Tensor:
    """Slow frequencies down by `factor`, keep fast ones, blend between (Llama 3.1's long-context scaling).

    A pair that turns fewer than low_freq_factor times within the original context is slow, more than
    high_freq_factor times is fast.
    """
    turns_r = _number(scaling, "original_max_position_embeddings") * inv_freq_r / (2 * math.pi)
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    kept_r = ((turns_r - low) / (high - low)).clamp(0, 1)
    return kept_r * inv_freq_r + (1 - kept_r) * inv_freq_r / _number(scaling, "factor")


def _yarn(spec: RopeSpec, inv_freq_r: Tensor, scaling: Scaling) -> Tensor:
    """YaRN (Peng et al., arXiv 2309.00071): pairs that turn more than beta_fast times within the original context are
    kept, those that turn less than beta_slow times interpolated, with a ramp over the pairs between."""
    length, pairs = _number(scaling, "original_max_position_embeddings"), spec.rotary_dim / 2

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(length / (times * 2 * math.pi)) / math.log(spec.theta)

    low, high = pair_that_turns(_number(scaling, "beta_fast")), pair_that_turns(_number(scaling, "beta_slow"))
    if _number(scaling, "truncate"):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    ramp_r = ((torch.arange(len(inv_freq_r), dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inv_freq_r * (1 - ramp_r) + inv_freq_r / _number(scaling, "factor") * ramp_r


def _longrope(inv_freq_r: Tensor, scaling: Scaling, positions: int) -> Tensor:
    """LongRoPE (Ding et al., arXiv 2402.13753): a factor per pair, from one list within the original context and from
    another beyond it."""
    beyond = positions > _number(scaling, "original_max_position_embeddings")
    factors = scaling["long_factor" if beyond else "short_factor"]
    return inv_freq_r / torch.tensor(factors, dtype=torch.float32)


def _number(scaling: Scaling, name: str) -> float:
    value = scaling[name]
    assert isinstance(value, (int, float))
    return float(value)


def cos_sin_table(
    spec: RopeSpec, positions: int, rows: int | None = None, device: torch.device | None = None
) -> Tensor:
    """float32 [rows, R]: row p holds the cosines of p's angles, then their sines. rows: `positions` without it.

    Made on the CPU, so that all devices have the same bits, and in pieces: memory holds little more than the table.
    """
    inv_freq_r, multiplier = inverse_frequencies(spec, positions)
    table_PR = torch.empty(rows or positions, spec.rotary_dim, dtype=torch.float32, device=device)
    at_once = max(1, _AT_ONCE // spec.rotary_dim)
    for start in range(0, 0 if table_PR.is_meta else len(table_PR), at_once):
        rows_pR = table_PR[start : start + at_once]
        angles_pr = torch.arange(start, start + len(rows_pR), dtype=torch.float32).outer(inv_freq_r)
        rows_pR.copy_(torch.cat((angles_pr.cos(), angles_pr.sin()), dim=-1) * multiplier)
    return table_PR


class Rotary(nn.Module):
    """Shared by all layers with the same `RopeSpec`. The table stays float32 whatever the model's dtype."""

    cos_sin_PR: Tensor

    def __init__(self, spec: RopeSpec, positions: int, rows: int | None, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("cos_sin_PR", cos_sin_table(spec, positions, rows, device), persistent=False)

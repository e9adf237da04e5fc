"""Rotary position embedding: the table of angles.

Legend:
    Z  rows of the table of angles, one for each position; z some of them
    Y  rotated width; y = Y / 2, the pairs that rotate
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import Growth, RopeNumber, RopeSpec

Scaling = dict[str, RopeNumber]

_AT_ONCE = 1 << 21  # elements of the table that are computed at once


def inverse_frequencies(spec: RopeSpec, positions: int) -> tuple[Tensor, float]:
    """Return (the radians per position of each rotated pair, float32 [y]; the number that cosines and sines are
    multiplied by).

    positions: the longest context of this run. It decides the scalings that depend on the length, which are fixed at
        load: keys in the cache cannot be rotated again.

    Raises ModelLoadError for an unknown scaling.
    """
    exponents_y = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    scaling = dict(spec.scaling or ())
    kind = scaling.get("rope_type", "default")
    if kind == "dynamic":
        return 1.0 / _stretched_base(spec, scaling, positions) ** exponents_y, 1.0
    inv_freq_y = 1.0 / spec.theta**exponents_y
    match kind:
        case "default":
            return inv_freq_y, 1.0
        case "linear":  # position interpolation: Chen et al., arXiv 2306.15595
            return inv_freq_y / _number(scaling, "factor"), 1.0
        case "llama3":
            return _llama3(inv_freq_y, scaling), 1.0
        case "yarn":
            return _yarn(spec, inv_freq_y, scaling), _number(scaling, "attention_factor")
        case "longrope":
            return _longrope(inv_freq_y, scaling, positions)
        case "proportional":  # pairs behind the rotated ones stand still
            rotates_y = torch.arange(len(inv_freq_y)) < _number(scaling, "rotated") / 2
            return inv_freq_y / _number(scaling, "factor") * rotates_y, 1.0
    raise ModelLoadError(f"rotary scaling {kind!r} is not supported.")


def _stretched_base(spec: RopeSpec, scaling: Scaling, positions: int) -> float:
    """Return the base of dynamic NTK scaling (bloc97, 2023; as in transformers).

    With it the slowest pair turns over `positions` by the same angle as, with theta, over the original context times
    the factor's part.
    """
    length, factor = _number(scaling, "original_max_position_embeddings"), _number(scaling, "factor")
    stretch = factor * max(positions, length) / length - (factor - 1)
    return float(spec.theta * stretch ** (spec.rotary_dim / (spec.rotary_dim - 2)))


def _llama3(inv_freq_y: Tensor, scaling: Scaling) -> Tensor:
    """Return frequencies by Llama 3.1's scaling for long contexts: slow pairs are slowed down by `factor`, fast pairs
    are kept, and those between are blended.

    A pair is slow if it turns fewer than low_freq_factor times within the original context, and fast if it turns more
    than high_freq_factor times.
    """
    turns_y = _number(scaling, "original_max_position_embeddings") * inv_freq_y / (2 * math.pi)
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    kept_y = ((turns_y - low) / (high - low)).clamp(0, 1)
    return kept_y * inv_freq_y + (1 - kept_y) * inv_freq_y / _number(scaling, "factor")


def _yarn(spec: RopeSpec, inv_freq_y: Tensor, scaling: Scaling) -> Tensor:
    """Return frequencies by YaRN (Peng et al., arXiv 2309.00071). Pairs that turn more than beta_fast times within the
    original context are kept. Pairs that turn less than beta_slow times are interpolated. A ramp leads over the pairs
    between."""
    length, pairs = _number(scaling, "original_max_position_embeddings"), spec.rotary_dim / 2

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(length / (times * 2 * math.pi)) / math.log(spec.theta)

    low, high = pair_that_turns(_number(scaling, "beta_fast")), pair_that_turns(_number(scaling, "beta_slow"))
    if _number(scaling, "truncate"):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    ramp_y = ((torch.arange(len(inv_freq_y), dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inv_freq_y * (1 - ramp_y) + inv_freq_y / _number(scaling, "factor") * ramp_y


def _longrope(inv_freq_y: Tensor, scaling: Scaling, positions: int) -> tuple[Tensor, float]:
    """Return frequencies and magnitude by LongRoPE (Ding et al., arXiv 2402.13753): each pair has a factor, from one
    list within the original context and from another list beyond it."""
    reach = "long" if positions > _number(scaling, "original_max_position_embeddings") else "short"
    factors = torch.tensor(scaling[f"{reach}_factor"], dtype=torch.float32)
    return inv_freq_y / factors, _number(scaling, f"{reach}_magnitude")


def _number(scaling: Scaling, name: str) -> float:
    value = scaling[name]
    assert isinstance(value, (int, float))
    return float(value)


def cos_sin_table(
    spec: RopeSpec, positions: int, rows: int | None = None, device: torch.device | None = None
) -> Tensor:
    """Return the table of angles, float32 [rows, Y]. Row p holds the cosines of the angles at position p, then their
    sines.

    rows: how many rows the table gets (default: `positions`).

    The table is computed on the CPU, so that all devices have the same bits, and in pieces, so that memory holds little
    more than the table.
    """
    inv_freq_y, multiplier = inverse_frequencies(spec, positions)
    table_ZY = torch.empty(rows or positions, spec.rotary_dim, dtype=torch.float32, device=device)
    at_once = max(1, _AT_ONCE // spec.rotary_dim)
    for start in range(0, 0 if table_ZY.is_meta else len(table_ZY), at_once):
        rows_zY = table_ZY[start : start + at_once]
        angles_zy = torch.arange(start, start + len(rows_zY), dtype=torch.float32).outer(inv_freq_y)
        rows_zY.copy_(torch.cat((angles_zy.cos(), angles_zy.sin()), dim=-1) * multiplier)
    return table_ZY


class Rotary(nn.Module):
    """The rotation of all layers with the same `RopeSpec`. Its table stays float32 whatever the model's dtype."""

    cos_sin_ZY: Tensor
    axis_Y: Tensor | None
    column_Y: Tensor | None

    def __init__(self, spec: RopeSpec, positions: int, rows: int | None, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("cos_sin_ZY", cos_sin_table(spec, positions, rows, device), persistent=False)
        axis_Y = torch.tensor(spec.axes * 2, dtype=torch.int64, device=device) if spec.axes else None
        column_Y = torch.arange(len(axis_Y), device=device) if axis_Y is not None else None
        self.register_buffer("axis_Y", axis_Y, persistent=False)  # here, since no graph may bring it from the host
        self.register_buffer("column_Y", column_Y, persistent=False)

    def by_axes(self, places_3T: Tensor) -> Tensor:
        """Return the angles of tokens with three positions, each pair's by its axis: [T, Y]."""
        found_TY = self.cos_sin_ZY[places_3T[self.axis_Y].T, self.column_Y]
        return found_TY.contiguous()  # indexing keeps the order of the indices' memory, and kernels read whole rows


def grown(q: Tensor, positions_T: Tensor, growth: Growth) -> Tensor:
    """Return queries of these positions, [T, …], as `Growth` says. They are rounded once more."""
    steps_T = torch.floor((positions_T + growth.offset) / growth.original)
    factor_T = 1 + growth.beta * torch.log1p(steps_T)
    return q * factor_T.to(q.dtype).view(-1, *[1] * (q.ndim - 1))

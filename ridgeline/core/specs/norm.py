"""A normalization as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A normalization. "rms" is x / rms(x) * weight; "layer" is (x - mean) / std * weight + bias.

    biasless: a "layer" without the bias.
    weightless: there is no weight, and no bias.
    offset: a number to add to the checkpoint's weight (Gemma stores weight - 1). A weight with an offset is held in
        float32, since the sum has more digits than the checkpoint's dtype.
    multiplier: multiplies the weight, once the model is prepared. Such a weight is held in float32 too.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    biasless: bool = False
    weightless: bool = False
    offset: float = 0.0
    multiplier: float = 1.0


def parameters_of(norm: NormSpec, width: int) -> int:
    """Return the number of a norm's parameters."""
    return 0 if norm.weightless else width * (2 if norm.kind == "layer" and not norm.biasless else 1)

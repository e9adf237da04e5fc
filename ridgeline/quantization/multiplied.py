"""A weight whose outputs are multiplied by numbers of the model's config (muP, arXiv 2203.03466).

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.quantization.weight import WrappedWeight

Multipliers = Sequence[tuple[int, float]]  # so many outputs, and what multiplies them


@dataclass(frozen=True)
class MultipliedWeight(WrappedWeight):
    """A weight in any form, and the factor of each of its outputs, float32."""

    factor_O: Tensor

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self.factor_O.nbytes

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        return (self.inner.linear(x_TI, bias_O) * self.factor_O).to(x_TI.dtype)


def factors(multipliers: Multipliers, device: torch.device) -> Tensor | None:
    """Return the factor of each output, float32 [O], or None if all are 1."""
    if all(factor == 1 for _, factor in multipliers):
        return None
    return torch.cat(
        [torch.full((count,), factor, dtype=torch.float32, device=device) for count, factor in multipliers]
    )

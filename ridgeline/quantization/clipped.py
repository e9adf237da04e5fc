"""A weight whose inputs and outputs are clipped to bounds that were learned with it.

Legend:
    T  tokens
    I  inputs
    O  outputs
    P  projections that are fused
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.quantization.weight import Weight, WrappedWeight


@dataclass(frozen=True)
class ClippedWeight(WrappedWeight):
    """A weight in any form, and the bounds of each fused projection.

    parts: the outputs of each.
    bounds_P4: the least and the greatest input and output of each.
    alike: the inputs of all have the same bounds, so that they are multiplied once.
    """

    parts: tuple[int, ...]
    bounds_P4: Tensor
    alike: bool

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        assert isinstance(x_TI, Tensor)  # takes_rounded is False
        inputs = self.bounds_P4[:1] if self.alike else self.bounds_P4
        made = [self.inner.linear(x_TI.clamp(least, most), bias_O) for least, most in inputs[:, :2]]
        found = [
            made[part % len(made)].split(self.parts, dim=-1)[part].clamp(least, most)
            for part, (least, most) in enumerate(self.bounds_P4[:, 2:])
        ]
        return torch.cat(found, dim=-1)


class Clips(nn.Module):
    """The bounds of a linear map's projections, four of each."""

    def __init__(self, outputs: tuple[int, ...], bounds: nn.Parameter) -> None:
        super().__init__()
        self.outputs, self.parts, self.bounds = outputs, (1,) * len(bounds), bounds

    def around(self, matrix: Weight, *, loaded: bool) -> ClippedWeight:
        """Return the weight with these bounds. loaded: their numbers are known."""
        bounds_P4 = self.bounds.view(-1, 4)
        alike = loaded and bool((bounds_P4[:, :2] == bounds_P4[:1, :2]).all())
        return ClippedWeight(matrix.ops, matrix, self.outputs, bounds_P4, alike)

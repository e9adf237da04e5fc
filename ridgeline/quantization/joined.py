"""Fused projections whose weights have different forms, such as a GGUF file's values in more bits than its queries.

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
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.weight import Weight


@dataclass(frozen=True)
class JoinedWeight(Weight):
    """A `Weight` whose outputs are those of several weights, one after the other."""

    ops: Ops
    weights: Sequence[Weight]

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    @property
    def stored(self) -> Tensor:
        return self.weights[0].stored

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        y_TO = torch.cat([weight.linear(x_TI, None) for weight in self.weights], -1)
        return y_TO if bias_O is None else y_TO + bias_O

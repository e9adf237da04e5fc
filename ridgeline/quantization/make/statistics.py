"""Statistics of a linear map's inputs, gathered while a model reads the calibration text.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.weight import FormedWeight, Weight, product_of


class InputStatistics:
    """Sums over all tokens that a matrix has multiplied.

    hessian_II: Σ x xᵀ, float32. The squared error of the outputs of a changed weight is trace(Δ · hessian · Δᵀ).
    largest_I: the largest magnitude of each input.
    total_I: the sum of its magnitudes.
    tokens: how many tokens there were.
    """

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.hessian_II = torch.zeros(inputs, inputs, device=device)
        self.largest_I = torch.zeros(inputs, device=device)
        self.total_I = torch.zeros(inputs, device=device)
        self.tokens = 0

    def add(self, x_TI: Tensor) -> None:
        """Count some tokens."""
        if not len(x_TI):
            return
        x = x_TI.float()
        self.hessian_II.addmm_(x.T, x)
        self.largest_I = torch.maximum(self.largest_I, x.abs().amax(0))
        self.total_I += x.abs().sum(0)
        self.tokens += len(x)

    @property
    def mean_I(self) -> Tensor:
        """The mean magnitude of each input."""
        return self.total_I / max(1, self.tokens)

    def divide(self, factor_I: Tensor) -> None:
        """Become the statistics of inputs that are divided by factors."""
        self.hessian_II /= factor_I[:, None] * factor_I
        self.largest_I /= factor_I
        self.total_I /= factor_I

    def squared_error(self, change_OI: Tensor) -> Tensor:
        """Return the squared error of the outputs, summed over outputs and tokens, of a weight that changes so."""
        return ((change_OI @ self.hessian_II) * change_OI).sum()


def pooled(parts: list[InputStatistics]) -> InputStatistics:
    """Return the statistics of all tokens of several matrices that see the same kind of input, without a Hessian."""
    whole = InputStatistics(0, parts[0].largest_I.device)
    whole.largest_I = torch.stack([part.largest_I for part in parts]).amax(0)
    whole.total_I = torch.stack([part.total_I for part in parts]).sum(0)
    whole.tokens = sum(part.tokens for part in parts)
    return whole


@dataclass(frozen=True)
class ObservedWeight(FormedWeight):
    """A plain weight that counts what it multiplies."""

    seen: InputStatistics = field(kw_only=True)

    @classmethod
    def of(cls, ops: Ops, weight_OI: Tensor) -> ObservedWeight:
        return cls(
            ops, weight_OI, product_of(ops, weight_OI), seen=InputStatistics(weight_OI.shape[1], weight_OI.device)
        )

    def linear(self, x_TI: Tensor | Rounded, bias_O: Tensor | None) -> Tensor:
        assert isinstance(x_TI, Tensor)  # this weight gives no buffer for others
        self.seen.add(x_TI)
        return super().linear(x_TI, bias_O)

    norm_linear = Weight.norm_linear  # of which the linear map counts

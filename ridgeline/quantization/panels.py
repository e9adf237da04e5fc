"""Weights laid out for the C++ products on a CPU, in codes or in int8 levels.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ridgeline.kernels.gemm.codes.panels import Panels, linear, norm_linear


@dataclass(frozen=True)
class PanelWeight:
    """A `Weight` in panels."""

    panels: Panels

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes

    @property
    def stored(self) -> Tensor:
        return self.panels.code

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return linear(x_TI, self.panels, bias_O)

    def norm_linear(
        self,
        x_TI: Tensor,
        residual_TI: Tensor | None,
        norm_weight_I: Tensor,
        eps: float,
        bias_O: Tensor | None,
        gate: str | None,
    ) -> tuple[Tensor, Tensor]:
        return norm_linear(x_TI, residual_TI, norm_weight_I, eps, self.panels, bias_O, gate)

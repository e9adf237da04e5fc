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
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand


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

    def norm_linear(self, x: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        return norm_linear(x, self.panels, epilogue)

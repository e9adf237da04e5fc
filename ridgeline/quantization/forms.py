"""Quantized weights as they are, with the ops that multiply them. `layout.py` says which layout they need.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ridgeline.kernels.coded_gemm.op import Coded
from ridgeline.kernels.fp8_gemm.op import Fp8
from ridgeline.kernels.ops import Ops


@dataclass(frozen=True)
class Fp8Weight:
    """A `Weight` in FP8."""

    ops: Ops
    weight: Fp8

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def stored(self) -> Tensor:
        return self.weight.weight_OI

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return self.ops.fp8_linear(x_TI, self.weight, bias_O)

    def norm_linear(
        self,
        x_TI: Tensor,
        residual_TI: Tensor | None,
        norm_weight_I: Tensor,
        eps: float,
        bias_O: Tensor | None,
        gate: str | None,
    ) -> tuple[Tensor, Tensor]:
        return self.ops.fp8_norm_linear(x_TI, residual_TI, norm_weight_I, eps, self.weight, bias_O, gate)


@dataclass(frozen=True)
class CodedWeight:
    """A `Weight` in codes."""

    ops: Ops
    weight: Coded

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def stored(self) -> Tensor:
        return self.weight.code_OB

    def linear(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return self.ops.coded_linear(x_TI, self.weight, bias_O)

    def norm_linear(
        self,
        x_TI: Tensor,
        residual_TI: Tensor | None,
        norm_weight_I: Tensor,
        eps: float,
        bias_O: Tensor | None,
        gate: str | None,
    ) -> tuple[Tensor, Tensor]:
        return self.ops.coded_norm_linear(x_TI, residual_TI, norm_weight_I, eps, self.weight, bias_O, gate)

"""Quantized weights as they are, with the ops that multiply them. `layout.py` says which layout they need.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.gemm.codes.op import Coded
from ridgeline.kernels.gemm.fp8.op import Fp8
from ridgeline.kernels.gemm.plain import rounded
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.plain.rounded import Rounded
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

    def norm_linear(self, x: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        return self.ops.fp8_norm_linear(x, self.weight, epilogue)

    def room(self, tokens: int, dtype: torch.dtype) -> Rounded | None:
        if self.ops.chosen["fp8_linear"] != "triton" or torch.is_grad_enabled():
            return None
        from ridgeline.kernels.gemm.fp8.triton import takes_rounded  # Triton, which is imported only where it runs

        number_OI = self.weight.weight_OI
        if not takes_rounded(self.weight, tokens, dtype):
            return None
        return rounded.room(tokens, number_OI.shape[1], dtype, number_OI.device)

    def rounds_gated(self, tokens: int, dtype: torch.dtype) -> bool:
        if self.ops.chosen["fp8_norm_linear"] != "triton":
            return False
        from ridgeline.kernels.gemm.fp8.triton import rounds_gated  # likewise

        return rounds_gated(self.weight, tokens, dtype)

    def rounded_linear(self, x: Rounded, bias_O: Tensor | None) -> Tensor:
        return self.ops.fp8_linear(x, self.weight, bias_O)


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

    def norm_linear(self, x: Operand, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        return self.ops.coded_norm_linear(x, self.weight, epilogue)

"""The schemes whose weights are codes of a few bits and whose activations stay as they are.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.coded_gemm.op import Coded
from ridgeline.kernels.ops import Ops


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


def prepare_coded_on_gpu(ops: Ops, weight: Coded, dtype: torch.dtype) -> CodedWeight:
    """Return a weight in codes in the order that a GPU multiplies fastest. Rows that are joined must be joined before.

    dtype: of the activations.
    """
    if ops.chosen["coded_linear"] in ("triton", "batch_invariant"):
        from ridgeline.kernels.coded_gemm.triton import prepared  # Triton, which is imported only where it runs

        weight = prepared(weight, dtype)
    return CodedWeight(ops, weight)

"""Weights laid out for the C++ products on a CPU, in codes or in int8 levels.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ridgeline.kernels.coded_gemm.op import Coded
from ridgeline.kernels.coded_gemm.panels import Panels, linear, norm_linear, pack
from ridgeline.kernels.fp8_gemm.op import Fp8
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.plain import PLAIN
from ridgeline.quantization.scheme import PlainWeight, Weight

logger = logging.getLogger(__name__)


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


def prepare_coded_on_cpu(ops: Ops, weight: Coded, dtype: torch.dtype) -> Weight:
    """Return a weight in codes in the form that a CPU multiplies fastest: in panels, or as numbers of `dtype` where
    there is no compiler or a group fits into no run."""
    if ops.chosen["coded_linear"] == "panels" and (packed := pack(weight)) is not None:
        return PanelWeight(packed)
    _tell_of_plain_numbers()
    return PLAIN.prepare(PlainWeight(ops, weight.dequantized().to(dtype)))


def prepare_fp8_on_cpu(ops: Ops, weight: Fp8, dtype: torch.dtype) -> Weight:
    """Return an FP8 weight as numbers of `dtype`: no CPU multiplies FP8. Activations are then not rounded."""
    return PLAIN.prepare(PlainWeight(ops, weight.dequantized().to(dtype)))


@cache
def _tell_of_plain_numbers() -> None:
    logger.warning("weights in codes are held as plain numbers, which take more memory and are slower.")

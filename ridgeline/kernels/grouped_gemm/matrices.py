"""The matrices of all experts, in any form: a plain stack [E, O, I], or a tuple in FP8 or in codes whose tensors have
the experts in front.

Legend:
    E  experts
    N  rows of x
    O  outputs of an expert's matrix
    I  inputs of an expert's matrix
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ridgeline.kernels.coded_gemm.op import Coded, coded_linear
from ridgeline.kernels.fp8_gemm.op import Fp8, fp8_linear
from ridgeline.kernels.gemm.op import linear
from ridgeline.kernels.launch import compute_capability

Quantized = Fp8 | Coded
Matrices = Tensor | Fp8 | Coded
Q = TypeVar("Q", bound=Fp8 | Coded)


def shape_of(weight: Matrices) -> tuple[int, int, int]:
    """Return (experts, outputs, inputs)."""
    if isinstance(weight, Coded):
        return len(weight.code_OB), weight.code_OB.shape[-2], weight.inputs
    experts, outputs, inputs = (weight.weight_OI if isinstance(weight, Fp8) else weight).shape
    return experts, outputs, inputs


def part(weight: Q, where: int | slice) -> Q:
    """Return one expert's matrix, or the stack of some experts, as views."""
    return _each(weight, lambda tensors: tensors[0][where])


def stacked(weights: Sequence[Q]) -> Q:
    """Return the stack of matrices of one format."""
    return _each(weights[0], torch.stack, *weights[1:])


def _each(weight: Q, change: Callable[[list[Tensor]], Tensor], *others: Q) -> Q:
    """Return a tuple whose every tensor is `change` of those in the same place."""
    fields: list[Any] = [
        change(list(alike)) if isinstance(alike[0], Tensor) else alike[0] for alike in zip(weight, *others, strict=True)
    ]
    return type(weight)(*fields)


def is_turned(scale_OG: Tensor) -> bool:
    """Return True if the outputs of a group follow each other."""
    return not scale_OG.is_contiguous() and scale_OG.transpose(-1, -2).is_contiguous()


def arranged(weight: Quantized) -> Quantized:
    """Return the same matrices as the kernels of their device want them in memory."""
    here = weight.weight_OI.device if isinstance(weight, Fp8) else weight.code_OB.device
    return turned(weight) if compute_capability(here) == (9, 0) else weight


def turned(weight: Quantized) -> Quantized:
    """Return the same matrices with scales (and zeros) of codes in another order in memory: the outputs of a group
    follow each other."""
    if isinstance(weight, Fp8):
        return weight

    def turn(scale_OG: Tensor) -> Tensor:
        return scale_OG.transpose(-1, -2).contiguous().transpose(-1, -2)

    zero_OG = None if weight.zero_OG is None else turn(weight.zero_OG)
    return weight._replace(scale_OG=turn(weight.scale_OG), zero_OG=zero_OG)


def dequantized(weight: Quantized, expert: int) -> Tensor:
    """Return one expert's matrix in float32."""
    return part(weight, expert).dequantized()


def product(x_NI: Tensor, weight: Matrices, expert: int, bias_O: Tensor | None) -> Tensor:
    """Return the linear map of one expert in float32. Beside FP8 weights activations are rounded as the format says."""
    if isinstance(weight, Fp8):
        return fp8_linear(x_NI.float(), part(weight, expert), bias_O)
    if isinstance(weight, Coded):
        return coded_linear(x_NI.float(), part(weight, expert), bias_O)
    return linear(x_NI.float(), weight[expert], bias_O)

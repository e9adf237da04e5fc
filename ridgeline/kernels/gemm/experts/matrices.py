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
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from ridgeline.kernels.base.launch import compute_capability
from ridgeline.kernels.gemm.codes.op import MXFP8, Coded, coded_linear
from ridgeline.kernels.gemm.experts.packed import TILE, Packed, fits, packed
from ridgeline.kernels.gemm.fp8.op import Fp8, fp8_linear
from ridgeline.kernels.gemm.plain.op import linear

ON_HOPPER = True  # hopper.py multiplies FP8, MXFP4 and levels; otherwise the portable kernels do
MXFP8_ON_HOPPER = True  # and MXFP8
Quantized = Fp8 | Coded
Matrices = Tensor | Fp8 | Coded
Q = TypeVar("Q", bound=Fp8 | Coded)


def shape_of(weight: Matrices) -> tuple[int, int, int]:
    """Return (experts, outputs, inputs)."""
    if isinstance(weight, Coded):
        return len(weight.code_OB), weight.code_OB.shape[-2], weight.inputs
    experts, outputs, inputs = (weight.weight_OI if isinstance(weight, Fp8) else weight).shape
    return experts, outputs, inputs


def is_mxfp8(weight: Matrices) -> TypeGuard[Coded]:
    """Return True for MXFP8, whose exponents are bytes."""
    if not isinstance(weight, Coded) or weight.format != MXFP8:
        return False
    return weight.scale_OG.dtype == torch.uint8 and weight.order_I is None


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


def arranged(weight: Quantized, dtype: torch.dtype, parts: Sequence[int]) -> Quantized:
    """Return the same matrices as the "triton" ops of their device want them in memory, beside activations of `dtype`:
    on Hopper MXFP4 and levels in the order of packed.py, other forms as they are. parts: outputs of each (gate and up
    are two)."""
    if isinstance(weight, Fp8 | Packed) or dtype != torch.bfloat16:
        return weight
    whole = fits(weight) and all(outputs % TILE == 0 for outputs in parts)
    return packed(weight) if whole and ON_HOPPER and compute_capability(weight.code_OB.device) == (9, 0) else weight


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

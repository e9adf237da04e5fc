"""Weights in MXFP4 and NVFP4, two codes of E2M1 in a byte, as several methods have them. Activations stay as they are.

Legend:
    O  outputs
    I  inputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.kernels.base.weight_format import CodedFormat, Held
from ridgeline.weights.quantized.piece import Piece, Wanted, as_number, check_divides, finite_scales


def mxfp4_piece(name: str, shape: tuple[int, ...], codes: str) -> Piece:
    """Return a weight in blocks of 32 that share a power of two. codes: the name of a tensor."""
    outputs, inputs = shape
    check_divides(name, inputs, 32)
    return Piece(
        held=Held(format=CodedFormat(bits=4, group=32, values="e2m1"), scales="uint8"),
        tensors={
            codes: Wanted(((outputs, inputs // 2),), ("U8",)),
            f"{name}.weight_scale": Wanted(((outputs, inputs // 32),), ("U8", "F8_E8M0")),
        },
        read={
            "code_OB": lambda files: files(codes),
            "scale_OG": lambda files: exponents(files(f"{name}.weight_scale"), f"{name}.weight_scale"),
        },
        label="MXFP4",
    )


def exponents(scale: Tensor, name: str) -> Tensor:
    """Return E8M0 scales as bytes. Raise ModelLoadError if one is NaN."""
    scale = scale.view(torch.uint8)
    if (bad := int((scale == 255).sum())) > 0:
        raise ModelLoadError(f"{name} holds {bad} scales that are NaN (255); copy it again.")
    return scale


def nvfp4_piece(
    name: str, shape: tuple[int, ...], codes: str, factor: str, unused: str, *, inverse: bool = False
) -> Piece:
    """Return a weight in blocks of 16 with scales in E4M3 and a factor of the whole.

    codes, factor, unused: the names of tensors. inverse: the file has the factor's reciprocal.
    """
    outputs, inputs = shape
    check_divides(name, inputs, 16)
    number = as_number(finite_scales(factor))
    return Piece(
        held=Held(format=CodedFormat(bits=4, group=16, values="e2m1"), scales="float8_e4m3fn", factor=True),
        tensors={
            codes: Wanted(((outputs, inputs // 2),), ("U8",)),
            f"{name}.weight_scale": Wanted(((outputs, inputs // 16),), ("F8_E4M3",)),
            factor: Wanted(((), (1,)), ("F32",)),
            unused: Wanted(((), (1,)), ("F32",), optional=True),
        },
        read={
            "code_OB": lambda files: files(codes),
            "scale_OG": finite_scales(f"{name}.weight_scale", zero=True),
            "scale": lambda files: 1 / number(files) if inverse else number(files),
        },
        label="NVFP4",
    )

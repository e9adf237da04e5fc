"""Linear maps whose weight is int8 levels, each row with a scale of its own: `int8_linear` leaves activations as they
are, `w8a8_linear` rounds each token to int8 when it arrives.

The method of the second is LLM.int8()'s row-wise quantization (Dettmers et al., arXiv 2208.07339) without its outlier
columns.

Legend:
    T  tokens
    I  inputs
    J  inputs, filled up with zeros to whole runs
    O  outputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, Platform, has_byte_products, on_cpu, on_gpu
from ridgeline.kernels.base.weight_format import Int8Format
from ridgeline.kernels.gemm.plain.levels import LEVELS, Levels

RUN = 32  # torch's kernel reads so many inputs at once; of a shorter run it reads beyond the end
MIDDLE = 128  # the unsigned level that stands for zero; oneDNN takes activations as unsigned levels
KEPT, ROUNDED = Int8Format(rounds=False), Int8Format()


def int8_linear(x_TI: Tensor, weight: Levels, bias_O: Tensor | None) -> Tensor:
    """Return x · (level · scale)ᵀ + bias: [T, O] in the dtype of `x_TI`. Sums are in float32.

    weight: levels with zeros behind the I inputs, to J, the next multiple of RUN; scales in the dtype of x.
    """
    y_TO = (x_TI.float() @ weight.level_OI[:, : x_TI.shape[1]].float().T) * weight.scale_O.float()
    if bias_O is not None:
        y_TO = y_TO + bias_O.float()
    return y_TO.to(x_TI.dtype)


def w8a8_linear(x_TI: Tensor, weight: Levels, bias_O: Tensor | None) -> Tensor:
    """Return level(x) · levelᵀ · scale(x) · scale + bias: [T, O] in the dtype of `x_TI`. Sums of levels are exact.

    A token's scale is its own largest magnitude over LEVELS, so no token depends on others. Halves are rounded up
    (computed in float32 around MIDDLE). A token of zeros gives zeros; a token with a NaN or an infinity gives nothing
    finite. An implementation may leave activations unrounded, which is nearer to the truth.
    """
    level_OI, scale_O, _ = weight
    weight_OI = level_OI.to_dense().T if level_OI.is_mkldnn else level_OI
    scale_T1 = x_TI.abs().amax(-1, keepdim=True).float() / LEVELS
    level_TI = torch.floor(x_TI.float() / scale_T1 + (MIDDLE + 0.5)) - MIDDLE
    level_TI = torch.where(scale_T1 == 0, 0.0, level_TI)
    y_TO = (level_TI.double() @ weight_OI.double().T * scale_O.double() * scale_T1.double()).to(x_TI.dtype)
    return y_TO if bias_O is None else y_TO + bias_O


def has_vnni(platform: Platform) -> bool:
    """Return True on a CPU that adds up products of 8-bit numbers exactly and fast, if torch has a function
    for them."""
    if platform.device_type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return torch.cpu._is_vnni_supported() and hasattr(torch.ops.onednn, "qlinear_pointwise")


_HERE = "ridgeline.kernels.gemm.int8"
INT8_LINEAR = Op(
    "int8_linear",
    int8_linear,
    (Implementation("torch", f"{_HERE}.torch_ops:int8_linear", on_cpu),),
    matrix=True,
)
W8A8_LINEAR = Op(
    "w8a8_linear",
    w8a8_linear,
    (
        Implementation("triton", f"{_HERE}.triton:w8a8_linear", on_gpu),
        Implementation("panels", f"{_HERE}.panels:w8a8_linear", has_byte_products),
        Implementation("onednn", f"{_HERE}.onednn:w8a8_linear", has_vnni),
        Implementation("batch_invariant", f"{_HERE}.triton:invariant_linear", on_gpu),
    ),
)

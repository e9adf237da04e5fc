"""A linear map of int8 levels by int8 levels. The weight's rows are rounded beforehand, each token when it arrives.

The method is LLM.int8()'s row-wise quantization (Dettmers et al., arXiv 2208.07339) without its outlier columns.

Legend:
    T  tokens
    I  inputs
    O  outputs
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, Platform, has_byte_products, on_gpu

LEVELS = 127  # levels to either side of zero
MIDDLE = 128  # the unsigned level that stands for zero; oneDNN takes activations as unsigned levels


def w8a8_linear(x_TI: Tensor, level_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return level(x) · levelᵀ · scale(x) · scale + bias: [T, O] in the dtype of `x_TI`. Sums of levels are exact.

    level_OI: int8, or the result of `onednn.pack`.
    scale_O: float32.

    A token's scale is its own largest magnitude over LEVELS, so no token depends on others. Halves are rounded up
    (computed in float32 around MIDDLE). A token of zeros gives zeros; a token with a NaN or an infinity gives nothing
    finite. An implementation may leave activations unrounded, which is nearer to the truth.
    """
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


W8A8_LINEAR = Op(
    "w8a8_linear",
    w8a8_linear,
    (
        Implementation("triton", "ridgeline.kernels.gemm.w8a8.triton:w8a8_linear", on_gpu),
        Implementation("panels", "ridgeline.kernels.gemm.w8a8.panels:w8a8_linear", has_byte_products),
        Implementation("onednn", "ridgeline.kernels.gemm.w8a8.onednn:w8a8_linear", has_vnni),
        Implementation("batch_invariant", "ridgeline.kernels.gemm.w8a8.triton:invariant_linear", on_gpu),
    ),
)

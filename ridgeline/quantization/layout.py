"""The layouts in which devices multiply quantized weights fastest."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.coded_gemm.op import Coded
from ridgeline.kernels.coded_gemm.panels import pack_levels
from ridgeline.kernels.fp8_gemm.op import Fp8
from ridgeline.kernels.op import REFERENCE
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.w8a8_gemm.onednn import pack
from ridgeline.kernels.w8a8_gemm.op import W8A8_LINEAR, has_vnni
from ridgeline.quantization.forms import CodedWeight, Fp8Weight
from ridgeline.quantization.panels import PanelWeight, prepare_coded_on_cpu, prepare_fp8_on_cpu
from ridgeline.quantization.scheme import ScaledWeight, Weight


def laid_out(ops: Ops, weight: Fp8 | Coded, dtype: torch.dtype) -> Weight:
    """Return the form of a weight that the platform multiplies fastest. Rows that are fused must be joined before.

    dtype: of the activations.
    """
    on_cpu = ops.platform.device_type == "cpu"
    if isinstance(weight, Fp8):
        stays = not on_cpu or ops.chosen["fp8_linear"] == REFERENCE
        return Fp8Weight(ops, weight) if stays else prepare_fp8_on_cpu(ops, weight, dtype)
    if ops.chosen["coded_linear"] == REFERENCE:  # which is never the platform's own choice
        return CodedWeight(ops, weight)
    if on_cpu:
        return prepare_coded_on_cpu(ops, weight, dtype)
    if ops.chosen["coded_linear"] in ("triton", "batch_invariant"):
        from ridgeline.kernels.coded_gemm.triton import prepared  # Triton, which is imported only where it runs

        weight = prepared(weight, dtype)
    return CodedWeight(ops, weight)


def levels_laid_out(ops: Ops, level_OI: Tensor, scale_O: Tensor) -> Weight:
    """Return int8 levels with a float32 scale for each output, likewise."""
    chosen = ops.chosen["w8a8_linear"]
    if chosen == "panels" and (panels := pack_levels(level_OI, scale_O)) is not None:
        return PanelWeight(panels)
    product = ops.w8a8_linear
    if chosen == "panels":  # but they could not be compiled
        product = W8A8_LINEAR.choose(ops.platform, "onednn" if has_vnni(ops.platform) else "reference")
    if chosen == "onednn" or (chosen == "panels" and has_vnni(ops.platform)):
        level_OI = pack(level_OI)
    return ScaledWeight(ops, product, level_OI, scale_O)

"""The layouts in which devices multiply quantized weights fastest."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from ridgeline.kernels.base.op import REFERENCE
from ridgeline.kernels.gemm.codes.op import Coded
from ridgeline.kernels.gemm.codes.panels import pack, pack_levels
from ridgeline.kernels.gemm.fp8.op import Fp8
from ridgeline.kernels.gemm.w8a8.onednn import pack as pack_for_onednn
from ridgeline.kernels.gemm.w8a8.op import W8A8_LINEAR, has_vnni
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.forms import CodedWeight, Fp8Weight
from ridgeline.quantization.panels import PanelWeight
from ridgeline.quantization.plain import PLAIN
from ridgeline.quantization.scheme import PlainWeight, ScaledWeight, Weight

logger = logging.getLogger(__name__)


def laid_out(ops: Ops, weight: Fp8 | Coded, dtype: torch.dtype) -> Weight:
    """Return the form of a weight that the platform multiplies fastest. Rows that are fused must be joined before.

    dtype: of the activations.
    """
    on_cpu = ops.platform.device_type == "cpu"
    if isinstance(weight, Fp8):
        stays = not on_cpu or ops.chosen["fp8_linear"] == REFERENCE
        return Fp8Weight(ops, weight) if stays else _plain_numbers(ops, weight, dtype)  # no CPU multiplies FP8
    if ops.chosen["coded_linear"] == REFERENCE:  # which is never the platform's own choice
        return CodedWeight(ops, weight)
    if on_cpu:
        return _coded_on_cpu(ops, weight, dtype)
    if ops.chosen["coded_linear"] in ("triton", "batch_invariant"):
        from ridgeline.kernels.gemm.codes.triton import prepared  # Triton, which is imported only where it runs

        weight = prepared(weight, dtype)
    return CodedWeight(ops, weight)


def _coded_on_cpu(ops: Ops, weight: Coded, dtype: torch.dtype) -> Weight:
    """Return the weight in panels, or as plain numbers where there is no compiler or a group fits into no run."""
    if ops.chosen["coded_linear"] == "panels" and (packed := pack(weight)) is not None:
        return PanelWeight(packed)
    _tell_of_plain_numbers()
    return _plain_numbers(ops, weight, dtype)


def _plain_numbers(ops: Ops, weight: Fp8 | Coded, dtype: torch.dtype) -> Weight:
    """Return the weight as numbers of `dtype`. Activations are then not rounded."""
    return PLAIN.prepare(PlainWeight(ops, weight.dequantized().to(dtype)))


@cache
def _tell_of_plain_numbers() -> None:
    logger.warning("weights in codes are held as plain numbers, which take more memory and are slower.")


def levels_laid_out(ops: Ops, level_OI: Tensor, scale_O: Tensor) -> Weight:
    """Return int8 levels with a float32 scale for each output, likewise."""
    chosen = ops.chosen["w8a8_linear"]
    if chosen == "panels" and (panels := pack_levels(level_OI, scale_O)) is not None:
        return PanelWeight(panels)
    product = ops.w8a8_linear
    if chosen == "panels":  # but they could not be compiled
        product = W8A8_LINEAR.choose(ops.platform, "onednn" if has_vnni(ops.platform) else "reference")
    if chosen == "onednn" or (chosen == "panels" and has_vnni(ops.platform)):
        level_OI = pack_for_onednn(level_OI)
    return ScaledWeight(ops, product, level_OI, scale_O)

"""The layouts in which devices multiply quantized weights fastest."""

from __future__ import annotations

import logging
from functools import cache

import torch

from ridgeline.kernels.base.op import REFERENCE
from ridgeline.kernels.gemm.codes.op import Coded
from ridgeline.kernels.gemm.codes.panels import pack, pack_levels
from ridgeline.kernels.gemm.fp8.op import Fp8
from ridgeline.kernels.gemm.int8.onednn import pack as pack_for_onednn
from ridgeline.kernels.gemm.int8.op import has_vnni
from ridgeline.kernels.gemm.plain.levels import Levels
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.plain import PLAIN
from ridgeline.quantization.weight import Weight, weight_of

logger = logging.getLogger(__name__)


def laid_out(ops: Ops, form: Fp8 | Coded | Levels, dtype: torch.dtype) -> Weight:
    """Return the form of a weight that the platform multiplies fastest. Rows that are fused must be joined before.

    dtype: of the activations.
    """
    match form:
        case Fp8():
            return _fp8(ops, form, dtype)
        case Coded():
            return _coded(ops, form, dtype)
    return _levels(ops, form)


def _fp8(ops: Ops, form: Fp8, dtype: torch.dtype) -> Weight:
    stays = ops.platform.device_type != "cpu" or ops.chosen["fp8_linear"] == REFERENCE
    return weight_of(ops, form) if stays else _plain_numbers(ops, form, dtype)  # no CPU multiplies FP8


def _coded(ops: Ops, form: Coded, dtype: torch.dtype) -> Weight:
    """Return codes as the chosen op reads them. On a CPU these are panels, or plain numbers where there is no compiler
    or a group fits into no run."""
    chosen = ops.chosen["coded_linear"]
    if chosen == REFERENCE:  # which is never the platform's own choice
        return weight_of(ops, form)
    if ops.platform.device_type == "cpu":
        if chosen == "panels" and (packed := pack(form)) is not None:
            return weight_of(ops, packed)
        _tell_of_plain_numbers()
        return _plain_numbers(ops, form, dtype)
    if chosen in ("triton", "batch_invariant"):
        from ridgeline.kernels.gemm.codes.triton import prepared  # Triton, which is imported only where it runs

        form = prepared(form, dtype)
    return weight_of(ops, form)


def _levels(ops: Ops, form: Levels) -> Weight:
    """Return levels as the chosen op reads them: in panels, where they can be compiled, or packed for oneDNN."""
    chosen = ops.chosen["w8a8_linear"]
    if chosen == "panels" and (packed := pack_levels(form)) is not None:
        return weight_of(ops, packed)
    if chosen == "onednn" or (chosen == "panels" and has_vnni(ops.platform)):
        form = form._replace(level_OI=pack_for_onednn(form.level_OI))
    return weight_of(ops, form)


def _plain_numbers(ops: Ops, form: Fp8 | Coded, dtype: torch.dtype) -> Weight:
    """Return the weight as numbers of `dtype`. Activations are then not rounded."""
    return PLAIN.prepare(ops, form.dequantized().to(dtype))


@cache
def _tell_of_plain_numbers() -> None:
    logger.warning("weights in codes are held as plain numbers, which take more memory and are slower.")

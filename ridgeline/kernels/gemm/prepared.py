"""Linear maps on a CPU whose weights were brought, once, into the form that is read fastest.

A weight as it was loaded goes through torch's own product, so that training runs on the same ops.
Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.activation.native import gated_activation
from ridgeline.kernels.norm.native import rms_norm
from ridgeline.kernels.op import Platform

LEVELS = 127  # of eight bits, to either side of zero
MIDDLE = 128  # what zero is among unsigned levels, in which oneDNN wants activations
RUN = 32  # torch's int8 kernel reads inputs in such runs, and beyond the end of others
MANY_TOKENS = 32  # from which torch's int8 kernel is slower than widening the weight first
PIECE = 2048  # rows of a weight widened at once
LARGE_PAGE = 2 << 20
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # the second since Linux 6.1


class Weight(Protocol):
    """A prepared weight. nbytes: the memory it takes."""

    @property
    def nbytes(self) -> int: ...

    def times(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x · weightᵀ + bias: [T, O] in the dtype of `x_TI`."""


@dataclass(frozen=True)
class Packed:
    """In the blocked layout of oneDNN's matrix products, which F.linear would make anew, piece by piece, every time."""

    packed: Tensor

    @property
    def nbytes(self) -> int:
        return torch.ops.mkldnn._nbytes(self.packed)

    def times(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_TI, self.packed, bias_O, "none", [], "")


@dataclass(frozen=True)
class Int8:
    """weight = level · scale, one scale per output: off by at most half a scale. Activations are not rounded. level has
    zeros behind the inputs, up to whole runs."""

    level_OI: Tensor
    scale_O: Tensor

    @property
    def nbytes(self) -> int:
        return self.level_OI.nbytes + self.scale_O.nbytes

    def times(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        x_TI = F.pad(x_TI, (0, self.level_OI.shape[1] - x_TI.shape[1])).contiguous()
        if len(x_TI) < MANY_TOKENS or x_TI.dtype == torch.float16:  # where sums of levels could overflow
            y_TO = torch._weight_int8pack_mm(x_TI, self.level_OI, self.scale_O)
        else:  # levels are whole in any other dtype: widened piece by piece, in the cache
            pieces = [F.linear(x_TI, levels.to(x_TI.dtype)) for levels in self.level_OI.split(PIECE)]
            y_TO = torch.cat(pieces, dim=-1) * self.scale_O
        return y_TO if bias_O is None else y_TO + bias_O


@dataclass(frozen=True)
class W8A8:
    """Weights as `Int8` has them, packed for oneDNN, and activations rounded likewise when they come: each token by its
    own largest magnitude, so that no token depends on others. Sums of products of levels are exact (VNNI).

    The method is LLM.int8()'s row-wise quantization (Dettmers et al., arXiv 2208.07339) without its outlier columns.
    """

    packed: Tensor
    scale_O: Tensor
    zero_O: Tensor

    @property
    def nbytes(self) -> int:
        return torch.ops.mkldnn._nbytes(self.packed) + self.scale_O.nbytes + self.zero_O.nbytes

    def times(self, x_TI: Tensor, bias_O: Tensor | None) -> Tensor:
        scale_T1 = x_TI.abs().amax(-1, keepdim=True).float().div_(LEVELS)
        # Rounds halves up: all that is converted is above zero. A row of zeros becomes anything, times a scale of zero
        level_TI = (x_TI.float() / scale_T1).add_(MIDDLE + 0.5).to(torch.uint8)
        y_TO = torch.ops.onednn.qlinear_pointwise(
            level_TI, 1.0, MIDDLE, self.packed, self.scale_O, self.zero_O, None, 1.0, 0, torch.float32, "none", [], ""
        )
        y_TO = y_TO.mul_(scale_T1).to(x_TI.dtype)
        return y_TO if bias_O is None else y_TO + bias_O


def has_vnni() -> bool:
    """Whether sums of products of 8-bit numbers are exact and fast here, and torch's function for them is there."""
    return torch.cpu._is_vnni_supported() and hasattr(torch.ops.onednn, "qlinear_pointwise")


def has_onednn(platform: Platform) -> bool:
    """On a CPU, where torch was built with oneDNN and has the two functions used here."""
    functions = ("_reorder_linear_weight", "_linear_pointwise", "_nbytes", "data_ptr")
    built = platform.device_type == "cpu" and torch.backends.mkldnn.is_available()
    return built and all(hasattr(torch.ops.mkldnn, name) for name in functions)


def pack(weight_OI: Tensor) -> Tensor | Weight:
    """For oneDNN; as it is where the machine has no instructions for its dtype. float32 gains little and stays too."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    if weight_OI.dtype not in supported or not supported[weight_OI.dtype]():
        return weight_OI
    return Packed(_in_large_pages(torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), None)))


def quantize(weight_OI: Tensor) -> Weight:
    """Rounded to int8, each row by its largest magnitude; activations stay as they are.

    The scale is rounded to the weight's dtype first, so that its error does not count: it moves the largest weight by a
    quarter of a step at the most in bfloat16.
    """
    outputs, inputs = weight_OI.shape
    level_OI = torch.zeros(outputs, -(-inputs // RUN) * RUN, dtype=torch.int8)
    return Int8(level_OI, _round(weight_OI, level_OI))


def quantize_both(weight_OI: Tensor) -> Weight:
    """As `quantize`, for activations that are rounded, too."""
    level_OI = torch.empty(weight_OI.shape, dtype=torch.int8)
    scale_O = _round(weight_OI, level_OI).float()
    packed = _in_large_pages(torch.ops.onednn.qlinear_prepack(level_OI, None))
    return W8A8(packed, scale_O, torch.zeros(len(scale_O), dtype=torch.int64))


def _in_large_pages(packed: Tensor) -> Tensor:
    """Ask Linux to move a packed weight into pages of 2 MiB. Every step reads all weights from end to end, and looking
    up pages of 4 KiB takes a twentieth of that. Where the system will not, nothing is lost."""
    first = -(-torch.ops.mkldnn.data_ptr(packed) // LARGE_PAGE) * LARGE_PAGE
    length = torch.ops.mkldnn.data_ptr(packed) + torch.ops.mkldnn._nbytes(packed) - first
    if length >= LARGE_PAGE and sys.platform == "linux":
        for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
            _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice)
    return packed


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def _round(weight_OI: Tensor, level_OI: Tensor) -> Tensor:
    """Write a weight's levels to the first columns of `level_OI`; the scale of each output, in the weight's dtype."""
    largest_O = weight_OI.detach().abs().amax(1).float()
    scale_O = (largest_O / LEVELS).clamp(min=torch.finfo(weight_OI.dtype).tiny).to(weight_OI.dtype)
    for rows, scale, level in zip(*(x.split(4096) for x in (weight_OI.detach(), scale_O, level_OI)), strict=True):
        level[:, : rows.shape[1]] = (rows.float() / scale.float()[:, None]).round().clamp(-LEVELS, LEVELS)
    return scale_O


def linear(x_TI: Tensor, weight: Tensor | Weight, bias_O: Tensor | None) -> Tensor:
    """As `ridgeline.kernels.gemm.op.linear`; `weight` is a plain or a prepared one. Differentiable with a plain one."""
    return F.linear(x_TI, weight, bias_O) if isinstance(weight, Tensor) else weight.times(x_TI, bias_O)


def norm_linear(
    x_TI: Tensor,
    residual_TI: Tensor | None,
    norm_weight_I: Tensor,
    eps: float,
    weight: Tensor | Weight,
    bias_O: Tensor | None,
    gate: str | None,
) -> tuple[Tensor, Tensor]:
    """As `ridgeline.kernels.gemm.op.norm_linear`, rounding between the parts."""
    n_TI, s_TI = rms_norm(x_TI, residual_TI, norm_weight_I, eps)
    y_TO = linear(n_TI, weight, bias_O)
    return (gated_activation(y_TO, gate) if gate else y_TO), s_TI

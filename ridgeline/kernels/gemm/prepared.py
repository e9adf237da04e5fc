"""Linear maps on a CPU whose weights were brought, once, into the form that is read fastest.

A weight as it was loaded goes through torch's own product, so that training runs on the same ops.
Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.activation.native import gated_activation
from ridgeline.kernels.norm.native import rms_norm
from ridgeline.kernels.op import Platform

LEVELS = 127  # of an int8 weight to either side of zero
RUN = 32  # torch's int8 kernel reads inputs in such runs, and beyond the end of others
MANY_TOKENS = 32  # from which torch's int8 kernel is slower than widening the weight first
PIECE = 2048  # rows of a weight widened at once


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


def has_onednn(platform: Platform) -> bool:
    """On a CPU, where torch was built with oneDNN and has the two functions used here."""
    functions = ("_reorder_linear_weight", "_linear_pointwise", "_nbytes")
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
    return Packed(torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), None))


def quantize(weight_OI: Tensor) -> Weight:
    """Rounded to int8, each row by its largest magnitude.

    The scale is rounded to the weight's dtype first, so that its error does not count: it moves the largest weight by a
    quarter of a step at the most in bfloat16.
    """
    largest_O = weight_OI.detach().abs().amax(1).float()
    scale_O = (largest_O / LEVELS).clamp(min=torch.finfo(weight_OI.dtype).tiny).to(weight_OI.dtype)
    outputs, inputs = weight_OI.shape
    level_OI = torch.zeros(outputs, -(-inputs // RUN) * RUN, dtype=torch.int8)
    for rows, scale, level in zip(*(x.split(4096) for x in (weight_OI.detach(), scale_O, level_OI)), strict=True):
        level[:, :inputs] = (rows.float() / scale.float()[:, None]).round().clamp(-LEVELS, LEVELS)
    return Int8(level_OI, scale_O)


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

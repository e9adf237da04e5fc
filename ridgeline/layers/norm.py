"""RMSNorm or LayerNorm, with the residual addition.

Legend:
    T  tokens (or any leading dimensions)
    M  normalised width
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline.core.specs.model import NormSpec
from ridgeline.kernels.ops import Ops
from ridgeline.layers.build import Build
from ridgeline.parallel.axis import Axis


class Norm(nn.Module):
    """An RMSNorm, or a LayerNorm with a bias. The weight of a norm with an offset is float32, whatever the model's
    dtype.

    weighted: it has a weight to be loaded. Otherwise its weight is 1.
    """

    weight: Tensor

    def __init__(self, spec: NormSpec, width: int, build: Build, *, weighted: bool = True) -> None:
        super().__init__()
        self.eps, self.offset, self._multiplier = spec.eps, spec.offset, spec.multiplier
        self.ops = build.ops
        if weighted and not spec.weightless:
            wide = bool(spec.offset) or spec.multiplier != 1
            self.weight = build.parameter(width, dtype=torch.float32 if wide else None)
        else:
            ones = torch.ones(width, dtype=build.dtype, device=build.device)
            self.register_buffer("weight", ones, persistent=False)
        self.bias: Tensor | None = None
        if spec.kind == "layer" and (spec.biasless or spec.weightless):
            del self.bias
            self.register_buffer("bias", torch.zeros(width, dtype=build.dtype, device=build.device), persistent=False)
        elif spec.kind == "layer":
            self.bias = build.parameter(width)

    @property
    def keeps_weight(self) -> bool:
        """True if `prepare` leaves all loaded numbers as they are."""
        return self._multiplier == 1

    def prepare(self) -> None:
        """Multiply the loaded weight by the spec's multiplier."""
        if self._multiplier != 1:
            with torch.no_grad():
                self.weight.mul_(self._multiplier)
            self._multiplier = 1.0

    def forward(self, x_TM: Tensor, residual_TM: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (norm(s), s) with s = x + residual, or s = x if there is no residual yet."""
        if self.bias is None:
            return self.ops.rms_norm(x_TM, residual_TM, self.weight, self.eps)
        return self.ops.layer_norm(x_TM, residual_TM, self.weight, self.bias, self.eps)

    def over(self, x_TM: Tensor, axis: Axis, together: int | None = None) -> Tensor:
        """Return norm(x) of rows of which every rank holds a part. Only an RMSNorm can be divided so.

        together: so many neighbouring ranks hold the parts of one row (default: all).
        """
        if axis.size == 1:
            return self(x_TM)[0]
        assert self.bias is None
        x, each = x_TM.float(), together or axis.size
        mean_T1 = x.square().mean(-1, keepdim=True) / each  # each holds equally many
        if each == axis.size:
            mean_T1 = axis.all_reduce(mean_T1)
        else:  # all sums at once, of which a rank adds to its own
            own = axis.rank // each
            means_TG = mean_T1.new_zeros(*mean_T1.shape[:-1], axis.size // each)
            means_TG[..., own : own + 1] = mean_T1
            mean_T1 = axis.all_reduce(means_TG)[..., own : own + 1]
        return (x * torch.rsqrt(mean_T1 + self.eps) * self.weight.float()).to(x_TM.dtype)


def summed_norm(
    axis: Axis, ops: Ops, norm: Norm | None, x_TM: Tensor, residual_TM: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (norm(s), s) with s = x + residual, for an x that is still to be added up over the axis. Without a norm
    return (s, s)."""
    if norm is not None and norm.bias is None:
        return axis.all_reduce_norm(x_TM, residual_TM, norm.weight, norm.eps, ops)
    x_TM = axis.all_reduce(x_TM)
    if norm is not None:
        return norm(x_TM, residual_TM)
    s_TM = x_TM if residual_TM is None else x_TM + residual_TM
    return s_TM, s_TM

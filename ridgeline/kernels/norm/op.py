"""Norms with the residual addition fused in.

RMSNorm: Zhang and Sennrich, arXiv 1910.07467. LayerNorm: Ba, Kiros and Hinton, arXiv 1607.06450.

Legend:
    T  tokens (or any leading dimensions)
    M  normalised width
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.op import Implementation, Op, on_gpu


def rms_norm(x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (y, s), both with the shape and dtype of `x_TM`. s = x + residual rounded to x's dtype, or s = x if there
    is no residual. y = s / rms(s) * weight."""
    sum_TM = x_TM if residual_TM is None else x_TM + residual_TM
    s_TM = sum_TM.float()
    y_TM = s_TM * torch.rsqrt(s_TM.square().mean(-1, keepdim=True) + eps) * weight_M.float()
    return y_TM.to(x_TM.dtype), sum_TM


def layer_norm(
    x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, bias_M: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (y, s), both with the shape and dtype of `x_TM`. s = x + residual rounded to x's dtype, or s = x if there
    is no residual. y = (s - mean) / std * weight + bias."""
    sum_TM = x_TM if residual_TM is None else x_TM + residual_TM
    s_TM = sum_TM.float()
    centred_TM = s_TM - s_TM.mean(-1, keepdim=True)
    scale_T1 = torch.rsqrt(centred_TM.square().mean(-1, keepdim=True) + eps)
    y_TM = centred_TM * scale_T1 * weight_M.float() + bias_M.float()
    return y_TM.to(x_TM.dtype), sum_TM


@dataclass(frozen=True)
class Case:
    """A case for tests and benchmarks.

    heads: x is [T, heads, M], as for a norm of queries and keys.
    weight_float32: the weight is float32, whatever the dtype of x is.
    """

    tokens: int
    width: int
    residual: bool = False
    heads: int | None = None
    eps: float = 1e-6
    weight_float32: bool = False

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor | None, Tensor, float]:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        weight_dtype = torch.float32 if self.weight_float32 else dtype
        shape = (self.tokens, self.width) if self.heads is None else (self.tokens, self.heads, self.width)
        residual = normal(*shape) if self.residual else None
        return normal(*shape), residual, normal(self.width, dtype=weight_dtype), self.eps

    def layer_inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float]:
        x_TM, residual_TM, weight_M, eps = self.inputs(dtype, device, seed)
        return x_TM, residual_TM, weight_M, weight_M.flip(0), eps


CASES = (
    Case(1, 64),
    Case(5, 96, residual=True),
    Case(33, 128, heads=4),
    Case(16, 768, residual=True, eps=1e-5),
    Case(8, 4096, residual=True),
    Case(9, 160, residual=True, weight_float32=True),
)

RMS_NORM = Op(
    "rms_norm",
    rms_norm,
    (
        Implementation("triton", "ridgeline.kernels.norm.triton:rms_norm", on_gpu),
        Implementation("torch", "ridgeline.kernels.norm.torch_ops:rms_norm"),
    ),
)
LAYER_NORM = Op(
    "layer_norm",
    layer_norm,
    (
        Implementation("triton", "ridgeline.kernels.norm.triton:layer_norm", on_gpu),
        Implementation("torch", "ridgeline.kernels.norm.torch_ops:layer_norm"),
    ),
)

"""A linear map, alone or with the norm before it and the gated activation behind it.

Legend:
    T  tokens
    I  inputs
    O  outputs
    F  outputs of a gated pair
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.kernels.activation.op import gated_activation
from ridgeline.kernels.norm.op import rms_norm
from ridgeline.kernels.op import Implementation, Op, Platform, on_gpu


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias: [T, O] in the dtype of `x_TI`. Sums are in float32."""
    y_TO = x_TI.float() @ weight_OI.float().T
    if bias_O is not None:
        y_TO = y_TO + bias_O.float()
    return y_TO.to(x_TI.dtype)


def norm_linear(
    x_TI: Tensor,
    residual_TI: Tensor | None,
    norm_weight_I: Tensor | None,
    eps: float,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    gate: str | None,
) -> tuple[Tensor, Tensor]:
    """Return (y, s). s = x + residual rounded to x's dtype, or s = x if there is no residual. y = rms_norm(s) · weightᵀ
    + bias: [T, O]. Without a norm's weight there is no norm, and y = s · weightᵀ + bias.

    Everything from s to the rounding of y is in float32. An implementation may also round the normalised s and the
    gated pair.

    gate: "silu", "gelu" or "gelu_tanh". The weight then holds F gate rows, then F up rows, and y = act(gate) * up: [T,
        F].
    """
    s_TI = x_TI if residual_TI is None else x_TI + residual_TI
    n_TI = s_TI.float() if norm_weight_I is None else rms_norm(s_TI.float(), None, norm_weight_I, eps)[0]
    y_TO = linear(n_TI, weight_OI, bias_O)
    return (gated_activation(y_TO, gate) if gate else y_TO).to(x_TI.dtype), s_TI


NormLinear = Callable[
    [Tensor, Tensor | None, Tensor | None, float, Tensor, Tensor | None, str | None], tuple[Tensor, Tensor]
]


def in_three(
    rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]],
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    gated_activation: Callable[[Tensor, str], Tensor],
) -> NormLinear:
    """Return `norm_linear` made of three functions, one after the other, with rounding between them."""

    def norm_linear(
        x_TI: Tensor,
        residual_TI: Tensor | None,
        norm_weight_I: Tensor | None,
        eps: float,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        gate: str | None,
    ) -> tuple[Tensor, Tensor]:
        if norm_weight_I is None:
            n_TI = s_TI = x_TI if residual_TI is None else x_TI + residual_TI
        else:
            n_TI, s_TI = rms_norm(x_TI, residual_TI, norm_weight_I, eps)
        y_TO = linear(n_TI, weight_OI, bias_O)
        return (gated_activation(y_TO, gate) if gate else y_TO), s_TI

    return norm_linear


@dataclass(frozen=True)
class Case:
    """A case of `linear` for tests and benchmarks."""

    tokens: int
    in_width: int
    out_width: int
    bias: bool = False

    def inputs(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return random inputs, with weights scaled so that outputs have a standard deviation of about one."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        x_TI = normal(self.tokens, self.in_width).to(dtype)
        weight_OI = (normal(self.out_width, self.in_width) * self.in_width**-0.5).to(dtype)
        return x_TI, weight_OI, normal(self.out_width).to(dtype) if self.bias else None


@dataclass(frozen=True)
class NormCase:
    """A case of `norm_linear` for tests and benchmarks.

    out_width: the columns of the result. The weight has twice as many rows if the op is gated.
    norm_float32: the norm's weight is float32, whatever the activations are.
    norm: False: there is no norm.
    """

    tokens: int
    in_width: int
    out_width: int
    bias: bool = False
    residual: bool = True
    gate: str | None = None
    eps: float = 1e-6
    norm_float32: bool = False
    norm: bool = True

    def inputs(
        self, dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> tuple[Tensor, Tensor | None, Tensor | None, float, Tensor, Tensor | None, str | None]:
        """Return random inputs, with a norm weight around one."""
        generator = torch.Generator(device).manual_seed(seed)
        rows = self.out_width * (2 if self.gate else 1)
        x_TI, weight_OI, bias_O = Case(self.tokens, self.in_width, rows, self.bias).inputs(dtype, device, seed)
        residual_TI = torch.randn(x_TI.shape, generator=generator, device=device).to(dtype) if self.residual else None
        norm_weight_I = 1 + 0.3 * torch.randn(self.in_width, generator=generator, device=device)
        norm_weight_I = norm_weight_I.to(torch.float32 if self.norm_float32 else dtype)
        return x_TI, residual_TI, norm_weight_I if self.norm else None, self.eps, weight_OI, bias_O, self.gate


CASES = (
    Case(1, 64, 64),
    Case(1, 200, 48),
    Case(3, 64, 192, bias=True),
    Case(2, 1032, 36),
    Case(7, 36, 20),
    Case(8, 1024, 72),
    Case(17, 768, 2304, bias=True),
    Case(1, 4096, 192),
    Case(256, 1024, 3072),
)

NORM_CASES = (
    NormCase(1, 64, 64, residual=False),
    NormCase(1, 1024, 24, gate="silu"),
    NormCase(2, 200, 48, bias=True),
    NormCase(3, 96, 36, bias=True, gate="gelu", eps=0.5),
    NormCase(7, 36, 20),
    NormCase(8, 640, 72, gate="silu"),
    NormCase(17, 328, 72, bias=True, gate="gelu_tanh"),
    NormCase(2, 328, 72, gate="gelu_tanh", norm_float32=True),
    NormCase(1, 1032, 40, norm_float32=True),
    NormCase(40, 512, 48, residual=False),
    NormCase(300, 64, 64, gate="silu"),
    NormCase(1, 1024, 24, gate="silu", residual=False, norm=False),
    NormCase(3, 96, 36, bias=True, gate="gelu", norm=False),
    NormCase(40, 512, 48, gate="silu", residual=False, norm=False),
)


def has_onednn(platform: Platform) -> bool:
    """Return True on a CPU, if torch was built with oneDNN and has the functions that are used here."""
    functions = ("_reorder_linear_weight", "_linear_pointwise", "_nbytes", "data_ptr")
    built = platform.device_type == "cpu" and torch.backends.mkldnn.is_available()
    return built and all(hasattr(torch.ops.mkldnn, name) for name in functions)


LINEAR = Op(
    "linear",
    linear,
    (
        Implementation("triton", "ridgeline.kernels.gemm.triton:linear", on_gpu),
        Implementation("onednn", "ridgeline.kernels.gemm.onednn:linear", has_onednn),
        Implementation("torch", "ridgeline.kernels.gemm.torch_ops:linear"),
        Implementation("batch_invariant", "ridgeline.kernels.gemm.batch_invariant:linear", on_gpu),
    ),
)
NORM_LINEAR = Op(
    "norm_linear",
    norm_linear,
    (
        Implementation("triton", "ridgeline.kernels.gemm.triton:norm_linear", on_gpu),
        Implementation("onednn", "ridgeline.kernels.gemm.onednn:norm_linear", has_onednn),
        Implementation("torch", "ridgeline.kernels.gemm.torch_ops:norm_linear"),
        Implementation("batch_invariant", "ridgeline.kernels.gemm.batch_invariant:norm_linear", on_gpu),
    ),
)

"""A linear map, alone or with the norm before it and the gated activation behind it.

Legend:
    T  tokens
    I  inputs
    O  outputs
    F  outputs of a gated pair
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, Platform, on_cpu, on_gpu
from ridgeline.kernels.gemm.lora.op import StepFactors, lora
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.small.activation.op import gated_activation
from ridgeline.kernels.small.norm.op import rms_norm


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias: [T, O] in the dtype of `x_TI`. Sums are in float32."""
    y_TO = x_TI.float() @ weight_OI.float().T
    if bias_O is not None:
        y_TO = y_TO + bias_O.float()
    return y_TO.to(x_TI.dtype)


def unrounded(y_TO: Tensor, buffer: Rounded | None) -> Tensor:
    """Return y, for which there is no buffer."""
    assert buffer is None
    return y_TO


class Operand(NamedTuple):
    """The input of a linear map: rms_norm(s) with s = x + residual, in x's dtype, or s itself without a norm."""

    x_TI: Tensor
    residual_TI: Tensor | None = None
    norm_weight_I: Tensor | None = None
    eps: float = 0.0

    def summed(self) -> Tensor:
        """Return s."""
        return self.x_TI if self.residual_TI is None else self.x_TI + self.residual_TI


class Epilogue(NamedTuple):
    """The end of a linear map: a bias, products of adapters, a gate, and where the result goes.

    gate: "silu", "gelu" or "gelu_tanh". The weight then holds F gate rows, then F up rows, and y = act(gate) * up: [T,
        F].
    buffer: y is rounded to E4M3 there, with a scale for each token and 128 outputs. Only FP8 weights do that.
    adapters: what each token's adapter adds in front of the gate. Only the reference and plain weights on GPUs do.
    """

    bias_O: Tensor | None = None
    gate: str | None = None
    buffer: Rounded | None = None
    adapters: StepFactors | None = None


W = TypeVar("W")
Linear = Callable[[Tensor, W, Tensor | None], Tensor]
NormLinear = Callable[[Operand, W, Epilogue], tuple[Tensor, Tensor]]


def norm_linear_of(linear: Linear[W], end: Callable[[Tensor, Rounded | None], Tensor] = unrounded) -> NormLinear[W]:
    """Return the reference of an op (x, weight, epilogue) → (y, s), from that of the linear map alone. y is the linear
    map of the operand.

    Everything from s to the rounding of y is in float32. An implementation may also round the normalised s and the
    gated pair. end: what the result in x's dtype becomes where there is a buffer for it.
    """

    def norm_linear(x: Operand, weight: W, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        s_TI = x.summed()
        n_TI = s_TI.float() if x.norm_weight_I is None else rms_norm(s_TI.float(), None, x.norm_weight_I, x.eps)[0]
        y_TO = linear(n_TI, weight, epilogue.bias_O)
        if epilogue.adapters is not None:
            lora(y_TO, n_TI, *epilogue.adapters)
        y_TO = gated_activation(y_TO, epilogue.gate) if epilogue.gate else y_TO
        return end(y_TO.to(x.x_TI.dtype), epilogue.buffer), s_TI

    norm_linear.__module__ = linear.__module__
    return norm_linear


norm_linear = norm_linear_of(linear)


def in_three(
    rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]],
    linear: Linear[W],
    gated_activation: Callable[[Tensor, str], Tensor],
    end: Callable[[Tensor, Rounded | None], Tensor] = unrounded,
) -> NormLinear[W]:
    """Return an op like `norm_linear_of` that is made of three functions, one after the other, with rounding between
    them."""

    def norm_linear(x: Operand, weight: W, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        assert epilogue.adapters is None
        if x.norm_weight_I is None:
            n_TI = s_TI = x.summed()
        else:
            n_TI, s_TI = rms_norm(x.x_TI, x.residual_TI, x.norm_weight_I, x.eps)
        y_TO = linear(n_TI, weight, epilogue.bias_O)
        return end(gated_activation(y_TO, epilogue.gate) if epilogue.gate else y_TO, epilogue.buffer), s_TI

    return norm_linear


def has_onednn(platform: Platform) -> bool:
    """Return True on a CPU, if torch was built with oneDNN and has the functions that are used here."""
    functions = ("_reorder_linear_weight", "_linear_pointwise", "_nbytes", "data_ptr")
    built = platform.device_type == "cpu" and torch.backends.mkldnn.is_available()
    return built and all(hasattr(torch.ops.mkldnn, name) for name in functions)


LINEAR = Op(
    "linear",
    linear,
    (
        Implementation("triton", "ridgeline.kernels.gemm.plain.triton:linear", on_gpu),
        Implementation("onednn", "ridgeline.kernels.gemm.plain.onednn:linear", has_onednn),
        Implementation("torch", "ridgeline.kernels.gemm.plain.torch_ops:linear"),
        Implementation("batch_invariant", "ridgeline.kernels.gemm.plain.batch_invariant:linear", on_gpu),
        Implementation("triton_training", "ridgeline.kernels.gemm.plain.triton_training:linear", on_gpu),
        Implementation("fixed_tiles", "ridgeline.kernels.gemm.plain.fixed_tiles:linear", on_cpu),
    ),
    matrix=True,
)
NORM_LINEAR = LINEAR.fused("norm_linear", norm_linear)

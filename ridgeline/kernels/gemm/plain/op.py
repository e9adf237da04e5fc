"""A linear map, alone or with the norm before it and the gated activation behind it.

Legend:
    T  tokens
    I  inputs
    O  outputs
    F  outputs of a gated pair
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, Platform, on_gpu
from ridgeline.kernels.small.activation.op import gated_activation
from ridgeline.kernels.small.norm.op import rms_norm


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
    ),
    matrix=True,
)
NORM_LINEAR = Op(
    "norm_linear",
    norm_linear,
    (
        Implementation("triton", "ridgeline.kernels.gemm.plain.triton:norm_linear", on_gpu),
        Implementation("onednn", "ridgeline.kernels.gemm.plain.onednn:norm_linear", has_onednn),
        Implementation("torch", "ridgeline.kernels.gemm.plain.torch_ops:norm_linear"),
        Implementation("batch_invariant", "ridgeline.kernels.gemm.plain.batch_invariant:norm_linear", on_gpu),
    ),
    matrix=True,
)

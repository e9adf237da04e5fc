"""FP8 in graphs of torch's compilers: the linear map, and a norm whose result is rounded in the same kernel. The legend
is that of op.py; M is the width of a norm."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.library import chosen, dense_like, expect, library_op
from ridgeline.kernels.base.op import Implementation, Op
from ridgeline.kernels.base.weight_format import Fp8Format
from ridgeline.kernels.gemm.fp8.op import BY_TOKEN, FP8_LINEAR, IN_BLOCKS, Fp8, has_e4m3, round_activations
from ridgeline.kernels.small.norm.op import rms_norm


def norm_fp8(
    x_TM: Tensor, residual_TM: Tensor | None, weight_M: Tensor, eps: float, fp8: Fp8Format
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q, scales, s): y = rms_norm(x, residual) rounded to E4M3, [T, M], and s = x + residual. Scales are
    float32, [T], or [ceil(M / 128), T] if each 128 numbers have one. y itself is in float32."""
    s_TM = x_TM if residual_TM is None else x_TM + residual_TM
    y_TM, _ = rms_norm(s_TM.float(), None, weight_M.float(), eps)
    q_TM, scale_TC = round_activations(y_TM, fp8, None)
    return q_TM, scale_TC.T.contiguous() if fp8.block else scale_TC[:, 0], s_TM


NORM_FP8 = Op(
    "norm_fp8",
    norm_fp8,
    (Implementation("triton", "ridgeline.kernels.gemm.fp8.rounding:norm_fp8", has_e4m3),),
)


def _check(op: str, x_TM: Tensor, residual_TM: Tensor, weight_M: Tensor) -> None:
    fits = x_TM.ndim == 2 and weight_M.shape == x_TM.shape[1:]
    fits &= residual_TM.shape == x_TM.shape and residual_TM.dtype == x_TM.dtype
    expect(fits, op, "x [T, M], a residual like x, and a weight [M]", x_TM, residual_TM, weight_M)


def _fake_rounded(x_TM: Tensor, weight_M: Tensor, eps: float, block: bool) -> tuple[Tensor, Tensor]:
    tokens, width = x_TM.shape
    shape = (-(-width // 128), tokens) if block else (tokens,)
    return dense_like(x_TM, dtype=torch.float8_e4m3fn), dense_like(x_TM, *shape, dtype=torch.float32)


@library_op(fake=_fake_rounded)
def rms_norm_fp8(x_TM: Tensor, weight_M: Tensor, eps: float, block: bool) -> tuple[Tensor, Tensor]:
    """Return (q, scales) of a norm whose result is rounded at once."""
    _check("rms_norm_fp8", x_TM, x_TM, weight_M)
    q_TM, scale, _ = chosen(NORM_FP8, x_TM)(x_TM, None, weight_M, eps, IN_BLOCKS if block else BY_TOKEN)
    return q_TM, scale.clone()


def _fake_added(
    x_TM: Tensor, residual_TM: Tensor, weight_M: Tensor, eps: float, block: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_rounded(x_TM, weight_M, eps, block), dense_like(x_TM)


@library_op(fake=_fake_added)
def add_rms_norm_fp8(
    x_TM: Tensor, residual_TM: Tensor, weight_M: Tensor, eps: float, block: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q, scales, s) of a norm of s = x + residual whose result is rounded at once."""
    _check("add_rms_norm_fp8", x_TM, residual_TM, weight_M)
    q_TM, scale, s_TM = chosen(NORM_FP8, x_TM)(x_TM, residual_TM, weight_M, eps, IN_BLOCKS if block else BY_TOKEN)
    return q_TM, scale.clone(), s_TM.contiguous()


def _fake_linear(x_TI: Tensor, weight_OI: Tensor, *_: object) -> Tensor:
    return dense_like(x_TI, x_TI.shape[0], weight_OI.shape[0])


@library_op(fake=_fake_linear)
def fp8_linear(x_TI: Tensor, weight_OI: Tensor, scale_SC: Tensor, bias_O: Tensor | None, block: bool) -> Tensor:
    """Return `op.fp8_linear` of activations that it rounds: by token, or in blocks of 128."""
    outputs, inputs = weight_OI.shape
    scales = (-(-outputs // 128), -(-inputs // 128)) if block else (outputs, 1)
    fits = x_TI.ndim == 2 and x_TI.shape[1] == inputs and scale_SC.shape == scales
    expect(fits, "fp8_linear", f"x [T, {inputs}] and scales {scales}", x_TI, scale_SC)
    weight = Fp8(weight_OI, scale_SC, None, IN_BLOCKS if block else BY_TOKEN)
    return chosen(FP8_LINEAR, x_TI)(x_TI, weight, bias_O).contiguous()

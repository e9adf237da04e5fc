"""Linear maps of a few tokens at the memory's rate, of many by the library. Legend: T tokens, I inputs, O outputs.

Where a gradient is wanted, torch's own kernels run: these have none. Programs that share a tile count their arrivals in
memory that all launches use, so the launches on one device belong on one stream.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.activation.triton import gated_activation
from ridgeline.kernels.gemm import native
from ridgeline.kernels.gemm.choose import Rows, Tiles, choose
from ridgeline.kernels.gemm.rows import rows_kernel
from ridgeline.kernels.gemm.tiles import tiles_kernel
from ridgeline.kernels.launch import INTERPRETED, launch_options
from ridgeline.kernels.norm.triton import rms_norm

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x · weightᵀ + bias: [T, O] in the dtype of `x_TI`; sums in float32."""
    outputs, inputs = weight_OI.shape
    plan = choose(len(x_TI), inputs, outputs)
    if plan is None or _needs_gradient(x_TI, weight_OI, bias_O) or not _packed(x_TI):
        return F.linear(x_TI, weight_OI, bias_O)
    return launch(plan, x_TI, None, None, 0.0, weight_OI, bias_O, None)[0]


def norm_linear(
    x_TI: Tensor,
    residual_TI: Tensor | None,
    norm_weight_I: Tensor,
    eps: float,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    gate: str | None,
) -> tuple[Tensor, Tensor]:
    """As `ridgeline.kernels.gemm.op.norm_linear`."""
    outputs, inputs = weight_OI.shape
    if _needs_gradient(x_TI, residual_TI, norm_weight_I, weight_OI, bias_O):
        return native.norm_linear(x_TI, residual_TI, norm_weight_I, eps, weight_OI, bias_O, gate)
    plan = choose(len(x_TI), inputs, outputs // 2 if gate else outputs, gated=gate is not None)
    if plan is None or not _packed(x_TI) or not _packed(residual_TI):
        n_TI, s_TI = rms_norm(x_TI, residual_TI, norm_weight_I, eps)
        y_TO = linear(n_TI, weight_OI, bias_O)
        return (gated_activation(y_TO, gate) if gate else y_TO), s_TI
    return launch(plan, x_TI, residual_TI, norm_weight_I, eps, weight_OI, bias_O, gate)


def launch(
    plan: Rows | Tiles,
    x_TI: Tensor,
    residual_TI: Tensor | None,
    norm_weight_I: Tensor | None,
    eps: float,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    gate: str | None,
) -> tuple[Tensor, Tensor]:
    """(y, s) by the kernel that `plan` names; without `norm_weight_I` no norm, and s is x."""
    tokens, inputs = x_TI.shape
    outputs = len(weight_OI) // 2 if gate else len(weight_OI)
    weight_OI = weight_OI.contiguous()
    y_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=x_TI.device)
    s_TI = x_TI if residual_TI is None else torch.empty(tokens, inputs, dtype=x_TI.dtype, device=x_TI.device)
    absent = x_TI  # any pointer: a kernel never looks at what its flags deny
    residual = absent if residual_TI is None else residual_TI
    norm_weight = absent if norm_weight_I is None else norm_weight_I
    bias = absent if bias_O is None else bias_O
    flags = {
        "NORM": norm_weight_I is not None,
        "RESIDUAL": residual_TI is not None,
        "BIAS": bias_O is not None,
        "GATE": gate or "",
        **launch_options(x_TI.device),
    }
    programs = triton.cdiv(outputs, plan.rows)
    cut = {"ROWS": plan.rows, "TOKENS": plan.tokens, "BLOCK": plan.block}
    strides = x_TI.stride(0), residual.stride(0)
    # The interpreter multiplies the raw bits of bfloat16
    operands = torch.float32 if INTERPRETED and x_TI.dtype == torch.bfloat16 else x_TI.dtype
    if isinstance(plan, Rows):
        rows_kernel[(programs,)](
            x_TI, residual, norm_weight, weight_OI, bias, y_TO, s_TI, *strides, tokens, outputs, eps, inputs=inputs,
            num_warps=plan.warps, **cut, **flags,
        )  # fmt: skip
        return y_TO, s_TI
    parts, arrivals = absent, absent
    if plan.split > 1:
        size = programs * plan.split * (2 * plan.rows + 1) * plan.tokens
        parts = torch.empty(size, dtype=torch.float32, device=x_TI.device)
        arrivals = _arrivals(x_TI.device)
        assert programs <= len(arrivals)
    tiles_kernel[(programs, plan.split)](
        x_TI, residual, norm_weight, weight_OI, bias, y_TO, s_TI, parts, arrivals, *strides, tokens, outputs, inputs,
        eps, STAGES=plan.stages, SPLIT=plan.split, AHEAD=plan.ahead, WHOLE=inputs % (plan.block * plan.split) == 0,
        DOT=_DTYPES[operands], num_warps=plan.warps, **cut, **flags,
    )  # fmt: skip
    return y_TO, s_TI


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _packed(x_TI: Tensor | None) -> bool:
    return x_TI is None or x_TI.stride(-1) == 1


@cache
def _arrivals(device: torch.device) -> Tensor:
    """One counter per tile, zero between launches. Made by the first eager launch, so before any graph is captured."""
    return torch.zeros(16_384, dtype=torch.int32, device=device)

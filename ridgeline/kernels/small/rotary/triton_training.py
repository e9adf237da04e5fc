"""Rotation of heads with gradients, in one kernel each for queries and keys. A gradient rotates back. The legend is
that of op.py, and N is the heads of a tensor."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.rooms import roomy
from ridgeline.kernels.small.rotary.triton_heads import cut, rotate_rows


@triton.jit
def _training_rotation(
    x_ptr, cos_sin_ptr, positions_ptr, y_ptr, tokens, x_token, x_head, y_token, y_head,
    N: tl.constexpr, D: tl.constexpr, Y: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of ROWS rows [token, head]. BACK: by the angles' negatives."""
    rotate_rows(
        x_ptr, cos_sin_ptr, positions_ptr, y_ptr, tl.program_id(0), tokens, x_token, x_head, y_token, y_head,
        N, D, Y, ROWS, HALF, REST, BACK,
    )  # fmt: skip


def _launch(
    x_TND: Tensor, cos_sin_ZY: Tensor, positions_T: Tensor, *, back: bool, into_TND: Tensor | None = None
) -> Tensor:
    x_TND = x_TND if x_TND.stride(-1) == 1 else x_TND.contiguous()
    (tokens, heads, width), rotated = x_TND.shape, cos_sin_ZY.shape[-1]
    y_TND = into_TND
    if y_TND is None:
        y_TND = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    rows, half, rest = cut(width, rotated)
    _training_rotation[(triton.cdiv(tokens * heads, rows),)](
        x_TND, cos_sin_ZY, positions_T, y_TND, tokens, *x_TND.stride()[:2], *y_TND.stride()[:2],
        N=heads, D=width, Y=rotated, ROWS=rows, HALF=half, REST=rest, BACK=back, num_warps=4,
    )  # fmt: skip
    return y_TND


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TND: Tensor, cos_sin_ZY: Tensor, positions_T: Tensor) -> Tensor:
        ctx.save_for_backward(cos_sin_ZY, positions_T)
        return _launch(x_TND, cos_sin_ZY, positions_T, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TND: Tensor) -> tuple[Tensor, None, None]:
        return _launch(dy_TND, *ctx.saved_tensors, back=True), None, None


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TX: Tensor, cos_sin_ZY: Tensor, positions_T: Tensor, heads: int, kv_heads: int, width: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos_sin_ZY, positions_T)
        ctx.shape = qkv_TX.shape
        q_THD, k_TGD, v_TGD = qkv_TX.unflatten(-1, (-1, width)).split((heads, kv_heads, kv_heads), 1)
        q_THD, k_TGD = (_launch(x, cos_sin_ZY, positions_T, back=False) for x in (q_THD, k_TGD))
        return q_THD, k_TGD, v_TGD.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_THD: Tensor, dk_TGD: Tensor, dv_TGD: Tensor) -> tuple[Tensor | None, ...]:
        heads, kv_heads, width = dq_THD.shape[1], dk_TGD.shape[1], dq_THD.shape[2]
        dqkv_TX = roomy(ctx.shape, dq_THD.dtype, dq_THD.device)
        q_THD, k_TGD, v_TGD = dqkv_TX.unflatten(-1, (-1, width)).split((heads, kv_heads, kv_heads), 1)
        angles = ctx.saved_tensors  # once: where layers run again, it may not be asked for twice
        _launch(dq_THD, *angles, back=True, into_TND=q_THD)
        _launch(dk_TGD, *angles, back=True, into_TND=k_TGD)
        v_TGD.copy_(dv_TGD)
        return dqkv_TX, None, None, None, None, None


@torch.compiler.disable  # a break in the graph: what is compiled ends here, and goes on behind it
def rotated_heads(
    qkv_TX: Tensor, cos_sin_ZY: Tensor, positions_T: Tensor, heads: int, kv_heads: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [T, H, D] and keys [T, G, D] of a fused projection, rotated, and values [T, G, D], dense; with a
    gradient that is written in one piece."""
    q_THD, k_TGD, v_TGD = _Heads.apply(qkv_TX, cos_sin_ZY, positions_T, heads, kv_heads, width)
    return q_THD, k_TGD, v_TGD


@torch.compiler.disable  # a break in the graph: what is compiled ends here, and goes on behind it
def rope(q_THD: Tensor, k_TGD: Tensor, cos_sin_ZY: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `op.rope`, with gradients of queries and keys."""
    q_THD = _Rotated.apply(q_THD, cos_sin_ZY, positions_T)
    k_TGD = _Rotated.apply(k_TGD, cos_sin_ZY, positions_T)
    return q_THD, k_TGD


AOT = (
    AotKernel(
        _training_rotation,
        {"x_ptr": "*bf16", "cos_sin_ptr": "*fp32", "positions_ptr": "*i64", "y_ptr": "*bf16", "tokens": "i32"}
        | dict.fromkeys(("x_token", "x_head", "y_token", "y_head"), "i32:16"),
        {"N": 32, "D": 64, "Y": 64, "ROWS": 32, "HALF": 32, "REST": 0, "BACK": True},
        num_warps=4,
        archs=ONE_OF_EACH,
    ),
)

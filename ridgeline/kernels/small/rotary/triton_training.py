"""Rotation of heads with gradients: in one kernel for queries, keys and values of a projection, in one each for tensors
that came apart. A gradient rotates back. The legend is that of op.py, and N is the heads of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
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


def _launch(x_TND: Tensor, cos_sin_ZY: Tensor, positions_T: Tensor, *, back: bool) -> Tensor:
    x_TND = x_TND if x_TND.stride(-1) == 1 else x_TND.contiguous()
    (tokens, heads, width), rotated = x_TND.shape, cos_sin_ZY.shape[-1]
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


@triton.jit
def _training_heads(
    q_ptr, k_ptr, v_ptr, cos_sin_ptr, positions_ptr, q_to_ptr, k_to_ptr, v_to_ptr, tokens, q_tiles, k_tiles,
    q_token, q_head, k_token, k_head, v_token, v_head, q_to_token, q_to_head, k_to_token, k_to_head, v_to_token,
    v_to_head, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, Y: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of queries in the first q_tiles programs, those of keys in the next k_tiles, and copy those of
    values in the others."""
    tile = tl.program_id(0)
    if tile < q_tiles:
        rotate_rows(
            q_ptr, cos_sin_ptr, positions_ptr, q_to_ptr, tile, tokens, q_token, q_head, q_to_token, q_to_head,
            H, D, Y, ROWS, HALF, REST, BACK,
        )  # fmt: skip
    elif tile < q_tiles + k_tiles:
        rotate_rows(
            k_ptr, cos_sin_ptr, positions_ptr, k_to_ptr, tile - q_tiles, tokens, k_token, k_head, k_to_token, k_to_head,
            G, D, Y, ROWS, HALF, REST, BACK,
        )  # fmt: skip
    else:
        row = (tile - q_tiles - k_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        token, head = row // G, row % G
        column = tl.arange(0, WIDTH)[None, :]
        there = (token < tokens) & (column < D)
        value = tl.load(v_ptr + token * v_token + head * v_head + column, mask=there, other=0)
        tl.store(v_to_ptr + token * v_to_token + head * v_to_head + column, value, mask=there)


def _launch_heads(
    given: Sequence[Tensor], cos_sin_ZY: Tensor, positions_T: Tensor, into: Sequence[Tensor], *, back: bool
) -> None:
    """Write queries, keys and values into others, the first two rotated."""
    given = [x if x.stride(-1) == 1 else x.contiguous() for x in given]
    (tokens, heads, width), kv_heads, rotated = given[0].shape, given[1].shape[1], cos_sin_ZY.shape[-1]
    rows, half, rest = cut(width, rotated)
    q_tiles, k_tiles = (triton.cdiv(tokens * each, rows) for each in (heads, kv_heads))
    _training_heads[(q_tiles + 2 * k_tiles,)](
        *given, cos_sin_ZY, positions_T, *into, tokens, q_tiles, k_tiles,
        *(step for x in (*given, *into) for step in x.stride()[:2]),
        H=heads, G=kv_heads, D=width, Y=rotated, ROWS=rows, HALF=half, REST=rest,
        WIDTH=triton.next_power_of_2(width), BACK=back, num_warps=4,
    )  # fmt: skip


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TX: Tensor, cos_sin_ZY: Tensor, positions_T: Tensor, heads: int, kv_heads: int, width: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos_sin_ZY, positions_T)
        ctx.shape = qkv_TX.shape
        given = qkv_TX.unflatten(-1, (-1, width)).split((heads, kv_heads, kv_heads), 1)
        into = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given]
        _launch_heads(given, cos_sin_ZY, positions_T, into, back=False)
        return tuple(into)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq_THD: Tensor, dk_TGD: Tensor, dv_TGD: Tensor) -> tuple[Tensor | None, ...]:
        heads, kv_heads, width = dq_THD.shape[1], dk_TGD.shape[1], dq_THD.shape[2]
        dqkv_TX = roomy(ctx.shape, dq_THD.dtype, dq_THD.device)
        into = dqkv_TX.unflatten(-1, (-1, width)).split((heads, kv_heads, kv_heads), 1)
        cos_sin_ZY, positions_T = ctx.saved_tensors
        _launch_heads((dq_THD, dk_TGD, dv_TGD), cos_sin_ZY, positions_T, into, back=True)
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


_STRIDES = [f"{x}_{of}" for x in ("q", "k", "v", "q_to", "k_to", "v_to") for of in ("token", "head")]
AOT = (
    AotKernel(
        _training_rotation,
        {"x_ptr": "*bf16", "cos_sin_ptr": "*fp32", "positions_ptr": "*i64", "y_ptr": "*bf16", "tokens": "i32"}
        | dict.fromkeys(("x_token", "x_head", "y_token", "y_head"), "i32:16"),
        {"N": 32, "D": 64, "Y": 64, "ROWS": 32, "HALF": 32, "REST": 0, "BACK": True},
        num_warps=4,
        archs=ONE_OF_EACH,
    ),
    AotKernel(
        _training_heads,
        dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_to_ptr", "k_to_ptr", "v_to_ptr"), "*bf16")
        | {"cos_sin_ptr": "*fp32", "positions_ptr": "*i64"}
        | dict.fromkeys(("tokens", "q_tiles", "k_tiles"), "i32")
        | dict.fromkeys(_STRIDES, "i32:16"),
        {"H": 32, "G": 8, "D": 64, "Y": 64, "ROWS": 32, "HALF": 32, "REST": 0, "WIDTH": 64, "BACK": True},
        num_warps=4,
        archs=ONE_OF_EACH,
    ),
)

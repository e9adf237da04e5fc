"""The rotation of queries and keys that no cache takes, as in towers and encoders: one launch for both. The legend is
that of op.py, and N is the heads of a tensor."""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.small.rotary import op

TILE = 2048  # numbers of a program


@triton.jit
def rotate_rows(
    x_ptr, cos_sin_ptr, positions_ptr, y_ptr, tile, tokens, x_token, x_head, y_token, y_head, N: tl.constexpr,
    D: tl.constexpr, Y: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS rows [token, head]. BACK: by the angles' negatives, as gradients are."""
    half: tl.constexpr = Y // 2
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = row // N, row % N
    here = token < tokens
    column = tl.arange(0, HALF)[None, :]
    mask = here & (column < half)
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token, mask=here, other=0).to(tl.int64) * Y
    cos = tl.load(angle_ptr + column, mask=mask, other=0)
    sin = tl.load(angle_ptr + half + column, mask=mask, other=0)
    if BACK:
        sin = -sin
    at, to = x_ptr + token * x_token + head * x_head, y_ptr + token * y_token + head * y_head
    dtype = y_ptr.dtype.element_ty
    a = tl.load(at + column, mask=mask, other=0).to(tl.float32)
    b = tl.load(at + half + column, mask=mask, other=0).to(tl.float32)
    tl.store(to + column, (a * cos - b * sin).to(dtype), mask=mask)
    tl.store(to + half + column, (b * cos + a * sin).to(dtype), mask=mask)
    if REST > 0:
        rest = Y + tl.arange(0, REST)[None, :]
        kept = here & (rest < D)
        tl.store(to + rest, tl.load(at + rest, mask=kept, other=0), mask=kept)


@triton.jit(do_not_specialize=["tokens", "q_tiles"])
def _rope(
    q_ptr, k_ptr, cos_sin_ptr, positions_ptr, q_out_ptr, k_out_ptr, tokens, q_tiles, q_token, q_head, k_token, k_head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, Y: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `rope`. The first q_tiles programs have queries. APART: strides count so many numbers, since Triton sees
    of a stride only whether 16 divides it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    if tile < q_tiles:
        rotate_rows(
            q_ptr, cos_sin_ptr, positions_ptr, q_out_ptr, tile, tokens, q_token * APART, q_head * APART, H * D, D,
            H, D, Y, ROWS, HALF, REST, False,
        )  # fmt: skip
    else:
        rotate_rows(
            k_ptr, cos_sin_ptr, positions_ptr, k_out_ptr, tile - q_tiles, tokens, k_token * APART, k_head * APART,
            G * D, D, G, D, Y, ROWS, HALF, REST, False,
        )  # fmt: skip


def rope(q_THD: Tensor, k_TGD: Tensor, cos_sin_ZY: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `op.rope`. If a gradient is wanted, torch's own kernels run, since this has none."""
    if torch.is_grad_enabled() and (q_THD.requires_grad or k_TGD.requires_grad):
        return op.rope(q_THD, k_TGD, cos_sin_ZY, positions_T)
    (tokens, heads, width), kv_heads, rotated = q_THD.shape, k_TGD.shape[1], cos_sin_ZY.shape[1]
    q_THD, k_TGD = (x if x.stride(2) == 1 else x.contiguous() for x in (q_THD, k_TGD))
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_TGD))
    if not tokens:
        return q_out, k_out
    strides = *q_THD.stride()[:2], *k_TGD.stride()[:2]
    apart, rows, half, rest = gcd(16, *strides), *cut(width, rotated)
    q_tiles, k_tiles = (triton.cdiv(tokens * each, rows) for each in (heads, kv_heads))
    _rope[(q_tiles + k_tiles,)](
        q_THD, k_TGD, cos_sin_ZY.contiguous(), positions_T, q_out, k_out, tokens, q_tiles,
        *(stride // apart for stride in strides),
        H=heads, G=kv_heads, D=width, Y=rotated, ROWS=rows, HALF=half, REST=rest, APART=apart,
        num_warps=4, **launch_options(q_THD.device),
    )  # fmt: skip
    return q_out, k_out


def cut(width: int, rotated: int) -> tuple[int, int, int]:
    """Return (ROWS, HALF, REST): powers of two that cover the rows of a program, the pairs that rotate, and the other
    numbers of a head (0: there are none)."""
    half = triton.next_power_of_2(max(1, rotated // 2))
    return max(1, TILE // (2 * half)), half, triton.next_power_of_2(width - rotated) if rotated < width else 0


def _aot(heads: int, width: int) -> AotKernel:
    signature = {f"{name}_ptr": "*bf16" for name in ("q", "k", "q_out", "k_out")}
    signature |= {"cos_sin_ptr": "*fp32", "positions_ptr": "*i64", "tokens": "i32", "q_tiles": "i32"}
    signature |= dict.fromkeys(("q_token", "q_head", "k_token", "k_head"), "i32")
    rows, half, rest = cut(width, width)
    constants = {
        "H": heads, "G": heads, "D": width, "Y": width, "ROWS": rows, "HALF": half, "REST": rest,
        "APART": gcd(16, width),
    }  # fmt: skip
    return AotKernel(_rope, signature, constants, num_warps=4, hot=True, archs=ONE_OF_EACH)


AOT = (_aot(16, 72), _aot(16, 80))

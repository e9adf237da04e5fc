"""The selective scan token by token: one program has the states of some channels in registers, and goes through the
tokens of one row.

It serves rows of one token, whose cost is reading and writing the state, and `batch_invariant`. The legend is that of
op.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.launch import launch_options
from ridgeline.kernels.triton_math import silu, softplus
from ridgeline.kernels.turns import Turns

Rows = Literal["each", "single", "all"]  # all rows, which have one token each; those of one token; all


@dataclass(frozen=True)
class Walk:
    """The cut of the kernel: a program has `numbers` of the states."""

    numbers: int = 4096
    warps: int = 4


@triton.jit
def _walk(
    x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, skip_ptr, bias_ptr, z_ptr, y_ptr, states_ptr,
    start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr,
    x_token, dt_token, b_token, c_token, z_token, block_size,
    X: tl.constexpr, S: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run the tokens of row `program_id(1)` through BLOCK_X channels."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    channel = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    s = tl.arange(0, BLOCK_S)
    in_x = channel < X
    in_s = s < S
    inside = in_x[:, None] & in_s[None, :]
    place = channel[:, None] * S + s[None, :]
    rate = tl.load(rate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    skip = tl.load(skip_ptr + channel, mask=in_x, other=0.0).to(tl.float32)
    bias = tl.zeros((BLOCK_X,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=in_x, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1)
    if ROWS == "each":
        first, length = row, 1
    else:
        first = tl.load(start_ptr + row)
        length = tl.load(start_ptr + row + 1) - first
        if length <= 0 or (ROWS == "single" and length > 1):
            return
    mark = tl.load(marks_ptr + row)
    old = tl.load(reads_ptr + row) * block_size
    held = S * (1 - tl.load(fresh_ptr + row).to(tl.int32))  # nothing of a fresh row's state is read
    state = tl.load(states_ptr + old + place, mask=in_x[:, None] & (s < held)[None, :], other=0.0)
    for i in range(length):
        token = (first + i).to(tl.int64)
        x = tl.load(x_ptr + token * x_token + channel, mask=in_x, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + token * dt_token + channel, mask=in_x, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + token * b_token + s, mask=in_s, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + token * c_token + s, mask=in_s, other=0.0).to(tl.float32)
        step = softplus(dt + bias)
        state = state * tl.exp(step[:, None] * rate) + (step * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1) + skip * x
        if z_ptr is not None:
            y *= silu(tl.load(z_ptr + token * z_token + channel, mask=in_x, other=0.0).to(tl.float32))
        tl.store(y_ptr + token * X + channel, y.to(y_ptr.dtype.element_ty), mask=in_x)
        if i + 1 == mark:
            marked = tl.load(marked_ptr + row) * block_size
            tl.store(states_ptr + marked + place, state, mask=inside)
    new = tl.load(writes_ptr + row) * block_size
    tl.store(states_ptr + new + place, state, mask=inside)


def walk(
    x_TX: Tensor,
    dt_TX: Tensor,
    rate_XS: Tensor,
    b_TS: Tensor,
    c_TS: Tensor,
    skip_X: Tensor,
    dt_bias_X: Tensor | None,
    z_TX: Tensor | None,
    states_NXS: Tensor,
    turns: Turns,
    y_TX: Tensor,
    rows: Rows,
    cut: Walk | None = None,
) -> None:
    """Write the outputs of these rows to `y_TX`, and replace their states."""
    channels, size = rate_XS.shape
    block_x, block_s, warps = blocks(channels, size, cut or Walk())
    _walk[(triton.cdiv(channels, block_x), turns.num_rows)](
        x_TX, dt_TX, rate_XS, b_TS, c_TS, skip_X, dt_bias_X, z_TX, y_TX, states_NXS,
        turns.start_R1, turns.reads_R, turns.writes_R, turns.fresh_R.view(torch.uint8), turns.marks_R, turns.marked_R,
        x_TX.stride(0), dt_TX.stride(0), b_TS.stride(0), c_TS.stride(0), 0 if z_TX is None else z_TX.stride(0),
        states_NXS.stride(0), X=channels, S=size, BLOCK_X=block_x, BLOCK_S=block_s, ROWS=rows,
        num_warps=warps, **launch_options(x_TX.device),
    )  # fmt: skip


def blocks(channels: int, size: int, cut: Walk) -> tuple[int, int, int]:
    """Return (BLOCK_X, BLOCK_S, warps)."""
    block_s = triton.next_power_of_2(size)
    return max(1, min(triton.next_power_of_2(channels), cut.numbers // block_s)), block_s, cut.warps


def signature(kernel: triton.JITFunction, constants: dict[str, object]) -> dict[str, str]:
    """Return the types of a kernel's arguments in a model whose activations are bf16."""
    types = dict.fromkeys(kernel.arg_names, "i32:16")
    types |= dict.fromkeys(("x_ptr", "dt_ptr", "b_ptr", "c_ptr", "z_ptr", "y_ptr"), "*bf16")
    types |= dict.fromkeys(("rate_ptr", "skip_ptr", "bias_ptr", "states_ptr"), "*fp32")
    types |= dict.fromkeys(("start_ptr", "marks_ptr"), "*i32") | {"fresh_ptr": "*u8"}
    types |= dict.fromkeys(("reads_ptr", "writes_ptr", "marked_ptr"), "*i64")
    return {name: kind for name, kind in types.items() if name not in (*constants, "PDL")}


def _aot(rows: Rows) -> AotKernel:
    block_x, block_s, warps = blocks(8192, 16, Walk())
    constants: dict[str, object] = {"X": 8192, "S": 16, "BLOCK_X": block_x, "BLOCK_S": block_s, "ROWS": rows}
    return AotKernel(_walk, signature(_walk, constants), constants, num_warps=warps, hot=True, archs=ONE_OF_EACH)


AOT = (_aot("each"), _aot("single"), _aot("all"))

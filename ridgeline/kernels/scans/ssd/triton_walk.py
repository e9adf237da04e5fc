"""Mamba-2's recurrence token by token: one program has some numbers of a head's state in registers, and goes through
the tokens of one row.

It serves rows of one token, whose cost is reading and writing the state, and `batch_invariant`. The legend is that of
op.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.base.triton_math import softplus
from ridgeline.kernels.scans.metadata import ROW_TYPES, ScanMetadata
from ridgeline.kernels.scans.ssd.op import SsdInputs

Rows = Literal["each", "single", "all"]  # all rows, which have one token each; those of one token; all


@dataclass(frozen=True)
class Walk:
    """The cut of the kernel: a program has `numbers` of a state."""

    numbers: int = 4096
    warps: int = 4


@triton.jit
def _walk(
    x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, skip_ptr, bias_ptr, y_ptr, states_ptr,
    start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr,
    x_token, dt_token, b_token, c_token, block_size, share, dt_min, dt_max,
    H: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run the tokens of row `program_id(1)` through BLOCK_P of a head's P x S numbers."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    parts: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    head = tl.program_id(0) // parts
    p = tl.program_id(0) % parts * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    rate = tl.load(rate_ptr + head).to(tl.float32)
    skip = tl.load(skip_ptr + head).to(tl.float32)
    bias = tl.load(bias_ptr + head).to(tl.float32)
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
    place = head * P * S + p[:, None] * S + s[None, :]
    inside = (p < P)[:, None] & (s < S)[None, :]
    old = tl.load(reads_ptr + row) * block_size
    held = S * (1 - tl.load(fresh_ptr + row).to(tl.int32))  # nothing of a fresh row's state is read
    state = tl.load(states_ptr + old + place, mask=(p < P)[:, None] & (s < held)[None, :], other=0.0)
    group = head // share
    for i in range(length):
        token = (first + i).to(tl.int64)
        x = tl.load(x_ptr + token * x_token + head * P + p, mask=p < P, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + token * b_token + group * S + s, mask=s < S, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + token * c_token + group * S + s, mask=s < S, other=0.0).to(tl.float32)
        step = softplus(tl.load(dt_ptr + token * dt_token + head).to(tl.float32) + bias)
        step = tl.minimum(tl.maximum(step, dt_min), dt_max)
        state = state * tl.exp(step * rate) + (step * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1) + skip * x
        tl.store(y_ptr + (token * H + head) * P + p, y.to(y_ptr.dtype.element_ty), mask=p < P)
        if i + 1 == mark:
            marked = tl.load(marked_ptr + row) * block_size
            tl.store(states_ptr + marked + place, state, mask=inside)
    new = tl.load(writes_ptr + row) * block_size
    tl.store(states_ptr + new + place, state, mask=inside)


def walk(
    given: SsdInputs, states_NHPS: Tensor, metadata: ScanMetadata, y_THP: Tensor, rows: Rows, cut: Walk | None = None
) -> None:
    """Write the outputs of these rows to `y_THP`, and replace their states."""
    x_THP, dt_TH, b_TGS, c_TGS = given.x_THP, given.dt_TH, given.b_TGS, given.c_TGS
    (_, heads, width), size = x_THP.shape, b_TGS.shape[2]
    block_p, block_s, warps = blocks(width, size, cut or Walk())
    _walk[(heads * triton.cdiv(width, block_p), metadata.num_rows)](
        x_THP, dt_TH, given.rate_H, b_TGS, c_TGS, given.skip_H, given.dt_bias_H, y_THP, states_NHPS, *metadata.of_rows,
        x_THP.stride(0), dt_TH.stride(0), b_TGS.stride(0), c_TGS.stride(0), states_NHPS.stride(0),
        given.share, given.dt_min, given.dt_max, H=heads, P=width, S=size, BLOCK_P=block_p, BLOCK_S=block_s, ROWS=rows,
        num_warps=warps, **launch_options(y_THP.device),
    )  # fmt: skip


def blocks(width: int, size: int, cut: Walk) -> tuple[int, int, int]:
    """Return (BLOCK_P, BLOCK_S, warps)."""
    block_s = triton.next_power_of_2(size)
    return max(1, min(triton.next_power_of_2(width), cut.numbers // block_s)), block_s, cut.warps


def _aot(rows: Rows) -> AotKernel:
    names = ("x_ptr", "dt_ptr", "b_ptr", "c_ptr", "y_ptr")
    signature = dict.fromkeys(_walk.arg_names, "i32:16") | dict.fromkeys(names, "*bf16")
    signature |= dict.fromkeys(("rate_ptr", "skip_ptr", "bias_ptr", "states_ptr"), "*fp32")
    signature |= ROW_TYPES | {"share": "i32"} | dict.fromkeys(("dt_min", "dt_max"), "fp32")
    block_p, block_s, warps = blocks(64, 128, Walk())
    constants = {"H": 128, "P": 64, "S": 128, "BLOCK_P": block_p, "BLOCK_S": block_s, "ROWS": rows}
    types = {name: kind for name, kind in signature.items() if name not in (*constants, "PDL")}
    return AotKernel(_walk, types, constants, num_warps=warps, hot=True, archs=ONE_OF_EACH)


AOT = (_aot("each"), _aot("single"), _aot("all"))

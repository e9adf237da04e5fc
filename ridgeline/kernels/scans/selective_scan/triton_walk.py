"""The selective scan token by token: one program has the states of some channels in registers, and goes through the
tokens of one row.

Exponentials are the bottleneck of long rows, one for each token, channel and number of its state: an H200 needs 0.29 ms
for those of 8,192 tokens of 8,192 channels with 16 numbers each, and 0.12 ms for the bytes. The channels of one row are
a thousand warps, so rows are not divided. A program asks for several tokens at once, because it has no work while it
waits for memory, and is one warp, because warps need not wait for one another. For rows of one token the cost is
reading and writing the state. The legend is that of op.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal  # noqa: F401 (Any stands in comments)

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.base.triton_math import silu, softplus
from ridgeline.kernels.scans.metadata import ROW_TYPES, ScanMetadata
from ridgeline.kernels.scans.selective_scan.op import ScanInputs

Rows = Literal["each", "single", "all"]  # all rows, which have one token each; those of one token; all


@dataclass(frozen=True)
class Walk:
    """The cut of the kernel: a program has `numbers` of the states, and asks for `ahead` tokens at once. A
    channel's state is in pieces of `part` numbers, of which a thread has four."""

    numbers: int = 4096
    warps: int = 4
    ahead: int = 1
    part: int = 16


SHORT, LONG = Walk(), Walk(256, 1, 4, part=8)


@triton.jit
def _ask(
    x_ptr, dt_ptr, b_ptr, c_ptr, z_ptr, x_token, dt_token, b_token, c_token, z_token, first, behind, channel, s, in_x,
    S: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return the inputs of AHEAD tokens from `first` on: (x, dt, z, then b and c of each part) each. Tokens from
    `behind` on are zeros."""
    asked = ()  # type: Any
    end = tl.where(in_x, behind, first)
    for j in tl.static_range(AHEAD):
        token = tl.cast(first + j, tl.int64)
        exists = first + j < end
        x = tl.load(x_ptr + token * x_token + channel, mask=exists, other=0.0)
        dt = tl.load(dt_ptr + token * dt_token + channel, mask=exists, other=0.0)
        z = x
        if z_ptr is not None:
            z = tl.load(z_ptr + token * z_token + channel, mask=exists, other=0.0)
        asked = asked + (x, dt, z)  # noqa: RUF005 (the form that Triton knows)
        for part in tl.static_range(PARTS):
            number = s + part * (s.shape[0])
            inside = first + j < tl.where(number < S, behind, first)
            b = tl.load(b_ptr + token * b_token + number, mask=inside, other=0.0)
            c = tl.load(c_ptr + token * c_token + number, mask=inside, other=0.0)
            asked = asked + (b, c)  # noqa: RUF005
    return asked


@triton.jit
def _walk(
    x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, skip_ptr, bias_ptr, z_ptr, y_ptr, states_ptr,
    start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr,
    x_token, dt_token, b_token, c_token, z_token, block_size,
    X: tl.constexpr, S: tl.constexpr, BLOCK_X: tl.constexpr, PART_S: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run the tokens of row `program_id(1)` through BLOCK_X channels, whose states are PARTS pieces of PART_S."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    channel = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    s = tl.arange(0, PART_S)
    in_x = channel < X
    rates = ()  # type: Any
    for part in tl.static_range(PARTS):
        number = s + part * PART_S
        inside = in_x[:, None] & (number < S)[None, :]
        rate = tl.load(rate_ptr + channel[:, None] * S + number[None, :], mask=inside, other=0.0).to(tl.float32)
        rates = rates + (rate * 1.4426950408889634,)  # noqa: RUF005 (powers of 2 are fewer instructions than those of e)
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
    held = S * (1 - tl.load(fresh_ptr + row).to(tl.int32))  # nothing of a fresh row's state is read
    place = channel[:, None] * S + s[None, :]
    old = tl.load(reads_ptr + row) * block_size
    states = ()  # type: Any
    for part in tl.static_range(PARTS):
        exists = in_x[:, None] & (s + part * PART_S < held)[None, :]
        state = tl.load(states_ptr + old + place + part * PART_S, mask=exists, other=0.0)
        states = states + (state,)  # noqa: RUF005
    begin = first + mark * 0
    for span in range(2):  # to the mark, and from there on
        behind = first + tl.where(span == 0, mark, length)
        end = tl.where(in_x, behind, begin)
        asked = _ask(
            x_ptr, dt_ptr, b_ptr, c_ptr, z_ptr, x_token, dt_token, b_token, c_token, z_token,
            begin, behind, channel, s, in_x, S, PARTS, AHEAD,
        )  # fmt: skip
        for now in range(begin, behind, AHEAD):
            given = asked
            asked = _ask(
                x_ptr, dt_ptr, b_ptr, c_ptr, z_ptr, x_token, dt_token, b_token, c_token, z_token,
                now + AHEAD, behind, channel, s, in_x, S, PARTS, AHEAD,
            )  # fmt: skip
            for j in tl.static_range(AHEAD):
                x = given[j * (3 + 2 * PARTS)].to(tl.float32)
                step = softplus(given[j * (3 + 2 * PARTS) + 1].to(tl.float32) + bias)
                step = tl.where(now + j < end, step, 0.0)  # behind the end nothing changes
                y = skip * x
                news = ()  # type: Any
                for part in tl.static_range(PARTS):
                    b = given[j * (3 + 2 * PARTS) + 3 + 2 * part].to(tl.float32)
                    c = given[j * (3 + 2 * PARTS) + 4 + 2 * part].to(tl.float32)
                    left = tl.exp2(step[:, None] * rates[part])
                    state = states[part] * left + (step * x)[:, None] * b[None, :]
                    y += tl.sum(state * c[None, :], 1)
                    news = news + (state,)  # noqa: RUF005
                states = news
                if z_ptr is not None:
                    y *= silu(given[j * (3 + 2 * PARTS) + 2].to(tl.float32))
                token = tl.cast(now + j, tl.int64)
                tl.store(y_ptr + token * X + channel, y.to(y_ptr.dtype.element_ty), mask=now + j < end)
        if (span == 0) & (mark > 0):
            marked = tl.load(marked_ptr + row) * block_size
            for part in tl.static_range(PARTS):
                inside = in_x[:, None] & (s + part * PART_S < S)[None, :]
                tl.store(states_ptr + marked + place + part * PART_S, states[part], mask=inside)
        begin = behind
    new = tl.load(writes_ptr + row) * block_size
    for part in tl.static_range(PARTS):
        inside = in_x[:, None] & (s + part * PART_S < S)[None, :]
        tl.store(states_ptr + new + place + part * PART_S, states[part], mask=inside)


def walk(
    given: ScanInputs, states_NXS: Tensor, metadata: ScanMetadata, y_TX: Tensor, rows: Rows, cut: Walk = SHORT
) -> None:
    """Write the outputs of these rows to `y_TX`, and replace their states."""
    channels, size = given.rate_XS.shape
    block_x, part_s, parts = blocks(channels, size, cut)
    _walk[(triton.cdiv(channels, block_x), metadata.num_rows)](
        *arguments(given, y_TX, states_NXS, metadata), *strides(given), states_NXS.stride(0),
        X=channels, S=size, BLOCK_X=block_x, PART_S=part_s, PARTS=parts,
        AHEAD=cut.ahead, ROWS=rows, num_warps=cut.warps, **launch_options(y_TX.device),
    )  # fmt: skip


def arguments(given: ScanInputs, y_TX: Tensor, states_NXS: Tensor, metadata: ScanMetadata) -> tuple[Tensor | None, ...]:
    """Return the tensors that both kernels take."""
    return (
        given.x_TX, given.dt_TX, given.rate_XS, given.b_TS, given.c_TS, given.skip_X, given.dt_bias_X, given.z_TX,
        y_TX, states_NXS, *metadata.of_rows,
    )  # fmt: skip


def strides(given: ScanInputs) -> list[int]:
    """Return the strides by token of x, dt, b, c and z; 0 for z if there is none."""
    return [0 if x is None else x.stride(0) for x in (given.x_TX, given.dt_TX, given.b_TS, given.c_TS, given.z_TX)]


def blocks(channels: int, size: int, cut: Walk) -> tuple[int, int, int]:
    """Return (BLOCK_X, PART_S, PARTS)."""
    block_s = triton.next_power_of_2(size)
    part_s = min(block_s, cut.part)
    return max(1, min(triton.next_power_of_2(channels), cut.numbers // block_s)), part_s, block_s // part_s


def signature(kernel: triton.JITFunction, constants: dict[str, object]) -> dict[str, str]:
    """Return the types of a kernel's arguments in a model whose activations are bf16."""
    types = dict.fromkeys(kernel.arg_names, "i32:16")
    types |= dict.fromkeys(("x_ptr", "dt_ptr", "b_ptr", "c_ptr", "z_ptr", "y_ptr"), "*bf16")
    types |= dict.fromkeys(("rate_ptr", "skip_ptr", "bias_ptr", "states_ptr"), "*fp32")
    types |= ROW_TYPES
    return {name: kind for name, kind in types.items() if name not in (*constants, "PDL")}


def _aot(rows: Rows, cut: Walk = SHORT) -> AotKernel:
    block_x, part_s, parts = blocks(8192, 16, cut)
    constants: dict[str, object] = {"X": 8192, "S": 16, "BLOCK_X": block_x, "PART_S": part_s, "PARTS": parts}
    constants |= {"AHEAD": cut.ahead, "ROWS": rows}
    return AotKernel(_walk, signature(_walk, constants), constants, num_warps=cut.warps, hot=True, archs=ONE_OF_EACH)


AOT = (_aot("each"), _aot("all", LONG), _aot("all"))

"""The selective scan of long rows: one program takes a row through some channels, several tokens at once.

Exponentials are the bottleneck, one for each token, channel and number of its state: an H200 needs 0.29 ms for those of
8,192 tokens of 8,192 channels with 16 numbers each, and 0.12 ms for the bytes. Channels of one row already fill the GPU
with programs that are bound by arithmetic, and a row in several parts would need each exponential twice. So rows are
not divided.

Each thread has all tokens of a tile for its numbers, so a scan over the tokens stays in registers. A warp has channels
side by side, and the warps share the numbers of their states, which they add up once for a tile. The legend is that of
op.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.launch import launch_options
from ridgeline.kernels.selective_scan.triton_walk import signature
from ridgeline.kernels.triton_math import silu, softplus
from ridgeline.kernels.turns import Turns

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """The cut of the kernel: a program takes `tokens` of `numbers` states at once."""

    tokens: int = 8
    numbers: int = 512
    warps: int = 4
    stages: int = 3


@triton.jit
def _then(left1, sum1, left2, sum2):
    """Return what two spans of tokens do to a state: how much they leave of it, and what they add."""
    return left1 * left2, sum1 * left2 + sum2


@triton.jit
def _scan(
    x_ptr, dt_ptr, rate_ptr, b_ptr, c_ptr, skip_ptr, bias_ptr, z_ptr, y_ptr, states_ptr,
    start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr,
    x_token, dt_token, b_token, c_token, z_token, block_size,
    X: tl.constexpr, S: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr, LOG2_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run the tokens of row `program_id(1)`, if it has more than one, through BLOCK_X channels."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    channel = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    s = tl.arange(0, BLOCK_S)
    i = tl.arange(0, BLOCK_T)
    in_x = channel < X
    in_s = s < S
    inside = in_s[:, None] & in_x[None, :]
    place = channel[None, :] * S + s[:, None]
    rate = tl.load(rate_ptr + place, mask=inside, other=0.0).to(tl.float32) * LOG2_E
    skip = tl.load(skip_ptr + channel, mask=in_x, other=0.0).to(tl.float32)
    bias = tl.zeros((BLOCK_X,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=in_x, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1)
    first = tl.load(start_ptr + row)
    length = tl.load(start_ptr + row + 1) - first
    if length <= 1:
        return
    mark = tl.load(marks_ptr + row)
    held = S * (1 - tl.load(fresh_ptr + row).to(tl.int32))  # nothing of a fresh row's state is read
    old = tl.load(reads_ptr + row) * block_size
    state = tl.load(states_ptr + old + place, mask=(s < held)[:, None] & in_x[None, :], other=0.0)
    x_ptr += first.to(tl.int64) * x_token
    dt_ptr += first.to(tl.int64) * dt_token
    b_ptr += first.to(tl.int64) * b_token
    c_ptr += first.to(tl.int64) * c_token
    y_ptr += first.to(tl.int64) * X
    if z_ptr is not None:
        z_ptr += first.to(tl.int64) * z_token
    begin = mark * 0
    # Two spans of tokens, to the mark and from there on
    for span in range(2):
        end = tl.where(span == 0, mark, length)
        for ahead in tl.range(begin, end, BLOCK_T, num_stages=STAGES):
            token = ahead + i
            exists = token < end
            token = token.to(tl.int64)
            tile = exists[:, None] & in_x[None, :]
            x = tl.load(x_ptr + token[:, None] * x_token + channel[None, :], mask=tile, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr + token[:, None] * dt_token + channel[None, :], mask=tile, other=0.0).to(tl.float32)
            numbers = exists[:, None] & in_s[None, :]
            b = tl.load(b_ptr + token[:, None] * b_token + s[None, :], mask=numbers, other=0.0).to(tl.float32)
            c = tl.load(c_ptr + token[:, None] * c_token + s[None, :], mask=numbers, other=0.0).to(tl.float32)
            step = tl.where(exists[:, None], softplus(dt + bias[None, :]), 0.0)  # behind the end nothing changes
            left = tl.exp2(step[:, None, :] * rate[None, :, :])
            left, added = tl.associative_scan((left, (step * x)[:, None, :] * b[:, :, None]), 0, _then)
            after = left * state[None, :, :] + added
            y = tl.sum(after * c[:, :, None], 1) + skip[None, :] * x
            if z_ptr is not None:
                z = tl.load(z_ptr + token[:, None] * z_token + channel[None, :], mask=tile, other=0.0)
                y *= silu(z.to(tl.float32))
            tl.store(y_ptr + token[:, None] * X + channel[None, :], y.to(y_ptr.dtype.element_ty), mask=tile)
            state = tl.sum(tl.where((i == BLOCK_T - 1)[:, None, None], after, 0.0), 0)
        if (span == 0) & (mark > 0):
            tl.store(states_ptr + tl.load(marked_ptr + row) * block_size + place, state, mask=inside)
        begin = mark
    tl.store(states_ptr + tl.load(writes_ptr + row) * block_size + place, state, mask=inside)


def scan(
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
    cut: Tile,
) -> None:
    """Write the outputs of all rows of more than one token to `y_TX`, and replace their states."""
    channels, size = rate_XS.shape
    block_x, block_s = blocks(channels, size, cut)
    _scan[(triton.cdiv(channels, block_x), turns.num_rows)](
        x_TX, dt_TX, rate_XS, b_TS, c_TS, skip_X, dt_bias_X, z_TX, y_TX, states_NXS,
        turns.start_R1, turns.reads_R, turns.writes_R, turns.fresh_R.view(torch.uint8), turns.marks_R, turns.marked_R,
        x_TX.stride(0), dt_TX.stride(0), b_TS.stride(0), c_TS.stride(0), 0 if z_TX is None else z_TX.stride(0),
        states_NXS.stride(0), X=channels, S=size, BLOCK_X=block_x, BLOCK_S=block_s, BLOCK_T=cut.tokens,
        STAGES=cut.stages, LOG2_E=LOG2_E, num_warps=cut.warps, **launch_options(x_TX.device),
    )  # fmt: skip


def blocks(channels: int, size: int, cut: Tile) -> tuple[int, int]:
    """Return (BLOCK_X, BLOCK_S)."""
    block_s = triton.next_power_of_2(size)
    return max(1, min(triton.next_power_of_2(channels), cut.numbers // block_s)), block_s


def _aot(cut: Tile, *, hot: bool = True) -> AotKernel:
    block_x, block_s = blocks(8192, 16, cut)
    constants: dict[str, object] = {
        "X": 8192, "S": 16, "BLOCK_X": block_x, "BLOCK_S": block_s, "BLOCK_T": cut.tokens, "STAGES": cut.stages,
        "LOG2_E": LOG2_E,
    }  # fmt: skip
    return AotKernel(
        _scan, signature(_scan, constants), constants, num_warps=cut.warps, num_stages=cut.stages, hot=hot,
        archs=ONE_OF_EACH,
    )  # fmt: skip


AOT = (_aot(Tile()), _aot(Tile(tokens=16), hot=False), _aot(Tile(tokens=4), hot=False))

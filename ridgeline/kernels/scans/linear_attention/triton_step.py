"""Linear attention token by token, with or without the delta rule: a program has some columns of a head's state in
registers.

Its time is that of the state's way through memory, once in and once out, if a row has one token. What a token does with
the state is the same arithmetic whatever comes before or behind it, so the bits do not depend on how a row was cut into
steps.

Legend: that of op.py.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.scans.linear_attention.triton_delta import log_decay
from ridgeline.kernels.scans.metadata import ROW_TYPES, ScanMetadata


class Rule(NamedTuple):
    """The tokens' numbers that both kinds of attention read.

    fade_THK: the logarithms of the decays, or the numbers that these are made of if there is a delta rule. Widths that
        share a number have stride 0.
    beta_TH, log_rate_H, dt_bias_HK: those of a delta rule; None without one.
    norm_eps: is added to the sum of a query's or key's squares, with a delta rule.
    """

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    fade_THK: Tensor
    scale: float
    beta_TH: Tensor | None = None
    log_rate_H: Tensor | None = None
    dt_bias_HK: Tensor | None = None
    norm_eps: float = 0.0

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides by token, that of decays by head, and the strengths' by token."""
        beta = 0 if self.beta_TH is None else self.beta_TH.stride(0)
        of_tokens = (x.stride(0) for x in (self.q_THK, self.k_THK, self.v_THV, self.fade_THK))
        return *of_tokens, self.fade_THK.stride(1), beta

    @property
    def shape(self) -> dict[str, int]:
        """The constants that all kernels have."""
        (heads, keys), values = self.k_THK.shape[1:], self.v_THV.shape[2]
        each = bool(self.fade_THK.stride(2)) or self.beta_TH is not None
        delta = self.beta_TH is not None
        return {"H": heads, "K": keys, "BK": triton.next_power_of_2(keys), "V": values, "EACH": each, "DELTA": delta}


@triton.jit
def fades(
    fade_ptr, token, head, key, mask, log_rate_ptr, dt_bias_ptr, fade_token, fade_head,
    K: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Load the logarithms of the decays of these tokens and channels, and 0 where there is none. `token` and `key` are
    of one shape, or broadcast to that of `mask`."""
    x = tl.load(fade_ptr + token * fade_token + head * fade_head + key, mask=mask, other=0).to(tl.float32)
    if DELTA:
        dt_bias = tl.load(dt_bias_ptr + head * K + key, mask=key < K, other=0)
        x = tl.where(mask, log_decay(x, tl.load(log_rate_ptr + head), dt_bias), 0)
    return x


@triton.jit
def _linear_attention_step(
    q_ptr, k_ptr, v_ptr, fade_ptr, beta_ptr, log_rate_ptr, dt_bias_ptr, states_ptr, o_ptr,
    start_ptr, reads_ptr, writes_ptr, fresh_ptr, marks_ptr, marked_ptr,
    q_token, k_token, v_token, fade_token, fade_head, beta_token, states_block, scale, norm_eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EACH: tl.constexpr, DELTA: tl.constexpr, SINGLE: tl.constexpr, LONGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Run a row's tokens over BV columns of a head's state. EACH: channels have decays of their own. DELTA: there is a
    delta rule. SINGLE: every row has one token. LONGEST: rows of more tokens are left to others; 0: no row is."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key, value = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    in_k, in_v = key < K, value < V
    inside = in_k[:, None] & in_v[None, :]
    cell = head * K * V + key[:, None] * V + value[None, :]
    # States and metadata are those that the step began with: nothing has to be waited for
    columns = V * (1 - tl.load(fresh_ptr + row).to(tl.int32))  # how much of a state there is
    if SINGLE:
        start, end = row, row + 1
    else:
        start, end = tl.load(start_ptr + row), tl.load(start_ptr + row + 1)
        if LONGEST > 0:
            end = tl.where(end - start <= LONGEST, end, start)
        columns = tl.where(start < end, columns, 0)
    held = in_k[:, None] & (value < columns)[None, :]
    state = tl.load(states_ptr + tl.load(reads_ptr + row) * states_block + cell, mask=held, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if start < end:
        mark = tl.load(marks_ptr + row)
        channel = key if EACH else key * 0
        for token in range(start, end):
            t = tl.cast(token, tl.int64)
            q = tl.load(q_ptr + t * q_token + head * K + key, mask=in_k, other=0).to(tl.float32)
            k = tl.load(k_ptr + t * k_token + head * K + key, mask=in_k, other=0).to(tl.float32)
            v = tl.load(v_ptr + t * v_token + head * V + value, mask=in_v, other=0).to(tl.float32)
            fade = fades(
                fade_ptr, t, head, channel, in_k, log_rate_ptr, dt_bias_ptr, fade_token, fade_head, K, DELTA
            )  # fmt: skip
            if DELTA:
                q *= tl.rsqrt(tl.sum(q * q, 0) + norm_eps)
                k *= tl.rsqrt(tl.sum(k * k, 0) + norm_eps)
            state *= tl.exp(fade)[:, None]
            if DELTA:
                beta = 1 / (1 + tl.exp(-tl.load(beta_ptr + t * beta_token + head).to(tl.float32)))
                v = beta * (v - tl.sum(state * k[:, None], 0))
            state += k[:, None] * v[None, :]
            o = tl.sum(state * (q * scale)[:, None], 0)
            tl.store(o_ptr + (t * H + head) * V + value, o.to(o_ptr.dtype.element_ty), mask=in_v)
            if token + 1 - start == mark:
                tl.store(states_ptr + tl.load(marked_ptr + row) * states_block + cell, state, mask=inside)
        tl.store(states_ptr + tl.load(writes_ptr + row) * states_block + cell, state, mask=inside)


class Cut(NamedTuple):
    """The columns of a state that a program has, and its warps."""

    columns: int
    warps: int


CUT = Cut(32, 4)


def step(
    rule: Rule,
    states_NHKV: Tensor,
    metadata: ScanMetadata,
    o_THV: Tensor,
    longest: int = 0,
    cut: Cut = CUT,
    single: bool = False,
) -> None:
    """Run the rows of at most `longest` tokens, or all of them if it is 0, and fill their outputs in. `single`: every
    row has one token."""
    shape = rule.shape
    columns = min(cut.columns, triton.next_power_of_2(shape["V"]))
    _linear_attention_step[(triton.cdiv(shape["V"], columns), shape["H"], metadata.num_rows)](
        rule.q_THK, rule.k_THK, rule.v_THV, rule.fade_THK, rule.beta_TH, rule.log_rate_H, rule.dt_bias_HK,
        states_NHKV, o_THV,
        *metadata.of_rows,
        *rule.strides, states_NHKV.stride(0), rule.scale, rule.norm_eps, **shape, BV=columns,
        SINGLE=single, LONGEST=longest, num_warps=cut.warps, **launch_options(o_THV.device),
    )  # fmt: skip


def aot_types(delta: bool, dtype: str = "*bf16") -> dict[str, str]:
    """Return the types of the arguments that the kernels have in common."""
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), dtype)
    types |= {"states_ptr": "*fp32", "fade_ptr": dtype if delta else "*fp32"}
    types |= ROW_TYPES
    types |= dict.fromkeys(("q_token", "k_token", "v_token", "fade_token", "fade_head", "states_block"), "i32:16")
    types |= {"beta_token": "i32", "scale": "fp32", "norm_eps": "fp32"}
    if delta:
        types |= {"beta_ptr": dtype, "log_rate_ptr": "*fp32", "dt_bias_ptr": "*fp32"}
    return types


def aot_constants(delta: bool) -> dict[str, object]:
    """Return the constants that the kernels have in common."""
    absent = {} if delta else dict.fromkeys(("beta_ptr", "log_rate_ptr", "dt_bias_ptr"))
    return {"H": 32, "K": 128, "V": 128, "BK": 128, "EACH": True, "DELTA": delta} | absent


def _aot(delta: bool, single: bool, longest: int) -> AotKernel:
    constants = aot_constants(delta) | {"BV": CUT.columns, "SINGLE": single, "LONGEST": longest}
    return AotKernel(
        _linear_attention_step, aot_types(delta), constants, num_warps=CUT.warps, hot=True, archs=ONE_OF_EACH
    )


AOT = (_aot(True, True, 0), _aot(False, True, 0), _aot(True, False, 1), _aot(False, False, 0))

"""Linear maps of a few tokens on the vector units: each program streams a few whole weight rows.

With a norm, y = (Σ w·n·s) · rsqrt(mean(s²) + eps). The scale factors out of the product, so each program adds up s² on
the way and needs no kernel before it. There are two kernels. `rows_kernel` cuts long rows into blocks and has a program
for every few rows. `laps_kernel` holds whole rows, and a fixed number of programs takes several laps. So x is prepared
once in each program, and few programs have to end before the next kernel may read y. Both ask for their first weights
before they wait, since no kernel writes weights. Both may add products of adapters: a kernel in front of them has
multiplied x by the adapters' first matrices (beside.py), and they multiply that by the second ones.

Legend:
    R  weight rows of a program (of a gated pair C gate rows, then C up rows)
    C  outputs of a program
    T  tokens
    B  inputs of a block
    Q  an adapter's ranks, padded
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.gemm.plain.blocks import fetch_lines, summed
from ridgeline.kernels.small.activation.triton import gated


@triton.jit
def _rows(weight_ptr, first, outputs, inputs: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Return pointers to the weight rows of outputs first … first + C: [R, 1, 1]. Past the end the last row repeats, so
    that the loads of weights need no mask."""
    local_R = tl.arange(0, ROWS * 2 if GATED else ROWS)
    row_R = tl.minimum(first + local_R % ROWS, outputs - 1) + local_R // ROWS * outputs
    return weight_ptr + row_R.to(tl.int64)[:, None, None] * inputs


@triton.jit
def _load(pointers, input_11B, inputs: tl.constexpr, RAGGED: tl.constexpr):
    """Load weights at `pointers` [.., .., B], with 0 past the last input, which only a RAGGED block has. They are read
    once a step and should not push out of the cache what is read again."""
    if RAGGED:
        return tl.load(pointers, mask=input_11B < inputs, other=0.0, eviction_policy="evict_first")
    return tl.load(pointers, eviction_policy="evict_first")


@triton.jit
def _kept(token_1T1, input_11B, tokens, inputs: tl.constexpr, FULL: tl.constexpr):
    """Return the mask of the values of x that exist: [1, T, B]. If all of them do, the compiler can see it, and loads
    have no mask."""
    return (token_1T1 >= 0 if FULL else token_1T1 < tokens) & (input_11B < inputs)


@triton.jit
def _row(first, outputs, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Return the rows of outputs first … first + C: [R, 1, 1]."""
    local_R = tl.arange(0, ROWS * 2 if GATED else ROWS)
    return (tl.minimum(first + local_R % ROWS, outputs - 1) + local_R // ROWS * outputs)[:, None, None]


@triton.jit
def _second(
    up_ptr, adapter_1T1, up_adapter, up_output, first, outputs,
    ROWS: tl.constexpr, GATED: tl.constexpr, MOST: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Return the rows of the second matrix of each token's adapter, 0 without one: [R, T, Q]."""
    rank_11Q = tl.arange(0, Q)[None, None, :]
    row_R11 = _row(first, outputs, ROWS, GATED)
    up_ptr_RTQ = up_ptr + (adapter_1T1 - 1).to(tl.int64) * up_adapter + row_R11.to(tl.int64) * up_output + rank_11Q
    return tl.load(up_ptr_RTQ, mask=(adapter_1T1 > 0) & (rank_11Q < MOST) & (row_R11 >= 0), other=0)


@triton.jit
def _thin(
    h_ptr, end_0, end_1, end_2, first, tokens, outputs,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, GATED: tl.constexpr, MOST: tl.constexpr, Q: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Return x multiplied by the first matrix of each token's adapter, of each row's part: [R, T, Q]."""
    token_1T1 = tl.arange(0, TOKENS)[None, :, None]
    rank_11Q = tl.arange(0, Q)[None, None, :]
    row_R11 = _row(first, outputs, ROWS, GATED)
    part_R11 = (row_R11 >= end_0).to(tl.int32) + (row_R11 >= end_1).to(tl.int32) + (row_R11 >= end_2).to(tl.int32)
    h_ptr_RTQ = h_ptr + (token_1T1 * PARTS + part_R11) * MOST + rank_11Q
    return tl.load(h_ptr_RTQ, mask=(token_1T1 < tokens) & (rank_11Q < MOST), other=0)


@triton.jit
def _finish(
    y_RT, bias_ptr, y_ptr, first, tokens, outputs,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, FULL: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Add the bias, apply the gate, and store the result."""
    row_C = first + tl.arange(0, ROWS)
    token_T = tl.arange(0, TOKENS)
    kept_C = row_C < outputs
    if GATE == "":
        y_CT = y_RT
        if BIAS:
            y_CT += tl.load(bias_ptr + row_C, mask=kept_C, other=0.0).to(tl.float32)[:, None]
    else:
        y_CT, up_CT = tl.split(y_RT.reshape(2, ROWS, TOKENS).permute(1, 2, 0))
        if BIAS:
            y_CT += tl.load(bias_ptr + row_C, mask=kept_C, other=0.0).to(tl.float32)[:, None]
            up_CT += tl.load(bias_ptr + outputs + row_C, mask=kept_C, other=0.0).to(tl.float32)[:, None]
        y_CT = gated(y_CT, up_CT, GATE)
    tl.store(
        y_ptr + token_T[None, :] * outputs.to(tl.int64) + row_C[:, None],
        y_CT.to(y_ptr.dtype.element_ty),
        mask=kept_C[:, None] if FULL else kept_C[:, None] & (token_T[None, :] < tokens),
    )


@triton.jit(do_not_specialize=["tokens"])
def rows_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, x_stride, residual_stride, tokens, outputs, eps,
    h_ptr, up_ptr, adapter_ptr, up_adapter, up_output, end_0, end_1, end_2,  # of adapters
    inputs: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    FULL: tl.constexpr,  # tokens == TOKENS
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,  # blocks of weights under way at once
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    MOST: tl.constexpr, Q: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y [T, O], and s [T, I] with a residual.

    GATE: "" or the activation. With one the weight's rows are O gates, then O ups.
    MOST: the most that an adapter's rank may be; 0: there are no adapters. end_0 …: behind the rows of each part.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    R: tl.constexpr = ROWS * 2 if GATE != "" else ROWS
    RAGGED: tl.constexpr = inputs % BLOCK != 0
    STEPS: tl.constexpr = (inputs + BLOCK - 1) // BLOCK
    AHEAD: tl.constexpr = DEPTH if DEPTH < STEPS else STEPS
    first = tl.program_id(0) * ROWS
    input_11B = tl.arange(0, BLOCK)[None, None, :]
    token_1T1 = tl.arange(0, TOKENS)[None, :, None]
    weights_R1B = _rows(weight_ptr, first, outputs, inputs, ROWS, GATE != "") + input_11B

    if MOST > 0:  # known before the step's first kernel with dependent launch
        adapter_1T1 = tl.load(adapter_ptr + token_1T1, mask=token_1T1 < tokens, other=0)
        if PDL:
            own_1T1 = tl.maximum(adapter_1T1 - 1, 0).to(tl.int64) * up_adapter
            fetch_lines(up_ptr + own_1T1 + _row(first, outputs, ROWS, GATE != "").to(tl.int64) * up_output)
    w_R1B = ()
    n_11B = ()
    for step in tl.static_range(AHEAD):
        w_R1B += (_load(weights_R1B + step * BLOCK, input_11B + step * BLOCK, inputs, RAGGED),)  # type: ignore[assignment]
        if NORM:
            n_11B += (_load(norm_ptr + input_11B + step * BLOCK, input_11B + step * BLOCK, inputs, RAGGED),)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()

    acc_RTB = tl.zeros((R, TOKENS, BLOCK), tl.float32)
    squares_1TB = tl.zeros((1, TOKENS, BLOCK), tl.float32)
    for step in tl.static_range(STEPS):
        here_11B = input_11B + step * BLOCK
        mask_1TB = _kept(token_1T1, here_11B, tokens, inputs, FULL)
        s_1TB = summed(
            x_ptr,
            residual_ptr,
            token_1T1 * x_stride + here_11B,
            token_1T1 * residual_stride + here_11B,
            mask_1TB,
            RESIDUAL,
        )
        a_1TB = s_1TB.to(tl.float32)
        if NORM:
            if RESIDUAL:
                tl.store(s_ptr + token_1T1 * inputs + here_11B, s_1TB, mask=mask_1TB & (first + token_1T1 * 0 == 0))
            squares_1TB += a_1TB * a_1TB
            a_1TB *= n_11B[0].to(tl.float32)  # type: ignore[misc]
        acc_RTB += w_R1B[0].to(tl.float32) * a_1TB  # type: ignore[misc]
        w_R1B = w_R1B[1:]
        n_11B = n_11B[1:]
        if step + AHEAD < STEPS:
            next_11B = here_11B + AHEAD * BLOCK
            w_R1B += (_load(weights_R1B + (step + AHEAD) * BLOCK, next_11B, inputs, RAGGED),)  # type: ignore[assignment]
            if NORM:
                n_11B += (_load(norm_ptr + next_11B, next_11B, inputs, RAGGED),)  # type: ignore[assignment]

    y_RT = tl.sum(acc_RTB, 2)
    if NORM:
        y_RT *= tl.rsqrt(tl.sum(squares_1TB, 2) / inputs + eps)
    if MOST > 0:  # only now: in registers beside the weights they would leave fewer programs at once
        up_RTQ = _second(up_ptr, adapter_1T1, up_adapter, up_output, first, outputs, ROWS, GATE != "", MOST, Q)
        h_RTQ = _thin(h_ptr, end_0, end_1, end_2, first, tokens, outputs, ROWS, TOKENS, GATE != "", MOST, Q, PARTS)
        y_RT += tl.sum(up_RTQ.to(tl.float32) * h_RTQ.to(tl.float32), 2)
    _finish(y_RT, bias_ptr, y_ptr, first, tokens, outputs, ROWS, TOKENS, FULL, BIAS, GATE)


@triton.jit(do_not_specialize=["tokens"])
def laps_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, x_stride, residual_stride, tokens, outputs, eps,
    h_ptr, up_ptr, adapter_ptr, up_adapter, up_output, end_0, end_1, end_2,  # of adapters
    inputs: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    FULL: tl.constexpr,  # tokens == TOKENS
    BLOCK: tl.constexpr,  # at least inputs
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    MOST: tl.constexpr, Q: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute what `rows_kernel` does. On each lap a program multiplies the rows of C outputs while the next lap's rows
    are loaded."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    RAGGED: tl.constexpr = inputs != BLOCK
    GATED: tl.constexpr = GATE != ""
    stride = tl.num_programs(0) * ROWS
    begin = tl.program_id(0) * ROWS
    input_11B = tl.arange(0, BLOCK)[None, None, :]
    token_1T1 = tl.arange(0, TOKENS)[None, :, None]
    mask_1TB = _kept(token_1T1, input_11B, tokens, inputs, FULL)

    if MOST > 0:  # known before the step's first kernel with dependent launch
        adapter_1T1 = tl.load(adapter_ptr + token_1T1, mask=token_1T1 < tokens, other=0)
    w_R1B = _load(_rows(weight_ptr, begin, outputs, inputs, ROWS, GATED) + input_11B, input_11B, inputs, RAGGED)
    if NORM:
        n_11B = _load(norm_ptr + input_11B, input_11B, inputs, RAGGED)
    if PDL:
        tl.extra.cuda.gdc_wait()

    s_1TB = summed(
        x_ptr,
        residual_ptr,
        token_1T1 * x_stride + input_11B,
        token_1T1 * residual_stride + input_11B,
        mask_1TB,
        RESIDUAL,
    )
    if MOST > 0:  # behind x, so that no address delays it
        up_RTQ = _second(up_ptr, adapter_1T1, up_adapter, up_output, begin, outputs, ROWS, GATED, MOST, Q)
        h_RTQ = _thin(h_ptr, end_0, end_1, end_2, begin, tokens, outputs, ROWS, TOKENS, GATED, MOST, Q, PARTS)
    a_1TB = s_1TB.to(tl.float32)
    if NORM:
        if RESIDUAL:
            tl.store(s_ptr + token_1T1 * inputs + input_11B, s_1TB, mask=mask_1TB & (begin + token_1T1 * 0 == 0))
        scale_1T = tl.rsqrt(tl.sum(a_1TB * a_1TB, 2) / inputs + eps)
        a_1TB *= n_11B.to(tl.float32)
    for first in tl.range(begin, outputs, stride, num_stages=1):
        acc_RTB = w_R1B.to(tl.float32) * a_1TB
        more = tl.where(first + stride < outputs, inputs, 0)  # load nothing after the last lap
        next_R1B = _rows(weight_ptr, first + stride, outputs, inputs, ROWS, GATED) + input_11B
        w_R1B = tl.load(next_R1B, mask=input_11B < more, other=0.0, eviction_policy="evict_first")
        if MOST > 0:  # those of the next lap are loaded beside its weights
            add_RTQ = up_RTQ.to(tl.float32) * h_RTQ.to(tl.float32)
            then = first + stride
            up_RTQ = _second(up_ptr, adapter_1T1, up_adapter, up_output, then, outputs, ROWS, GATED, MOST, Q)
            h_RTQ = _thin(h_ptr, end_0, end_1, end_2, then, tokens, outputs, ROWS, TOKENS, GATED, MOST, Q, PARTS)
        y_RT = tl.sum(acc_RTB, 2)
        if NORM:
            y_RT *= scale_1T
        if MOST > 0:
            y_RT += tl.sum(add_RTQ, 2)
        _finish(y_RT, bias_ptr, y_ptr, first, tokens, outputs, ROWS, TOKENS, FULL, BIAS, GATE)


NO_ADAPTERS: dict[str, Any] = dict.fromkeys(
    ("h_ptr", "up_ptr", "adapter_ptr", "up_adapter", "up_output", "end_0", "end_1", "end_2")
) | {"MOST": 0, "Q": 1, "PARTS": 1}


def _aot(
    inputs: int, rows: int, tokens: int, block: int, warps: int, depth: int | None, *, norm: bool, gate: str,
    adapters: int = 0,
) -> AotKernel:  # fmt: skip
    """Return an entry for `rows_kernel` with this depth, or for `laps_kernel` if depth is None. adapters: their
    parts."""
    pointers = ("x_ptr", "residual_ptr", "norm_ptr", "weight_ptr", "bias_ptr", "y_ptr", "s_ptr")
    signature = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(("x_stride", "residual_stride"), "i32:16")
    signature |= {"tokens": "i32", "outputs": "i32:16", "eps": "fp32"}
    cut = {"inputs": inputs, "ROWS": rows, "TOKENS": tokens, "FULL": True, "BLOCK": block}
    cut |= {"DEPTH": depth} if depth else {}
    flags = {"NORM": norm, "RESIDUAL": norm, "BIAS": False, "GATE": gate}
    if adapters:
        signature |= {"h_ptr": "*bf16", "up_ptr": "*bf16", "adapter_ptr": "*i32"}
        signature |= dict.fromkeys(("up_adapter", "up_output", "end_0", "end_1", "end_2"), "i32:16")
        flags |= {"MOST": 16, "Q": 16, "PARTS": adapters}
    else:
        flags |= NO_ADAPTERS
    archs: dict[str, Any] = {"archs": ("sm_90",)} if adapters else {}
    return AotKernel(rows_kernel if depth else laps_kernel, signature, cut | flags, num_warps=warps, hot=True, **archs)


AOT = (
    _aot(14_336, 1, 1, 2048, 4, 3, norm=False, gate=""),
    _aot(4096, 2, 1, 4096, 8, 1, norm=True, gate="silu"),
    _aot(1024, 2, 2, 1024, 4, 1, norm=True, gate=""),
    _aot(2048, 4, 1, 2048, 4, None, norm=True, gate="silu"),
    _aot(4096, 4, 1, 4096, 8, None, norm=False, gate=""),
    _aot(4096, 4, 1, 4096, 8, None, norm=False, gate="", adapters=1),
)

"""Products of one or two tokens with 8-bit weights on the vector units: gemm/rows.py's laps with scales.

A program holds whole rows of x, which are not rounded, and takes several laps of a few weight rows each. Four weights
at a time lie in a register, where they become float32: about two instructions for each, and every token takes one more.
An H200 has time for six or seven while the memory delivers a byte.

Legend:
    R  weight rows of a program (of a gated pair C gate rows, then C up rows)
    C  outputs of a program
    T  tokens
    G  groups of inputs with a scale of their own (one if scales are of whole rows)
    B  inputs of a group
    Q  quarters of them: inputs 4q … 4q + 3
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.aot import AotKernel
from ridgeline.kernels.fp8_gemm.choose import Rows
from ridgeline.kernels.fp8_gemm.eight import Eight
from ridgeline.kernels.gemm.blocks import summed
from ridgeline.kernels.gemm.rows import _finish
from ridgeline.kernels.launch import compute_capability, launch_options, num_multiprocessors

SCALED = tl.constexpr(128)  # inputs, and outputs, of a block with a scale
SIGNS = tl.constexpr(-0x7F7F7F80)  # the highest bits of four bytes


@triton.jit
def _numbers(first, outputs, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Return the numbers of the weight rows of outputs first … first + C: [R]. Past the end the last row repeats, so
    that the loads of weights need no mask."""
    local_R = tl.arange(0, ROWS * 2 if GATED else ROWS)
    return tl.minimum(first + local_R % ROWS, outputs - 1) + local_R // ROWS * outputs


@triton.jit
def _load(weight_ptr, row_R, quarter_GQ, end, inputs: tl.constexpr, RAGGED: tl.constexpr):
    """Load weight rows, four weights to a number: [R, G, Q]. They are read once a step and should not push out of the
    cache what is read again. RAGGED: quarters from `end` on do not exist, or are not wanted."""
    pointers = weight_ptr + row_R.to(tl.int64)[:, None, None] * (inputs // 4) + quarter_GQ[None, :, :]
    if RAGGED:
        return tl.load(pointers, mask=quarter_GQ[None, :, :] < end, other=0, eviction_policy="evict_first")
    return tl.load(pointers, eviction_policy="evict_first")


@triton.jit
def _fours(x):
    """Return x[…, 0::4], x[…, 1::4], x[…, 2::4] and x[…, 3::4] of a tensor with three dimensions."""
    even, odd = x.reshape(x.shape[0], x.shape[1], x.shape[2] // 4, 2, 2).split()
    zero, two = even.split()
    one, three = odd.split()
    return zero, one, two, three


@triton.jit
def _weights(packed, KIND: tl.constexpr):
    """Return the four weights of each number in float32.

    KIND: "cvt" for E4M3 where the processor converts it, "e4m3" for E4M3 elsewhere, "int8".
    """
    if KIND == "cvt":
        zero, one, two, three = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high, a, b;
            .reg .b32 pair;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 pair, low;
            mov.b32 {a, b}, pair;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.rn.f16x2.e4m3x2 pair, high;
            mov.b32 {a, b}, pair;
            cvt.f32.f16 $2, a;
            cvt.f32.f16 $3, b;
            }
            """,
            "=f,=f,=f,=f,r",
            [packed],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            True,
            1,
        )
    elif KIND == "e4m3":
        zero, one, two, three = _e4m3(packed), _e4m3(packed >> 8), _e4m3(packed >> 16), _e4m3(packed >> 24)
    else:
        moved = packed ^ SIGNS
        zero, one, two, three = _level(moved), _level(moved >> 8), _level(moved >> 16), _level(moved >> 24)
    return zero, one, two, three


@triton.jit
def _e4m3(byte):
    """Return the E4M3 number in the low byte. Float16 has the same fields, with an exponent that is larger by 8."""
    bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _level(byte):
    """Return the level in the low byte, to which 128 was added. The bits are those of 2^23 + level + 128, so no integer
    has to be converted."""
    return ((byte & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0


@triton.jit(do_not_specialize=["tokens"])
def rows_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, s_ptr,
    x_stride, residual_stride, tokens, outputs, eps,
    inputs: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    FULL: tl.constexpr,  # tokens == TOKENS
    BLOCK: tl.constexpr,  # at least inputs
    KIND: tl.constexpr, BLOCKED: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y [T, O], and s [T, I] with a residual. On each lap a program multiplies the rows of C outputs while the
    next lap's rows are loaded.

    weight: int32, four weights to a number.
    scale: as `Eight` says.
    GATE: "" or the activation. With one the weight's rows are O gates, then O ups.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GATED: tl.constexpr = GATE != ""
    GROUP: tl.constexpr = SCALED if BLOCKED else BLOCK
    GROUPS: tl.constexpr = BLOCK // GROUP
    COLUMNS: tl.constexpr = (inputs + SCALED - 1) // SCALED
    stride = tl.num_programs(0) * ROWS
    begin = tl.program_id(0) * ROWS
    group_G1 = tl.arange(0, GROUPS)[:, None]
    quarter_GQ = group_G1 * (GROUP // 4) + tl.arange(0, GROUP // 4)[None, :]
    input_1GB = (group_G1 * GROUP + tl.arange(0, GROUP)[None, :])[None, :, :]
    token_T11 = tl.arange(0, TOKENS)[:, None, None]
    mask_TGB = (token_T11 >= 0 if FULL else token_T11 < tokens) & (input_1GB < inputs)

    row_R = _numbers(begin, outputs, ROWS, GATED)
    w_RGQ = _load(weight_ptr, row_R, quarter_GQ, inputs // 4, inputs, inputs != BLOCK)
    if NORM:
        n_1GB = tl.load(norm_ptr + input_1GB, mask=input_1GB < inputs, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()

    s_TGB = summed(
        x_ptr, residual_ptr, token_T11 * x_stride + input_1GB, token_T11 * residual_stride + input_1GB, mask_TGB,
        RESIDUAL,
    )  # fmt: skip
    a_TGB = s_TGB.to(tl.float32)
    if NORM:
        if RESIDUAL:
            tl.store(s_ptr + token_T11 * inputs + input_1GB, s_TGB, mask=mask_TGB & (begin + token_T11 * 0 == 0))
        norm_T = tl.rsqrt(tl.sum(tl.sum(a_TGB * a_TGB, 2), 1) / inputs + eps)
        a_TGB *= n_1GB.to(tl.float32)
    a_0, a_1, a_2, a_3 = _fours(a_TGB)
    for first in tl.range(begin, outputs, stride, num_stages=1):
        row_R = _numbers(first, outputs, ROWS, GATED)
        w_0, w_1, w_2, w_3 = _weights(w_RGQ, KIND)
        more = tl.where(first + stride < outputs, inputs // 4, 0)  # load nothing after the last lap
        w_RGQ = _load(weight_ptr, _numbers(first + stride, outputs, ROWS, GATED), quarter_GQ, more, inputs, True)
        part_RTGQ = w_0[:, None, :, :] * a_0[None, :, :, :]
        part_RTGQ += w_1[:, None, :, :] * a_1[None, :, :, :]
        part_RTGQ += w_2[:, None, :, :] * a_2[None, :, :, :]
        part_RTGQ += w_3[:, None, :, :] * a_3[None, :, :, :]
        if BLOCKED:
            at_RG1 = (row_R // SCALED * COLUMNS)[:, None, None] + group_G1[None, :, :]
            scale_RG1 = tl.load(scale_ptr + at_RG1, mask=group_G1[None, :, :] < COLUMNS, other=0.0)
            part_RTGQ *= scale_RG1[:, None, :, :]
        y_RT = tl.sum(part_RTGQ.reshape(part_RTGQ.shape[0], TOKENS, BLOCK // 4), 2)
        if not BLOCKED:
            y_RT *= tl.load(scale_ptr + row_R)[:, None]
        if NORM:
            y_RT *= norm_T[None, :]
        _finish(y_RT, bias_ptr, y_ptr, first, tokens, outputs, ROWS, TOKENS, FULL, BIAS, GATE)


def _kind(dtype: torch.dtype, device: torch.device) -> str:
    """Return how `_weights` reads the numbers."""
    if dtype == torch.int8:
        return "int8"
    return "cvt" if compute_capability(device) >= (8, 9) else "e4m3"


def launch_rows(
    plan: Rows,
    x_TI: Tensor,
    residual_TI: Tensor | None,
    norm_weight_I: Tensor | None,
    eps: float,
    weight: Eight,
    bias_O: Tensor | None,
    gate: str | None,
) -> tuple[Tensor, Tensor]:
    """Return (y, s) as `norm_linear` does, or the plain product and x if there is no norm."""
    tokens, inputs = x_TI.shape
    outputs = len(weight.number_OI) // 2 if gate else len(weight.number_OI)
    y_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=x_TI.device)
    s_TI = x_TI if residual_TI is None else torch.empty(tokens, inputs, dtype=x_TI.dtype, device=x_TI.device)
    residual = x_TI if residual_TI is None else residual_TI  # any pointer will do for what the flags leave out
    assert plan.block >= inputs
    programs = min(plan.programs * num_multiprocessors(x_TI.device), triton.cdiv(outputs, plan.rows))
    rows_kernel[(programs,)](
        x_TI, residual, x_TI if norm_weight_I is None else norm_weight_I,
        weight.number_OI.view(torch.int32), weight.scale, x_TI if bias_O is None else bias_O, y_TO, s_TI,
        x_TI.stride(0), residual.stride(0), tokens, outputs, eps,
        inputs=inputs, ROWS=plan.rows, TOKENS=plan.tokens, FULL=tokens == plan.tokens, BLOCK=plan.block,
        KIND=_kind(weight.number_OI.dtype, x_TI.device), BLOCKED=weight.blocked, NORM=norm_weight_I is not None,
        RESIDUAL=residual_TI is not None, BIAS=bias_O is not None, GATE=gate or "",
        num_warps=plan.warps, **launch_options(x_TI.device),
    )  # fmt: skip
    return y_TO, s_TI


def _aot(plan: Rows, inputs: int, kind: str, *, norm: bool, gate: str, blocked: bool = False) -> AotKernel:
    pointers = ("x_ptr", "residual_ptr", "norm_ptr", "bias_ptr", "y_ptr", "s_ptr")
    signature = dict.fromkeys(pointers, "*bf16") | {"weight_ptr": "*i32", "scale_ptr": "*fp32"}
    signature |= dict.fromkeys(("x_stride", "residual_stride"), "i32:16")
    signature |= {"tokens": "i32", "outputs": "i32:16", "eps": "fp32"}
    cut = {"inputs": inputs, "ROWS": plan.rows, "TOKENS": plan.tokens, "FULL": True, "BLOCK": plan.block}
    flags = {"KIND": kind, "BLOCKED": blocked, "NORM": norm, "RESIDUAL": norm, "BIAS": False, "GATE": gate}
    archs = ("sm_90",) if kind == "cvt" else ("sm_90", "gfx942")
    return AotKernel(rows_kernel, signature, cut | flags, num_warps=plan.warps, hot=True, archs=archs)


AOT = (
    _aot(Rows(2, 1, 4096, 8, 4), 4096, "cvt", norm=True, gate="silu"),
    _aot(Rows(4, 1, 4096, 8, 4), 4096, "cvt", norm=False, gate=""),
    _aot(Rows(1, 1, 16_384, 16, 2), 14_336, "cvt", norm=False, gate=""),
    _aot(Rows(2, 2, 4096, 8, 4), 4096, "cvt", norm=True, gate="", blocked=True),
    _aot(Rows(2, 1, 4096, 8, 4), 4096, "int8", norm=True, gate=""),
    _aot(Rows(2, 1, 4096, 8, 4), 4096, "e4m3", norm=True, gate=""),
)

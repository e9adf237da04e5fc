"""Experts' products of more tokens on the matrix units. A program owns a tile of weight rows of one expert, and a tile
of that expert's pairs, which it finds from the counts on the device.

The grid has as many programs as the pairs could need at the most, and those that find nothing leave at once. As in the
dense kernel the weights are the left operand, and a gated pair's tile has its gate rows first, then the up rows of the
same outputs.

Legend:
    R  rows of a tile
    C  outputs of a tile (half of its rows if gated)
    T  pairs of a tile
    B  inputs of a block
    E  experts, padded to a power of two
    K  experts of a token, padded to a power of two
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.gemm.experts.choose import Tiles
from ridgeline.kernels.gemm.experts.forms import PLAIN, Form, e2m1, e4m3, level, load_scales, scale_at
from ridgeline.kernels.small.activation.triton import gated


@triton.jit
def load_weights(pointers, mask, DOT: tl.constexpr):
    """Load a block of plain weights as an operand. mask: None where all of them exist."""
    if mask is None:
        return tl.load(pointers).to(DOT)
    else:
        return tl.load(pointers, mask=mask, other=0.0).to(DOT)


@triton.jit
def dequantized(
    weight_ptr, scale_ptr, zero_ptr, expert, row_R, start,
    O: tl.constexpr, I: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr, KIND: tl.constexpr,  # noqa: E741
    GROUP: tl.constexpr, SPAN: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Load a block of rows of one expert in FP8 or codes (forms.py) as an operand [R, B]. O: all of its rows."""
    PER: tl.constexpr = 1 if KIND == "fp8" else 2
    EACH: tl.constexpr = GROUP if GROUP < BLOCK and GROUP < I else BLOCK
    GROUPS: tl.constexpr = (I + GROUP - 1) // GROUP
    group_G = tl.arange(0, BLOCK // EACH)
    byte_GQ = start // PER + group_G[:, None] * (EACH // PER) + tl.arange(0, EACH // PER)[None, :]
    scale_G = start // GROUP + group_G
    byte_at = (expert * O + row_R)[:, None, None] * (I // PER) + byte_GQ[None]
    scale_RG_at = scale_at(expert, (row_R // SPAN)[:, None], scale_G[None], (O + SPAN - 1) // SPAN, GROUPS)
    if I % BLOCK == 0:
        byte_RGQ = tl.load(weight_ptr + byte_at)
        scale_RG = load_scales(scale_ptr + scale_RG_at, None, SCALES)
    else:
        byte_RGQ = tl.load(weight_ptr + byte_at, mask=(byte_GQ < I // PER)[None], other=0)
        scale_RG = load_scales(scale_ptr + scale_RG_at, (scale_G < GROUPS)[None], SCALES)
    scale_RG1 = (scale_RG * LIFT)[:, :, None]
    if KIND == "fp8":
        w = e4m3(byte_RGQ, LIFT) * LIFT * scale_RG1
    else:
        if KIND == "e2m1":
            low, high = e2m1(byte_RGQ, 0) * LIFT, e2m1(byte_RGQ, 4) * LIFT
        else:
            middle = scale_RG1 * 0 + 136.0
            if ZEROS:
                zero_RG = tl.load(
                    zero_ptr + scale_RG_at, mask=(scale_G < GROUPS)[None] & (row_R >= 0)[:, None], other=0
                )
                middle = 128.0 + zero_RG.to(tl.float32)[:, :, None]
            low, high = level(byte_RGQ, 0) - middle, level(byte_RGQ, 4) - middle
        w = tl.join((low * scale_RG1).to(DOT), (high * scale_RG1).to(DOT))
    return w.to(DOT).reshape(row_R.shape[0], BLOCK)


@triton.jit
def _find(start_ptr, tile, E: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Return (expert, first pair, end of the expert's pairs) of a tile of pairs; expert is -1 if there is no such
    tile."""
    expert_E = tl.arange(0, EXPERTS)
    first_E = tl.load(start_ptr + expert_E, mask=expert_E < E, other=0)
    end_E = tl.load(start_ptr + 1 + expert_E, mask=expert_E < E, other=0)
    tiles_E = (end_E - first_E + TOKENS - 1) // TOKENS
    behind_E = tl.cumsum(tiles_E, 0)
    before_E = behind_E - tiles_E
    here_E = (before_E <= tile) & (tile < behind_E)
    expert = tl.max(tl.where(here_E, expert_E, -1), 0)
    first = tl.max(tl.where(here_E, first_E + (tile - before_E) * TOKENS, 0), 0)
    return expert, first, tl.max(tl.where(here_E, end_E, 0), 0)


@triton.jit
def grouped_tiles_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, factor_ptr, bias_ptr, y_ptr, token_ptr, start_ptr, x_stride,
    I: tl.constexpr, O: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    FACTOR: tl.constexpr, LIFT: tl.constexpr,
    GATHER: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y [P, O]. Grid (tiles of O, tiles of pairs).

    I, O: inputs and outputs of an expert (of each half if gated).
    GATHER: x has a row for each token. Otherwise it has one for each pair.
    GATE: "" or the activation. With one an expert's rows are O gates, then O ups.
    KIND, GROUP, SPAN, SCALES, ZEROS, FACTOR, LIFT: see `Form`. KIND is "" for plain weights.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # after the wait, so that later kernels may read the routes
    expert, first, end = _find(start_ptr, tl.program_id(1), E, EXPERTS, TOKENS)
    if expert >= 0:
        COLUMNS: tl.constexpr = ROWS if GATE == "" else ROWS // 2
        HEIGHT: tl.constexpr = O if GATE == "" else 2 * O
        pair_T = first + tl.arange(0, TOKENS)
        exists_T = pair_T < end
        x_row_T = pair_T
        if GATHER:
            x_row_T = tl.load(token_ptr + pair_T, mask=exists_T, other=0)
        local_R = tl.arange(0, ROWS)
        row_R = tl.minimum(tl.program_id(0) * COLUMNS + local_R % COLUMNS, O - 1) + local_R // COLUMNS * O
        input_B = tl.arange(0, BLOCK)
        w_RB = weight_ptr + expert.to(tl.int64) * (HEIGHT * I) + row_R.to(tl.int64)[:, None] * I + input_B[None, :]
        x_BT = x_ptr + x_row_T.to(tl.int64)[None, :] * x_stride + input_B[:, None]
        acc_RT = tl.zeros((ROWS, TOKENS), tl.float32)
        for start in tl.range(0, I, BLOCK, num_stages=STAGES):
            inside_B = start + input_B < I
            if KIND != "":
                a_RB = dequantized(
                    weight_ptr, scale_ptr, zero_ptr, expert.to(tl.int64), row_R, start, HEIGHT, I, BLOCK, DOT, KIND,
                    GROUP, SPAN, SCALES, ZEROS, LIFT,
                )  # fmt: skip
            elif I % BLOCK == 0:
                a_RB = load_weights(w_RB + start, None, DOT)
            else:
                a_RB = load_weights(w_RB + start, inside_B[None, :], DOT)
            if I % BLOCK == 0:
                b_BT = tl.load(x_BT + start, mask=exists_T[None, :], other=0.0).to(DOT)
            else:
                b_BT = tl.load(x_BT + start, mask=inside_B[:, None] & exists_T[None, :], other=0.0).to(DOT)
            acc_RT = tl.dot(a_RB, b_BT, acc_RT, input_precision="ieee")
        if FACTOR:
            acc_RT *= tl.load(factor_ptr + expert)
        column_C = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        kept_C = column_C < O
        bias_C = bias_ptr + expert.to(tl.int64) * HEIGHT + column_C
        if GATE == "":
            y_CT = acc_RT
            if BIAS:
                y_CT += tl.load(bias_C, mask=kept_C, other=0.0).to(tl.float32)[:, None]
        else:
            y_CT, up_CT = tl.split(acc_RT.reshape(2, COLUMNS, TOKENS).permute(1, 2, 0))
            if BIAS:
                y_CT += tl.load(bias_C, mask=kept_C, other=0.0).to(tl.float32)[:, None]
                up_CT += tl.load(bias_C + O, mask=kept_C, other=0.0).to(tl.float32)[:, None]
            y_CT = gated(y_CT, up_CT, GATE)
        tl.store(
            y_ptr + pair_T.to(tl.int64)[None, :] * O + column_C[:, None],
            y_CT.to(y_ptr.dtype.element_ty),
            mask=kept_C[:, None] & exists_T[None, :],
        )


def _aot(plan: Tiles, experts: int, inputs: int, outputs: int, gate: str, *archs: str, form: Form | None = None) -> Any:
    stored = "*bf16" if form is None else "*u8"
    signature = dict.fromkeys(("x_ptr", "bias_ptr", "y_ptr"), "*bf16")
    signature |= {"weight_ptr": stored, "scale_ptr": stored, "zero_ptr": stored, "factor_ptr": "*fp32"}
    if form is not None and form.scales == "float":
        signature["scale_ptr"] = "*fp32"
    signature |= {"token_ptr": "*i32", "start_ptr": "*i32", "x_stride": "i32:16"}
    constants: dict[str, Any] = {"I": inputs, "O": outputs, "E": experts, "EXPERTS": experts}
    constants |= {"ROWS": plan.rows, "TOKENS": plan.tokens, "BLOCK": plan.block, "STAGES": plan.stages}
    constants |= {"DOT": tl.bfloat16, "GATHER": gate != "", "BIAS": False, "GATE": gate}
    constants |= PLAIN if form is None else form.constants()
    return AotKernel(
        grouped_tiles_kernel, signature, constants, num_warps=plan.warps, hot=True, tensor_cores="HGMMA", archs=archs
    )


AOT = (
    _aot(Tiles(64, 16, 128, 4, 4), 128, 2048, 768, "silu", *ONE_OF_EACH),
    _aot(Tiles(128, 128, 64, 8, 4), 128, 768, 2048, "", "sm_90"),
    _aot(
        Tiles(64, 16, 128, 4, 4), 32, 2880, 2880, "swiglu_clamped", *ONE_OF_EACH, form=Form("e2m1", 32, scales="e8m0")
    ),
    _aot(Tiles(64, 16, 128, 4, 4), 128, 2048, 768, "silu", *ONE_OF_EACH, form=Form("fp8", 128, 128)),
)

"""The second product of a few tokens' experts for Hopper, through shared memory.

A program takes a few outputs of one token, as in rows.py. It copies the rows of all of the token's experts to shared
memory, where they take no registers, so that a multiprocessor holds so many programs that most of the second product's
weights are on their way before the first product has ended.

Legend:
    L  lines of a part: an expert's row for one output each, one for each warp
    B  inputs of a part
"""

# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005 - Gluon knows no starred tuples
from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.gemm.experts.choose import SHARED_PART, SharedRows, choose_shared
from ridgeline.kernels.gemm.route.op import Routes
from ridgeline.kernels.hopper.gluon_names import load_rows

WARPS = 4


@gluon.jit
def down_shared_kernel(
    h_ptr, weight_ptr, bias_ptr, expert_ptr, weight_of_ptr, place_ptr, add_ptr, y_ptr, add_stride,
    F: gl.constexpr, M: gl.constexpr, E: gl.constexpr, K: gl.constexpr, CHOICES: gl.constexpr, ROWS: gl.constexpr,
    PART: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute ROWS outputs of one token: the weighted sum over its experts. Grid (tiles of M, tokens).

    CHOICES: a power of two that covers K. Warps divide CHOICES * ROWS, and ROWS divides the warps.
    """
    if PDL:
        gdc_launch_dependents()
    LINES: gl.constexpr = gl.num_warps()
    GROUPS: gl.constexpr = CHOICES * ROWS // LINES
    EACH: gl.constexpr = LINES // ROWS  # experts of a group
    PARTS: gl.constexpr = (F + PART - 1) // PART
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [LINES, 1], [1, 0])
    held: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    w = gl.allocate_shared_memory(weight_ptr.dtype.element_ty, [GROUPS * PARTS, LINES, PART], held)
    token = gl.program_id(1)
    line_L = gl.arange(0, LINES, gl.SliceLayout(1, layout))
    input_1B = gl.expand_dims(gl.arange(0, PART, gl.SliceLayout(0, layout)), 0)
    column_L = gl.minimum(gl.program_id(0) * ROWS + line_L % ROWS, M - 1)
    for group in gl.static_range(GROUPS):
        choice_L = group * EACH + line_L // ROWS
        expert_L = gl.load(expert_ptr + token * K + choice_L, mask=choice_L < K, other=E)
        row_L1 = gl.expand_dims(expert_L.to(gl.int64) * M + column_L, 1)
        real_L1 = gl.expand_dims(expert_L < E, 1)
        for part in gl.static_range(PARTS):
            mask = real_L1 & (input_1B + part * PART < F)
            load_rows(w.index(group * PARTS + part), weight_ptr + row_L1 * F + (input_1B + part * PART), mask=mask)
    async_copy.commit_group()
    if PDL:
        gdc_wait()
    loaded = ()
    factors = ()
    for group in gl.static_range(GROUPS):
        choice_L = group * EACH + line_L // ROWS
        expert_L = gl.load(expert_ptr + token * K + choice_L, mask=choice_L < K, other=E)
        place_L = gl.load(place_ptr + token * K + choice_L, mask=choice_L < K, other=0)
        real_L = expert_L < E
        factors = factors + (gl.load(weight_of_ptr + token * K + choice_L, mask=real_L, other=0.0),)
        from_L1 = gl.expand_dims(place_L.to(gl.int64) * F, 1)
        for part in gl.static_range(PARTS):
            mask = gl.expand_dims(real_L, 1) & (input_1B + part * PART < F)
            loaded = loaded + (gl.load(h_ptr + from_L1 + (input_1B + part * PART), mask=mask, other=0.0),)
    async_copy.wait_group(0)
    total_L = gl.zeros([LINES], gl.float32, gl.SliceLayout(1, layout))
    for group in gl.static_range(GROUPS):
        sum_LB = gl.zeros([LINES, PART], gl.float32, layout)
        for part in gl.static_range(PARTS):
            w_LB = w.index(group * PARTS + part).load(layout)
            sum_LB += w_LB.to(gl.float32) * loaded[group * PARTS + part].to(gl.float32)
        y_L = gl.sum(sum_LB, 1)
        if BIAS:
            choice_L = group * EACH + line_L // ROWS
            expert_L = gl.load(expert_ptr + token * K + choice_L, mask=choice_L < K, other=E)
            at_L = expert_L.to(gl.int64) * M + column_L
            y_L += gl.load(bias_ptr + at_L, mask=expert_L < E, other=0.0).to(gl.float32)
        total_L += y_L * factors[group]
    y_C = gl.sum(gl.reshape(total_L, [EACH, ROWS]), 0)
    column_C = gl.program_id(0) * ROWS + gl.arange(0, ROWS, y_C.type.layout)
    kept_C = column_C < M
    if ADD:
        y_C += gl.load(add_ptr + token.to(gl.int64) * add_stride + column_C, mask=kept_C, other=0.0).to(gl.float32)
    gl.store(y_ptr + token.to(gl.int64) * M + column_C, y_C.to(y_ptr.dtype.element_ty), mask=kept_C)


def grouped_down(
    h_PF: Tensor, weight_EMF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None,
    plan: SharedRows | None = None,
) -> Tensor:  # fmt: skip
    """Compute `op.grouped_down` of a contiguous plain stack, where `choose_shared` has a cut. plan: another one, for
    tests and tuning."""
    (tokens, used), (experts, width, inner) = routes.expert_TK.shape, weight_EMF.shape
    plan = plan or choose_shared(tokens, inner, used, h_PF.itemsize)
    assert plan is not None
    y_TM = torch.empty(tokens, width, dtype=h_PF.dtype, device=h_PF.device)
    add = h_PF if add_TM is None else add_TM
    down_shared_kernel[(triton.cdiv(width, plan.rows), tokens)](
        h_PF, weight_EMF, h_PF if bias_EM is None else bias_EM, routes.expert_TK, routes.weight_TK, routes.place_TK,
        add, y_TM, add.stride(0), F=inner, M=width, E=experts, K=used, CHOICES=triton.next_power_of_2(used),
        ROWS=plan.rows, PART=SHARED_PART, BIAS=bias_EM is not None, ADD=add_TM is not None, num_warps=WARPS,
        **launch_options(h_PF.device),
    )  # fmt: skip
    return y_TM


def _aot(width: int, inner: int, experts: int, used: int, rows: int) -> AotKernel:
    signature = {f"{name}_ptr": "*bf16" for name in ("h", "weight", "bias", "add", "y")}
    signature |= {"expert_ptr": "*i32", "weight_of_ptr": "*fp32", "place_ptr": "*i32", "add_stride": "i32:16"}
    shape = {"F": inner, "M": width, "E": experts, "K": used, "CHOICES": used, "ROWS": rows, "PART": SHARED_PART}
    return AotKernel(
        down_shared_kernel,
        signature,
        shape | {"BIAS": False, "ADD": False},
        num_warps=WARPS,
        hot=True,
        archs=("sm_90",),
    )


AOT = (_aot(2048, 768, 128, 8, 1),)

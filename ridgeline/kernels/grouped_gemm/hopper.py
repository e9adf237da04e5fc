"""Experts' products for Hopper in 16-bit types: launches. hopper_stream.py streams weights where the memory is the
bound, hopper_tiles.py multiplies large tiles where the matrix units are, and hopper_plans.py chooses.

`grouped_down` writes every pair's product, and then adds up each token's: with thousands of tokens the second pass
moves a twelfth of the bytes that fit into the time of the first.

Legend: see op.py
    O  outputs of an expert (of each half if gated)
    I  inputs of an expert
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.kernels.aot import AotKernel
from ridgeline.kernels.gemm.hopper import PANEL, _descriptor_layout
from ridgeline.kernels.grouped_gemm.combine import combine
from ridgeline.kernels.grouped_gemm.forms import PLAIN, Form, form_of, tensors
from ridgeline.kernels.grouped_gemm.hopper_plans import (
    WIDE_BLOCK,
    Stream,
    Tiles,
    choose,
    choose_widening,
    stream,
    widening,
)
from ridgeline.kernels.grouped_gemm.hopper_stream import grouped_stream_kernel
from ridgeline.kernels.grouped_gemm.hopper_tiles import grouped_tiles_kernel
from ridgeline.kernels.grouped_gemm.matrices import Matrices, Quantized, shape_of
from ridgeline.kernels.launch import compute_capability, launch_options, num_multiprocessors
from ridgeline.kernels.route.op import Routes


def supports(x: Tensor, weight: Matrices, *, gated: bool = False) -> bool:
    """Return True if the op of these arguments can run: on Hopper, in 16-bit types, with widths above 64 that are
    multiples of 8, and up to 1024 experts. If the second op can, so can the first.

    Triton 3.6 cannot compile the kernels for a single block of inputs.
    """
    if not isinstance(weight, Tensor):
        return _streams(x, weight, gated)
    weight_EOI = weight
    experts, outputs, inputs = weight_EOI.shape
    typed = x.dtype == weight_EOI.dtype and x.dtype in (torch.bfloat16, torch.float16)
    shaped = min(inputs, outputs) > PANEL.value and inputs % 8 == outputs % 8 == 0 and experts <= 1024
    return typed and shaped and weight_EOI.is_contiguous() and compute_capability(x.device) == (9, 0)


def _streams(x: Tensor, weight: Quantized, gated: bool) -> bool:
    """Return True if the product with matrices in FP8 or codes can run: beside bfloat16, with widths above 128 that are
    multiples of 32, and with scales of codes that are turned."""
    form, (experts, outputs, inputs) = form_of(weight), shape_of(weight)
    if form is None or form.zeros or x.dtype != torch.bfloat16 or compute_capability(x.device) != (9, 0):
        return False
    each = outputs // 2 if gated else outputs
    fits = each % 32 == 0 and inputs % 32 == 0 and inputs > WIDE_BLOCK and experts <= 1024
    if form.kind == "fp8":
        return fits and (form.span == 1 or not gated or each % form.span == 0)
    return fits and form.group <= WIDE_BLOCK and form.scales != "e4m3" and form.turned


def grouped_gate_up(
    x_TM: Tensor,
    weight_EGM: Tensor,
    bias_EG: Tensor | None,
    routes: Routes,
    gate: str,
    plan: Stream | Tiles | None = None,
) -> Tensor:
    """Compute `op.grouped_gate_up`. Rows of pairs that nobody computes stay as the memory was.

    This op and the next one go together: `grouped_down` may read the routes before the kernel ahead of it has ended,
    and counts on this op to have waited for them.
    """
    return products(x_TM, weight_EGM, bias_EG, routes, gate, plan)


def grouped_down(
    h_PF: Tensor, weight_EMF: Tensor, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None,
    plan: Stream | Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Compute `op.grouped_down`, with every pair's product rounded to the dtype of `h_PF`. It must follow
    `grouped_gate_up` of this module."""
    return combine(products(h_PF, weight_EMF, bias_EM, routes, "", plan), routes, add_TM, shape_of(weight_EMF)[0])


def products(
    x: Tensor, weight: Matrices, bias_EO: Tensor | None, routes: Routes, gate: str,
    plan: Stream | Tiles | None = None, y_PO: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return act(gate) * up if there is a gate, otherwise the products: [P, O]. y_PO: where they are written, if some
    experts' are there already."""
    (experts, outputs, inputs), device, pairs = shape_of(weight), x.device, len(routes.token_P)
    rows = experts * outputs
    outputs = outputs // 2 if gate else outputs
    plain = isinstance(weight, Tensor)
    plan = plan or (choose if plain else choose_widening)(pairs, experts, inputs, gated=gate != "")
    if y_PO is None:
        y_PO = torch.empty(pairs, outputs, dtype=x.dtype, device=device)
    x = x.contiguous()
    bias = x if bias_EO is None else bias_EO  # any pointer will do where there is no bias
    processors = num_multiprocessors(device)
    named = {"E": experts, "INPUTS": inputs, "OUTPUTS": outputs, "GATHER": gate != "", "BIAS": bias_EO is not None}
    if isinstance(plan, Tiles):
        assert isinstance(weight, Tensor)
        weight_RI = weight.view(rows, inputs)
        grouped_tiles_kernel[(processors,)](
            x, _descriptor(x, 128), _descriptor(weight_RI, 128), bias, routes.token_P, routes.start_E1, y_PO,
            _ticket(device), **named, GATE=gate, STAGES=plan.stages, num_warps=4, **launch_options(device),
        )  # fmt: skip
        return y_PO
    programs = processors * plan.resident
    size = programs * plan.rows * plan.tokens * (2 if gate else 1)
    sums = torch.empty(size, dtype=torch.float32, device=device)
    if isinstance(weight, Tensor):
        box, scale, factor, form = _descriptor(weight.view(rows, inputs), plan.rows), x, x, PLAIN
    else:
        known = form_of(weight)
        assert known is not None
        stored, scale, _, factor = tensors(weight)
        box, form = _byte_descriptor(stored.view(rows, -1), plan.rows, plan.block // known.per_byte), known.constants()
    told = {name: form[name] for name in ("KIND", "GROUP", "SPAN", "SCALES", "FACTOR", "LIFT")}
    grouped_stream_kernel[(programs,)](
        x, box, scale, factor, bias, routes.token_P, routes.start_E1, y_PO, sums, _flags(device),
        **named, **told, GATE=gate, ROWS=plan.rows, TOKENS=plan.tokens, NARROW=plan.narrow, BLOCK=plan.block,
        STAGES=plan.stages, num_warps=plan.warps, maxnreg=plan.registers, **launch_options(device),
    )  # fmt: skip
    return y_PO


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, PANEL.value], _descriptor_layout())


def _byte_descriptor(stored: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(
        stored, list(stored.shape), list(stored.stride()), [rows, columns], _byte_layout(columns)
    )  # fmt: skip


@cache
def _byte_layout(columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=columns, element_bitwidth=8, rank=2)


# Both are made by the first eager launch, which comes before any graph is captured.


@cache
def _flags(device: torch.device) -> Tensor:
    """Return a flag for every program that may run at once. All are 0 between launches."""
    return torch.zeros(2 * num_multiprocessors(device), dtype=torch.int32, device=device)


@cache
def _ticket(device: torch.device) -> Tensor:
    """Return the counter of drawn items. It is 0 between launches."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _box(rows: int) -> str:
    return f"tensordesc<bf16[{rows}, {PANEL.value}],{_descriptor_layout()!r}>"


def _aot(
    plan: Stream | Tiles, experts: int, inputs: int, outputs: int, gate: str, *, bias: bool = False,
    form: Form | None = None,
) -> AotKernel:  # fmt: skip
    named = {"E": experts, "INPUTS": inputs, "OUTPUTS": outputs, "GATHER": gate != "", "BIAS": bias, "GATE": gate}
    named["STAGES"] = plan.stages
    signature = {"x_ptr": "*bf16", "w_desc": _box(128), "bias_ptr": "*bf16", "token_ptr": "*i32", "start_ptr": "*i32"}
    signature["y_ptr"] = "*bf16"
    if isinstance(plan, Tiles):
        kernel, warps = grouped_tiles_kernel, 4
        signature |= {"x_desc": _box(128), "ticket_ptr": "*i32"}
    else:
        kernel, warps = grouped_stream_kernel, plan.warps
        named |= {"ROWS": plan.rows, "TOKENS": plan.tokens, "NARROW": plan.narrow, "BLOCK": plan.block}
        told = PLAIN if form is None else form.constants()
        named |= {name: told[name] for name in ("KIND", "GROUP", "SPAN", "SCALES", "FACTOR", "LIFT")}
        signature |= {"w_desc": _box(plan.rows), "sums_ptr": "*fp32", "flag_ptr": "*i32", "factor_ptr": "*fp32"}
        signature["scale_ptr"] = "*bf16" if form is None else "*u8" if form.scales == "e8m0" else "*fp32"
        if form is not None:
            columns = plan.block // form.per_byte
            signature["w_desc"] = f"tensordesc<u8[{plan.rows}, {columns}],{_byte_layout(columns)!r}>"
            if form.kind == "levels":
                signature["scale_ptr"] = "*fp16"
    # A tile's roles keep a few of their arguments on the stack
    hot = isinstance(plan, Stream)
    return AotKernel(kernel, signature, named, num_warps=warps, hot=hot, tensor_cores="HGMMA", archs=("sm_90",))


_MXFP4 = Form("e2m1", 32, scales="e8m0", turned=True)
AOT = (
    _aot(stream(64, 16, 8, 64, 2048, gated=True), 128, 2048, 768, "silu"),
    _aot(stream(128, 64, 16, 64, 2880, gated=False), 32, 2880, 2880, "", bias=True),
    _aot(Tiles(), 128, 2048, 768, "silu"),
    _aot(Tiles(), 32, 2880, 2880, "swiglu_clamped", bias=True),
    _aot(Tiles(), 128, 768, 2048, ""),
    _aot(widening(64, 16, 8, gated=True), 32, 2880, 2880, "swiglu_clamped", bias=True, form=_MXFP4),
    _aot(widening(64, 64, 16, gated=False), 32, 2880, 2880, "", bias=True, form=_MXFP4),
    _aot(widening(64, 32, 8, gated=True), 128, 2048, 768, "silu", form=Form("fp8", 128, 128)),
    _aot(widening(64, 16, 8, gated=False), 128, 768, 2048, "", form=Form("fp8", 768)),
    _aot(widening(128, 16, 8, gated=False, resident=1), 8, 14_336, 4096, "", form=Form("levels", 128, turned=True)),
)

"""Experts' products for Hopper: launches. hopper_stream.py streams weights where the memory is the bound,
hopper_tiles.py multiplies large tiles where the matrix units are, and hopper_plans.py chooses.

Weights are in 16 bits, in FP8 or MXFP8, whose activations are rounded once before, or in MXFP4 or four-bit levels as
packed.py has them, which become bfloat16 in registers.

`grouped_down` writes every pair's product, and a second pass adds up those of each token. With thousands of tokens the
second pass moves a twelfth of the bytes that fit into the time of the first.

Legend: see op.py
    O  outputs of an expert (of each half if gated)
    I  inputs of an expert
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.counters import counters, meeting
from ridgeline.kernels.base.launch import compute_capability, launch_options, num_multiprocessors
from ridgeline.kernels.base.tuned import GpuKind, remembered, tuned
from ridgeline.kernels.base.weight_format import Activations
from ridgeline.kernels.gemm.experts.combine import combine
from ridgeline.kernels.gemm.experts.hopper_plans import (
    CODED_BLOCK,
    PANEL,
    Stream,
    Tiles,
    choose,
    choose_coded,
    choose_fp8,
    choose_mxfp8,
    class_of,
    stream,
)
from ridgeline.kernels.gemm.experts.hopper_stream import grouped_stream_kernel
from ridgeline.kernels.gemm.experts.hopper_tiles import grouped_tiles_kernel
from ridgeline.kernels.gemm.experts.matrices import Matrices, is_mxfp8, shape_of
from ridgeline.kernels.gemm.experts.packed import TILE, Packed
from ridgeline.kernels.gemm.fp8.op import Fp8
from ridgeline.kernels.gemm.fp8.rounding import round_rows
from ridgeline.kernels.gemm.plain.op import Operand
from ridgeline.kernels.gemm.route.op import Routes
from ridgeline.kernels.hopper.ring import box, descriptor

SPAN = 128  # outputs, and inputs, of a block of FP8
GROUP = 32  # inputs of a row of MXFP8 that share an exponent


def supports(x: Tensor, weight: Matrices, *, gated: bool = False) -> bool:
    """Return True if the op of these arguments can run on this GPU: on Hopper, with up to 1024 experts, and with more
    inputs and outputs than a block has. If the second op can, so can the first.

    Plain weights are in 16-bit types, with widths that are multiples of 8. FP8 stands beside bfloat16 and rounded
    activations, with widths that are multiples of 16, and gates that end with a block if there are any; MXFP8 likewise,
    with inputs in whole blocks. MXFP4 stands beside bfloat16 and is packed, as four-bit levels are.

    Triton 3.6 cannot compile the kernels for a single block of inputs.
    """
    experts, outputs, inputs = shape_of(weight)
    each = outputs // 2 if gated else outputs
    if experts > 1024 or compute_capability(x.device) != (9, 0):
        return False
    if isinstance(weight, Packed):
        return x.dtype == torch.bfloat16 and each % TILE == 0 and inputs > CODED_BLOCK
    if is_mxfp8(weight):
        shaped = min(inputs, each) > SPAN and inputs % SPAN == each % 16 == 0
        return x.dtype == torch.bfloat16 and shaped
    if isinstance(weight, Fp8):
        known = weight.format.block or weight.format.activations in ("token", "static")
        whole = not weight.format.block or not gated or each % SPAN == 0
        shaped = min(inputs, each) > SPAN and inputs % 16 == each % 16 == 0
        return x.dtype == torch.bfloat16 and weight.format.activations is not None and known and whole and shaped
    if not isinstance(weight, Tensor):
        return False
    typed = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    return typed and min(inputs, outputs) > PANEL and inputs % 8 == outputs % 8 == 0 and weight.is_contiguous()


def grouped_gate_up(
    x_TM: Tensor, weight_EGM: Matrices, bias_EG: Tensor | None, routes: Routes, gate: str,
    plan: Stream | Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Compute `op.grouped_gate_up`. Rows of pairs with none of these experts are not written.

    This op and the next one go together: `grouped_down` may read the routes before the kernel ahead of it has ended,
    and counts on this op to have waited for them.
    """
    return products(x_TM, weight_EGM, bias_EG, routes, gate, plan)


def grouped_down(
    h_PF: Tensor, weight_EMF: Matrices, bias_EM: Tensor | None, routes: Routes, add_TM: Tensor | None,
    plan: Stream | Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Compute `op.grouped_down`, with every pair's product rounded to the dtype of `h_PF`. It must follow
    `grouped_gate_up` of this module."""
    return combine(products(h_PF, weight_EMF, bias_EM, routes, "", plan), routes, add_TM, shape_of(weight_EMF)[0])


class _Operands(NamedTuple):
    """The operands of kernels: the rows of x and their scales, the weights' numbers, scales and zeros, each expert's
    factor, and the constants that say what they are. Any tensor stands for one that is not there."""

    x: Tensor
    x_scale: Tensor
    weight: Tensor
    scale: Tensor
    zero: Tensor
    factor: Tensor
    constants: dict[str, Any]


def _operands(x: Tensor, weight: Matrices) -> _Operands:
    """Return the operands. Activations beside FP8 are rounded here, with a scale for each row, or for each 128 inputs
    of it if weights have scales of blocks. Both are finer than a static scale."""
    x = x.contiguous()
    experts, outputs, inputs = shape_of(weight)
    if isinstance(weight, Tensor):
        return _Operands(x, x, weight.view(experts * outputs, inputs), x, x, x, _constants(""))
    if isinstance(weight, Fp8):
        mode: Activations = "block" if weight.format.block else "token"
        rounded, _ = round_rows(Operand(x), torch.float8_e4m3fn, mode)
        numbers = weight.weight_OI.view(experts * outputs, inputs)
        blocked = SPAN if weight.format.block else 1
        return _Operands(rounded.q_TI, rounded.scale, numbers, weight.scale_SC, x, x, _constants("fp8", blocked))
    if is_mxfp8(weight):
        rounded, _ = round_rows(Operand(x), torch.float8_e4m3fn, "block")
        numbers = weight.code_OB.view(torch.float8_e4m3fn).view(experts * outputs, inputs)
        exponents, factor = weight.scale_OG.view(torch.int32), x if weight.scale is None else weight.scale
        constants = _constants("fp8", GROUP, factor=weight.scale is not None)
        return _Operands(rounded.q_TI, rounded.scale, numbers, exponents, x, factor, constants)
    assert isinstance(weight, Packed)
    words = weight.code_OB.view(torch.int16).view(-1, 64)
    factor = x if weight.scale is None else weight.scale
    how = weight.format
    constants = _constants(how.values, how.group, factor=weight.scale is not None)
    constants["ZEROS"] = weight.zero_OG is not None
    zero = x if weight.zero_OG is None else weight.zero_OG
    return _Operands(x, x, words, weight.scale_OG, zero, factor, constants)


def _constants(kind: str, span: int = 1, *, factor: bool = False) -> dict[str, Any]:
    return {"KIND": kind, "SPAN": span, "FACTOR": factor, "ZEROS": False}


def form_of_stack(weight: Matrices) -> str:
    """Return the form of weights in classes of shapes: "" for plain ones."""
    if isinstance(weight, Fp8):
        return "fp8 blocks" if weight.format.block else "fp8"
    if isinstance(weight, Packed):
        return weight.format.values
    return "mxfp8" if is_mxfp8(weight) else ""


def _plan(weight: Matrices, pairs: int, device: torch.device, *, gated: bool) -> Stream | Tiles:
    """Return the cut that was the fastest on this kind of GPU, or else the one that a rule gives."""
    gpu = GpuKind(compute_capability(device), num_multiprocessors(device))
    found = _known(form_of_stack(weight), pairs, shape_of(weight), gated, gpu)
    return found or _by_rule(weight, pairs, gated=gated)


@remembered
def _known(form: str, pairs: int, shape: tuple[int, int, int], gated: bool, gpu: GpuKind) -> Stream | Tiles | None:
    experts, outputs, inputs = shape
    of = class_of(form, pairs, experts, inputs, outputs // 2 if gated else outputs, gated=gated)
    found: Stream | Tiles | None = tuned("grouped_gate_up" if gated else "grouped_down", of, gpu, Stream, Tiles)
    return found


def _by_rule(weight: Matrices, pairs: int, *, gated: bool) -> Stream | Tiles:
    experts, _, inputs = shape_of(weight)
    if isinstance(weight, Packed):
        return choose_coded(pairs, experts, gated=gated, levels=weight.format.values == "levels")
    if is_mxfp8(weight):
        return choose_mxfp8(pairs, experts, inputs, gated=gated)
    if isinstance(weight, Fp8):
        return choose_fp8(pairs, experts, inputs, gated=gated, blocked=weight.format.block)
    return choose(pairs, experts, inputs, gated=gated)


def products(
    x: Tensor, weight: Matrices, bias_EO: Tensor | None, routes: Routes, gate: str,
    plan: Stream | Tiles | None = None, y_PO: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return act(gate) * up if there is a gate, otherwise the products: [P, O]. y_PO: where they are written, if some
    experts' are there already."""
    (experts, outputs, inputs), device, pairs = shape_of(weight), x.device, len(routes.token_P)
    outputs = outputs // 2 if gate else outputs
    plan = plan or _plan(weight, pairs, device, gated=gate != "")
    if y_PO is None:
        y_PO = torch.empty(pairs, outputs, dtype=x.dtype, device=device)
    on = _operands(x, weight)
    bias = x if bias_EO is None else bias_EO  # any pointer will do where there is no bias
    processors = num_multiprocessors(device)
    named = {"E": experts, "INPUTS": inputs, "OUTPUTS": outputs, "GATHER": gate != "", "BIAS": bias_EO is not None}
    if isinstance(plan, Tiles):
        told = {name: on.constants[name] for name in ("KIND", "SPAN")}
        grouped_tiles_kernel[(processors,)](
            on.x, descriptor(on.x, 128), descriptor(on.weight, plan.rows // 2), on.scale, on.x_scale, bias,
            routes.token_P, routes.start_E1, y_PO, meeting(device).ticket, len(x), **named, **told,
            ROWS=plan.rows, GATE=gate, STAGES=plan.stages, num_warps=4, **launch_options(device),
        )  # fmt: skip
        return y_PO
    programs = processors * plan.resident
    size = 2 * programs * plan.rows * plan.tokens * (2 if gate else 1)
    sums = torch.empty(size, dtype=torch.float32, device=device)
    rows = TILE // 2 if isinstance(weight, Packed) else plan.rows
    grouped_stream_kernel[(programs,)](
        on.x, descriptor(on.weight, rows), on.scale, on.zero, on.x_scale, on.factor, bias, routes.token_P,
        routes.start_E1, y_PO, sums, counters(device, programs), len(x),
        **named, **on.constants, GATE=gate, ROWS=plan.rows, TOKENS=plan.tokens, NARROW=plan.narrow, BLOCK=plan.block,
        STAGES=plan.stages, APART=plan.apart, num_warps=plan.warps, maxnreg=plan.registers, **launch_options(device),
    )  # fmt: skip
    return y_PO


_TYPES = {
    "": ("bf16", "bf16", "bf16"),
    "fp8": ("fp8e4nv", "fp8e4nv", "fp32"),
    "e2m1": ("bf16", "i16", "u8"),
    "levels": ("bf16", "i16", "fp16"),
}


def _aot(
    plan: Stream | Tiles, experts: int, inputs: int, outputs: int, gate: str, kind: str = "", span: int = 1, *,
    bias: bool = False,
) -> AotKernel:  # fmt: skip
    x, numbers, scale = ("fp8e4nv", "fp8e4nv", "i32") if (kind, span) == ("fp8", GROUP) else _TYPES[kind]
    named: dict[str, Any] = {"E": experts, "INPUTS": inputs, "OUTPUTS": outputs, "GATHER": gate != "", "BIAS": bias}
    named |= {"GATE": gate, "STAGES": plan.stages, "ROWS": plan.rows, "KIND": kind, "SPAN": span}
    signature = {"x_ptr": f"*{x}", "scale_ptr": f"*{scale}", "x_scale_ptr": "*fp32", "bias_ptr": "*bf16"}
    signature |= {"token_ptr": "*i32", "start_ptr": "*i32", "y_ptr": "*bf16", "x_rows": "i32"}
    unit = "QGMMA" if kind == "fp8" else "HGMMA"
    if isinstance(plan, Tiles):
        signature |= {"x_desc": box(x, 128), "w_desc": box(numbers, plan.rows // 2), "ticket_ptr": "*i32"}
        # A tile's roles keep a few of their arguments on the stack
        return AotKernel(grouped_tiles_kernel, signature, named, num_warps=4, tensor_cores=unit, archs=("sm_90",))
    named |= {"TOKENS": plan.tokens, "NARROW": plan.narrow, "BLOCK": plan.block, "FACTOR": False}
    named |= {"APART": plan.apart, "ZEROS": False}
    signature |= {"w_desc": box(numbers, TILE // 2 if kind in ("e2m1", "levels") else plan.rows)}
    signature |= {"zero_ptr": "*u8", "sums_ptr": "*fp32", "flag_ptr": "*i32", "factor_ptr": "*fp32"}
    # Consumers of codes keep where they leave unfinished sums on the stack, outside of their loops
    return AotKernel(
        grouped_stream_kernel, signature, named, num_warps=plan.warps, registers=plan.registers,
        hot=kind in ("", "fp8"), tensor_cores="MMA" if plan.apart else unit, archs=("sm_90",),
    )  # fmt: skip


AOT = (
    _aot(stream(64, 16, 8, 64, 2048, gated=True), 128, 2048, 768, "silu"),
    _aot(stream(128, 64, 16, 64, 2880, gated=False), 32, 2880, 2880, "", bias=True),
    _aot(Tiles(), 128, 2048, 768, "silu"),
    _aot(Tiles(), 32, 2880, 2880, "swiglu_clamped", bias=True),
    _aot(Tiles(), 128, 768, 2048, ""),
    _aot(choose_coded(4, 32, gated=True), 32, 2880, 2880, "swiglu_clamped", "e2m1", 32, bias=True),
    _aot(choose_coded(1024, 32, gated=True), 32, 2880, 2880, "swiglu_clamped", "e2m1", 32, bias=True),
    _aot(choose_coded(4, 32, gated=False), 32, 2880, 2880, "", "e2m1", 32, bias=True),
    _aot(choose_coded(64, 128, gated=True, levels=True), 128, 2048, 768, "silu", "levels", 128),
    _aot(choose_coded(2048, 128, gated=False, levels=True), 128, 768, 2048, "", "levels", 128),
    _aot(choose_mxfp8(8, 128, 2048, gated=True), 128, 2048, 768, "silu", "fp8", GROUP),
    _aot(choose_mxfp8(8192, 128, 2048, gated=True), 128, 2048, 768, "silu", "fp8", GROUP),
    _aot(choose_mxfp8(8, 128, 768, gated=False), 128, 768, 2048, "", "fp8", GROUP),
    _aot(choose_fp8(8, 128, 2048, gated=True, blocked=False), 128, 2048, 768, "silu", "fp8"),
    _aot(choose_fp8(8, 128, 768, gated=False, blocked=True), 128, 768, 2048, "", "fp8", SPAN),
    _aot(choose_fp8(2048, 128, 2048, gated=True, blocked=True), 128, 2048, 768, "silu", "fp8", SPAN),
    _aot(choose_fp8(8192, 128, 2048, gated=True, blocked=True), 128, 2048, 768, "silu", "fp8", SPAN),
    _aot(choose_fp8(8192, 128, 768, gated=False, blocked=False), 128, 768, 2048, "", "fp8"),
)

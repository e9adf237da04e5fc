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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.kernels.aot import AotKernel
from ridgeline.kernels.gemm.hopper import PANEL, _descriptor_layout
from ridgeline.kernels.grouped_gemm.combine import combine
from ridgeline.kernels.grouped_gemm.hopper_plans import Stream, Tiles, choose, stream
from ridgeline.kernels.grouped_gemm.hopper_stream import grouped_stream_kernel
from ridgeline.kernels.grouped_gemm.hopper_tiles import grouped_tiles_kernel
from ridgeline.kernels.launch import compute_capability, launch_options, num_multiprocessors
from ridgeline.kernels.route.op import Routes


def supports(x: Tensor, weight_EOI: Tensor) -> bool:
    """Return True if the op of these arguments can run: on Hopper, in 16-bit types, with widths above 64 that are
    multiples of 8, and up to 1024 experts. If the second op can, so can the first.

    Triton 3.6 cannot compile the kernels for a single block of inputs.
    """
    experts, outputs, inputs = weight_EOI.shape
    typed = x.dtype == weight_EOI.dtype and x.dtype in (torch.bfloat16, torch.float16)
    shaped = min(inputs, outputs) > PANEL.value and inputs % 8 == outputs % 8 == 0 and experts <= 1024
    return typed and shaped and weight_EOI.is_contiguous() and compute_capability(x.device) == (9, 0)


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
    return combine(products(h_PF, weight_EMF, bias_EM, routes, "", plan), routes, add_TM, len(weight_EMF))


def products(
    x: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, routes: Routes, gate: str,
    plan: Stream | Tiles | None = None, y_PO: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return act(gate) * up if there is a gate, otherwise the products: [P, O]. y_PO: where they are written, if some
    experts' are there already."""
    (experts, outputs, inputs), device, pairs = weight_EOI.shape, x.device, len(routes.token_P)
    outputs = outputs // 2 if gate else outputs
    plan = plan or choose(pairs, experts, inputs, gated=gate != "")
    if y_PO is None:
        y_PO = torch.empty(pairs, outputs, dtype=x.dtype, device=device)
    x, weight = x.contiguous(), weight_EOI.view(-1, inputs)
    bias = x if bias_EO is None else bias_EO  # any pointer will do where there is no bias
    processors = num_multiprocessors(device)
    named = {"E": experts, "INPUTS": inputs, "OUTPUTS": outputs, "GATHER": gate != "", "BIAS": bias_EO is not None}
    if isinstance(plan, Tiles):
        grouped_tiles_kernel[(processors,)](
            x, _descriptor(x, 128), _descriptor(weight, 128), bias, routes.token_P, routes.start_E1, y_PO,
            _ticket(device), **named, GATE=gate, STAGES=plan.stages, num_warps=4, **launch_options(device),
        )  # fmt: skip
        return y_PO
    programs = processors * plan.resident
    size = programs * plan.rows * plan.tokens * (2 if gate else 1)
    sums = torch.empty(size, dtype=torch.float32, device=device)
    grouped_stream_kernel[(programs,)](
        x, _descriptor(weight, plan.rows), bias, routes.token_P, routes.start_E1, y_PO, sums, _flags(device),
        **named, GATE=gate, ROWS=plan.rows, TOKENS=plan.tokens, NARROW=plan.narrow, BLOCK=plan.block,
        STAGES=plan.stages, num_warps=plan.warps, maxnreg=plan.registers, **launch_options(device),
    )  # fmt: skip
    return y_PO


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, PANEL.value], _descriptor_layout())


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


def _aot(plan: Stream | Tiles, experts: int, inputs: int, outputs: int, gate: str, *, bias: bool = False) -> AotKernel:
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
        signature |= {"w_desc": _box(plan.rows), "sums_ptr": "*fp32", "flag_ptr": "*i32"}
    # A tile's roles keep a few of their arguments on the stack
    hot = isinstance(plan, Stream)
    return AotKernel(kernel, signature, named, num_warps=warps, hot=hot, tensor_cores="HGMMA", archs=("sm_90",))


AOT = (
    _aot(stream(64, 16, 8, 64, 2048, gated=True), 128, 2048, 768, "silu"),
    _aot(stream(128, 64, 16, 64, 2880, gated=False), 32, 2880, 2880, "", bias=True),
    _aot(Tiles(), 128, 2048, 768, "silu"),
    _aot(Tiles(), 32, 2880, 2880, "swiglu_clamped", bias=True),
    _aot(Tiles(), 128, 768, 2048, ""),
)

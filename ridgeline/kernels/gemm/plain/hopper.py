"""Linear maps of 16-bit types on Hopper by hopper/stream.py: launches, for any numbers, and the kernel without scales.

Legend:
    T  tokens
    I  inputs
    O  outputs
    F  outputs of a gated pair
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import launch_options, num_multiprocessors
from ridgeline.kernels.gemm.plain.choose import Stream
from ridgeline.kernels.hopper.finish import shared_sums
from ridgeline.kernels.hopper.ring import box, descriptor
from ridgeline.kernels.hopper.stream import stream


@gluon.jit(do_not_specialize=["tokens"])
def stream_kernel(
    x_desc, w_desc, bias_ptr, y_ptr, sums_ptr, arrival_ptr, tokens, outputs, inputs,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [T, O] of 16-bit types; see `stream`."""
    stream(
        x_desc, w_desc, None, None, bias_ptr, y_ptr, None, sums_ptr, arrival_ptr, tokens, outputs, inputs,
        ROWS, TOKENS, BLOCK, STAGES, SPLIT, False, 0, False, False, BIAS, GATE, False, PDL,
    )  # fmt: skip


class Launch(NamedTuple):
    """The needs of a launch of hopper/stream.py beside its operands.

    named: the constants of the cut.
    options: what Triton takes.
    """

    programs: int
    x: TensorDescriptor
    weight: TensorDescriptor
    sums: Tensor
    arrivals: Tensor
    named: dict[str, Any]
    options: dict[str, Any]


def prepared(plan: Stream, x_TI: Tensor, weight_OI: Tensor, gate: str | None, stand_in: Tensor) -> Launch:
    """Return the launch of a product, of any type of numbers. stand_in: any float32 or 16-bit tensor of the device."""
    tokens, device, parts = len(x_TI), x_TI.device, 2 if gate else 1
    items = plan.items(tokens, len(weight_OI) // parts)
    programs = items if plan.split > 1 else min(items, num_multiprocessors(device))
    sums, arrivals = shared_sums(items * plan.rows * plan.tokens * parts, items // plan.split, plan.split, stand_in)
    options = {"num_warps": plan.rows // 16, **launch_options(device)}
    x, weight = descriptor(x_TI, min(plan.tokens, 32)), descriptor(weight_OI.contiguous(), plan.rows)
    return Launch(programs, x, weight, sums, arrivals, plan.named | {"GATE": gate or ""}, options)


def launch_stream(plan: Stream, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gate: str | None) -> Tensor:
    """Return x · weightᵀ + bias: [T, O], or with a gate act(first half) * second half: [T, F]. 16-bit types."""
    (tokens, inputs), outputs = x_TI.shape, len(weight_OI) // (2 if gate else 1)
    y_TO = x_TI.new_empty(tokens, outputs)
    on = prepared(plan, x_TI, weight_OI, gate, x_TI)
    stream_kernel[(on.programs,)](
        on.x, on.weight, x_TI if bias_O is None else bias_O, y_TO, on.sums, on.arrivals, tokens, outputs, inputs,
        **on.named, BIAS=bias_O is not None, **on.options,
    )  # fmt: skip
    return y_TO


def aot(
    kernel: Any, plan: Stream, kind: str, signature: dict[str, str], constants: dict[str, Any], unit: str,
    waits: str = "",
) -> AotKernel:  # fmt: skip
    """Return an entry for a kernel of hopper/stream.py with this cut. kind: of the numbers that are multiplied."""
    named = {"x_desc": box(kind, min(plan.tokens, 32)), "w_desc": box(kind, plan.rows)}
    named |= {"bias_ptr": "*bf16", "y_ptr": "*bf16", "sums_ptr": "*fp32", "arrival_ptr": "*i32"}
    named |= {"tokens": "i32", "outputs": "i32:16", "inputs": "i32:16"} | signature
    return AotKernel(
        kernel, named, plan.named | constants, num_warps=plan.rows // 16, hot=True, tensor_cores=unit, waits=waits,
        archs=("sm_90",),
    )  # fmt: skip


AOT = (
    aot(stream_kernel, Stream(128, 64, 64, 5), "bf16", {}, {"BIAS": False, "GATE": "silu"}, "HGMMA"),
    aot(stream_kernel, Stream(64, 128, 128, 4, 4), "bf16", {}, {"BIAS": False, "GATE": ""}, "HGMMA"),
)

"""Products of 8-bit numbers on Hopper: launches of hopper/stream.py and of hopper_tiles.py.

Legend:
    T  tokens
    O  outputs
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import launch_options, num_multiprocessors
from ridgeline.kernels.base.weight_format import BLOCK
from ridgeline.kernels.gemm.fp8 import choose
from ridgeline.kernels.gemm.fp8.choose import Tiles
from ridgeline.kernels.gemm.fp8.eight import Eight
from ridgeline.kernels.gemm.fp8.hopper_tiles import tiles_kernel
from ridgeline.kernels.gemm.plain.choose import Stream
from ridgeline.kernels.gemm.plain.hopper import aot, prepared
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.hopper.ring import box, descriptor
from ridgeline.kernels.hopper.stream import stream


@gluon.jit(do_not_specialize=["tokens"])
def stream_kernel(
    x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, y_scale_ptr, sums_ptr, arrival_ptr,
    tokens, outputs, inputs,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    GROUPS: gl.constexpr, BLOCKED: gl.constexpr, PROMOTE: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr,
    ROUND: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [T, O] of 8-bit numbers; see `stream`."""
    stream(
        x_desc, w_desc, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, y_scale_ptr, sums_ptr, arrival_ptr, tokens, outputs,
        inputs, ROWS, TOKENS, BLOCK, STAGES, SPLIT, True, GROUPS, BLOCKED, PROMOTE, BIAS, GATE, ROUND, PDL,
    )  # fmt: skip


def launch_stream(
    plan: Stream, x: Rounded, weight: Eight, bias_O: Tensor | None, gate: str | None, buffer: Rounded | None = None
) -> Tensor:
    """Return x · weightᵀ + bias: [T, O], or with a gate act(first half) * second half, in the dtype of x, or in E4M3 in
    `buffer`."""
    (tokens, inputs), parts = x.q_TI.shape, 2 if gate else 1
    outputs = len(weight.number_OI) // parts
    assert x.grouped or not weight.blocked
    groups = choose.groups(plan, inputs) if x.grouped else 0
    plan = choose.fitting(plan, parts, groups)
    if buffer is None:
        y_TO, y_scale = torch.empty(tokens, outputs, dtype=x.dtype, device=x.q_TI.device), x.scale
    else:
        assert plan.rows == BLOCK
        assert outputs % BLOCK == 0
        y_TO, y_scale = buffer.q_TI, buffer.scale
    on = prepared(plan, x.q_TI, weight.number_OI, gate, x.scale)
    stream_kernel[(on.programs,)](
        on.x, on.weight, x.scale, weight.scale, y_TO if bias_O is None else bias_O, y_TO, y_scale, on.sums,
        on.arrivals, tokens, outputs, inputs, **on.named, GROUPS=groups, BLOCKED=weight.blocked,
        PROMOTE=x.grouped or _promotes(plan, weight), BIAS=bias_O is not None, ROUND=buffer is not None, **on.options,
    )  # fmt: skip
    return y_TO


def launch_tiles(plan: Tiles, x: Rounded, weight: Eight, bias_O: Tensor | None, gate: str | None) -> Tensor:
    """Return the result of `launch_stream` in the dtype of x: [T, O]."""
    assert x.grouped == weight.blocked
    (tokens, inputs), device = x.q_TI.shape, x.q_TI.device
    outputs = len(weight.number_OI) // 2 if gate else len(weight.number_OI)
    promote = _promotes(plan, weight)
    rows = 128 if promote else 256
    tiles = triton.cdiv(tokens, plan.tokens) * triton.cdiv(outputs, rows // 2 if gate else rows)
    y_TO = torch.empty(tokens, outputs, dtype=x.dtype, device=device)
    tiles_kernel[(min(tiles, num_multiprocessors(device)),)](
        descriptor(x.q_TI, plan.tokens), descriptor(weight.number_OI, rows // 2), x.scale, weight.scale,
        y_TO if bias_O is None else bias_O, y_TO, tokens, outputs, inputs, TOKENS=plan.tokens, STAGES=plan.stages,
        BLOCKED=weight.blocked, PROMOTE=promote, BIAS=bias_O is not None, GATE=gate or "", num_warps=4,
        **launch_options(device),
    )  # fmt: skip
    return y_TO


def _promotes(plan: Stream | Tiles, weight: Eight) -> bool:
    return weight.blocked or (plan.promote and weight.number_OI.dtype != torch.int8)


def _aot(
    plan: Stream | Tiles, kind: str, gate: str, *, blocked: bool = False, inputs: int = 0, rounds: bool = False
) -> AotKernel:
    """inputs: those of a product whose activations have a scale for each 128; 0 for others."""
    signature = dict.fromkeys(("x_scale_ptr", "w_scale_ptr"), "*fp32")
    flags: dict[str, Any] = {"BLOCKED": blocked, "PROMOTE": inputs > 0 or plan.promote, "BIAS": False, "GATE": gate}
    unit = "IGMMA" if kind == "i8" else "QGMMA"
    if isinstance(plan, Tiles):
        signature |= {"x_desc": box(kind, plan.tokens), "w_desc": box(kind, 64 if flags["PROMOTE"] else 128)}
        signature |= dict.fromkeys(("bias_ptr", "y_ptr"), "*bf16")
        signature |= {"tokens": "i32", "outputs": "i32:16", "inputs": "i32:16"}
        named = flags | {"TOKENS": plan.tokens, "STAGES": plan.stages}
        return AotKernel(tiles_kernel, signature, named, num_warps=4, tensor_cores=unit, archs=("sm_90",))
    groups = choose.groups(plan, inputs) if inputs else 0
    signature |= {"y_scale_ptr": "*fp32"} | ({"y_ptr": "*fp8e4nv", "bias_ptr": "*fp8e4nv"} if rounds else {})
    constants = {"GROUPS": groups, "ROUND": rounds} | flags
    return aot(stream_kernel, choose.fitting(plan, 2 if gate else 1, groups), kind, signature, constants, unit)


AOT = (
    _aot(Stream(128, 64, 128, 5), "fp8e4nv", "silu"),
    _aot(Stream(64, 32, 256, 4, 4, promote=True), "fp8e4nv", ""),
    _aot(Stream(128, 64, 128, 5), "fp8e4nv", "silu", blocked=True, inputs=4096),
    _aot(Stream(128, 64, 128, 5), "fp8e4nv", "silu", rounds=True),
    _aot(Stream(64, 16, 256, 10, 2), "fp8e4nv", "", inputs=14_336),
    _aot(Stream(64, 64, 256, 6), "fp8e4nv", "", inputs=4096),
    _aot(Stream(128, 16, 256, 5, 4), "fp8e4nv", "", inputs=4096, rounds=True),
    _aot(Stream(64, 64, 256, 4, 4), "i8", ""),
    _aot(Tiles(), "fp8e4nv", "silu"),
    _aot(Tiles(), "fp8e4nv", ""),
    _aot(Tiles(6, promote=True), "fp8e4nv", ""),
    _aot(Tiles(6, promote=True), "fp8e4nv", "", blocked=True),
    _aot(Tiles(4, promote=True, tokens=256), "fp8e4nv", "", blocked=True),
    _aot(Tiles(4, promote=True, tokens=256), "fp8e4nv", "silu", blocked=True),
    _aot(Tiles(), "i8", ""),
)

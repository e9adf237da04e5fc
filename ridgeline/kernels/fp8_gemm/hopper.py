"""Products of 8-bit numbers on Hopper: launches of hopper_stream.py and of hopper_tiles.py.

Legend:
    T  tokens
    O  outputs
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.core.weight_format import BLOCK
from ridgeline.kernels.aot import AotKernel
from ridgeline.kernels.fp8_gemm import choose
from ridgeline.kernels.fp8_gemm.choose import PANEL, Stream, Tiles
from ridgeline.kernels.fp8_gemm.eight import Eight
from ridgeline.kernels.fp8_gemm.hopper_stream import stream_kernel
from ridgeline.kernels.fp8_gemm.hopper_tiles import tiles_kernel
from ridgeline.kernels.fp8_gemm.rounded import Rounded
from ridgeline.kernels.gemm.hopper import _arrivals
from ridgeline.kernels.launch import launch_options, num_multiprocessors


def launch_stream(
    plan: Stream, x: Rounded, weight: Eight, bias_O: Tensor | None, gate: str | None, room: Rounded | None = None
) -> Tensor:
    """Return x · weightᵀ + bias: [T, O], or with a gate act(first half) * second half, in the dtype of x, or in E4M3 in
    `room`."""
    (tokens, inputs), device = x.q_TI.shape, x.q_TI.device
    outputs = len(weight.number_OI) // 2 if gate else len(weight.number_OI)
    assert x.grouped or not weight.blocked
    groups = choose.groups(plan, inputs) if x.grouped else 0
    plan = choose.fitting(plan, 2 if gate else 1, groups)
    tiles = triton.cdiv(outputs, plan.rows) * triton.cdiv(tokens, plan.tokens)
    programs = min(tiles * plan.split, num_multiprocessors(device))
    if room is None:
        y_TO, y_scale = torch.empty(tokens, outputs, dtype=x.dtype, device=device), x.scale
    else:
        assert plan.rows == BLOCK
        assert outputs % BLOCK == 0
        y_TO, y_scale = room.q_TI, room.scale
    sums, arrivals = x.scale, x.scale  # any pointer will do where nothing is split
    if plan.split > 1:
        assert programs == tiles * plan.split
        size = programs * plan.rows * plan.tokens * (2 if gate else 1)
        sums = torch.empty(size, dtype=torch.float32, device=device)
        arrivals = _arrivals(device)[plan.split]
    stream_kernel[(programs,)](
        _descriptor(x.q_TI, min(plan.tokens, 32)), _descriptor(weight.number_OI, plan.rows), x.scale, weight.scale,
        y_TO if bias_O is None else bias_O, y_TO, y_scale, sums, arrivals, tokens, outputs, inputs,
        ROWS=plan.rows, TOKENS=plan.tokens, BLOCK=plan.block, STAGES=plan.stages, SPLIT=plan.split, GROUPS=groups,
        BLOCKED=weight.blocked, PROMOTE=x.grouped or _promotes(plan, weight), BIAS=bias_O is not None, GATE=gate or "",
        ROUND=room is not None, num_warps=plan.rows // 16, **launch_options(device),
    )  # fmt: skip
    return y_TO


def launch_tiles(plan: Tiles, x: Rounded, weight: Eight, bias_O: Tensor | None, gate: str | None) -> Tensor:
    """Return what `launch_stream` does."""
    assert x.grouped == weight.blocked
    (tokens, inputs), device = x.q_TI.shape, x.q_TI.device
    outputs = len(weight.number_OI) // 2 if gate else len(weight.number_OI)
    promote = _promotes(plan, weight)
    rows = 128 if promote else 256
    tiles = triton.cdiv(tokens, plan.tokens) * triton.cdiv(outputs, rows // 2 if gate else rows)
    y_TO = torch.empty(tokens, outputs, dtype=x.dtype, device=device)
    tiles_kernel[(min(tiles, num_multiprocessors(device)),)](
        _descriptor(x.q_TI, plan.tokens), _descriptor(weight.number_OI, rows // 2), x.scale, weight.scale,
        y_TO if bias_O is None else bias_O, y_TO, tokens, outputs, inputs, TOKENS=plan.tokens, STAGES=plan.stages,
        BLOCKED=weight.blocked, PROMOTE=promote, BIAS=bias_O is not None, GATE=gate or "", num_warps=4,
        **launch_options(device),
    )  # fmt: skip
    return y_TO


def _promotes(plan: Stream | Tiles, weight: Eight) -> bool:
    return weight.blocked or (plan.promote and weight.number_OI.dtype != torch.int8)


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, PANEL], _descriptor_layout())


@cache
def _descriptor_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


def _box(kind: str, rows: int) -> str:
    return f"tensordesc<{kind}[{rows}, {PANEL}],{_descriptor_layout()!r}>"


def _aot(
    plan: Stream | Tiles, kind: str, gate: str, *, blocked: bool = False, inputs: int = 0, rounds: bool = False
) -> AotKernel:
    """inputs: those of a product whose activations have a scale for each 128; 0 for others."""
    signature = dict.fromkeys(("x_scale_ptr", "w_scale_ptr"), "*fp32") | dict.fromkeys(("bias_ptr", "y_ptr"), "*bf16")
    signature |= {"tokens": "i32", "outputs": "i32:16", "inputs": "i32:16"}
    flags = {"BLOCKED": blocked, "PROMOTE": inputs > 0 or plan.promote, "BIAS": False, "GATE": gate}
    unit = "IGMMA" if kind == "i8" else "QGMMA"
    if isinstance(plan, Tiles):
        signature |= {"x_desc": _box(kind, plan.tokens), "w_desc": _box(kind, 64 if flags["PROMOTE"] else 128)}
        named = flags | {"TOKENS": plan.tokens, "STAGES": plan.stages}
        return AotKernel(tiles_kernel, signature, named, num_warps=4, tensor_cores=unit, archs=("sm_90",))
    groups = choose.groups(plan, inputs) if inputs else 0
    plan = choose.fitting(plan, 2 if gate else 1, groups)
    signature |= {"x_desc": _box(kind, min(plan.tokens, 32)), "w_desc": _box(kind, plan.rows)}
    signature |= {"y_scale_ptr": "*fp32", "sums_ptr": "*fp32", "arrival_ptr": "*i32"}
    signature |= {"y_ptr": "*fp8e4nv", "bias_ptr": "*fp8e4nv"} if rounds else {}
    cut = {"ROWS": plan.rows, "TOKENS": plan.tokens, "BLOCK": plan.block, "STAGES": plan.stages, "SPLIT": plan.split}
    cut |= {"GROUPS": groups, "ROUND": rounds}
    warps = plan.rows // 16
    return AotKernel(
        stream_kernel, signature, cut | flags, num_warps=warps, hot=True, tensor_cores=unit, archs=("sm_90",)
    )


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

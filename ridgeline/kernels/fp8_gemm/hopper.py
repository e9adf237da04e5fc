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

from ridgeline.kernels.aot import AotKernel
from ridgeline.kernels.fp8_gemm.choose import PANEL, Stream, Tiles
from ridgeline.kernels.fp8_gemm.eight import Eight
from ridgeline.kernels.fp8_gemm.hopper_stream import stream_kernel
from ridgeline.kernels.fp8_gemm.hopper_tiles import tiles_kernel
from ridgeline.kernels.fp8_gemm.rounding import Rounded
from ridgeline.kernels.gemm.hopper import _arrivals
from ridgeline.kernels.launch import launch_options, num_multiprocessors


def launch_stream(
    plan: Stream, x: Rounded, weight: Eight, bias_O: Tensor | None, gate: str | None, dtype: torch.dtype
) -> Tensor:
    """Return x · weightᵀ + bias: [T, O], or with a gate act(first half) * second half, in `dtype`."""
    (tokens, inputs), device = x.q_TI.shape, x.q_TI.device
    outputs = len(weight.number_OI) // 2 if gate else len(weight.number_OI)
    tiles = triton.cdiv(outputs, plan.rows) * triton.cdiv(tokens, plan.tokens)
    programs = min(tiles * plan.split, num_multiprocessors(device))
    y_TO = torch.empty(tokens, outputs, dtype=dtype, device=device)
    sums, arrivals = x.scale, x.scale  # any pointer will do where nothing is split
    if plan.split > 1:
        assert programs == tiles * plan.split
        size = programs * plan.rows * plan.tokens * (2 if gate else 1)
        sums = torch.empty(size, dtype=torch.float32, device=device)
        arrivals = _arrivals(device)[plan.split]
    stream_kernel[(programs,)](
        _descriptor(x.q_TI, min(plan.tokens, 32)), _descriptor(weight.number_OI, plan.rows), x.scale, weight.scale,
        y_TO if bias_O is None else bias_O, y_TO, sums, arrivals, tokens, outputs, inputs,
        ROWS=plan.rows, TOKENS=plan.tokens, BLOCK=plan.block, STAGES=plan.stages, SPLIT=plan.split,
        BLOCKED=weight.blocked, PROMOTE=_promotes(plan, weight), BIAS=bias_O is not None, GATE=gate or "",
        num_warps=plan.rows // 16, **launch_options(device),
    )  # fmt: skip
    return y_TO


def launch_tiles(
    plan: Tiles, x: Rounded, weight: Eight, bias_O: Tensor | None, gate: str | None, dtype: torch.dtype
) -> Tensor:
    """Return what `launch_stream` does."""
    (tokens, inputs), device = x.q_TI.shape, x.q_TI.device
    outputs = len(weight.number_OI) // 2 if gate else len(weight.number_OI)
    promote = _promotes(plan, weight)
    rows = 128 if promote else 256
    tiles = triton.cdiv(tokens, 128) * triton.cdiv(outputs, rows // 2 if gate else rows)
    y_TO = torch.empty(tokens, outputs, dtype=dtype, device=device)
    tiles_kernel[(min(tiles, num_multiprocessors(device)),)](
        _descriptor(x.q_TI, 128), _descriptor(weight.number_OI, rows // 2), x.scale, weight.scale,
        y_TO if bias_O is None else bias_O, y_TO, tokens, outputs, inputs, STAGES=plan.stages, BLOCKED=weight.blocked,
        PROMOTE=promote, BIAS=bias_O is not None, GATE=gate or "", num_warps=4,
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


def _aot(plan: Stream | Tiles, kind: str, gate: str, *, blocked: bool) -> AotKernel:
    signature = dict.fromkeys(("x_scale_ptr", "w_scale_ptr"), "*fp32") | dict.fromkeys(("bias_ptr", "y_ptr"), "*bf16")
    signature |= {"tokens": "i32", "outputs": "i32:16", "inputs": "i32:16"}
    flags = {"BLOCKED": blocked, "PROMOTE": blocked or plan.promote, "BIAS": False, "GATE": gate}
    unit = "IGMMA" if kind == "i8" else "QGMMA"
    if isinstance(plan, Tiles):
        signature |= {"x_desc": _box(kind, 128), "w_desc": _box(kind, 64 if flags["PROMOTE"] else 128)}
        named = flags | {"STAGES": plan.stages}
        return AotKernel(tiles_kernel, signature, named, num_warps=4, tensor_cores=unit, archs=("sm_90",))
    signature |= {"x_desc": _box(kind, min(plan.tokens, 32)), "w_desc": _box(kind, plan.rows)}
    signature |= {"sums_ptr": "*fp32", "arrival_ptr": "*i32"}
    cut = {"ROWS": plan.rows, "TOKENS": plan.tokens, "BLOCK": plan.block, "STAGES": plan.stages, "SPLIT": plan.split}
    warps = plan.rows // 16
    return AotKernel(
        stream_kernel, signature, cut | flags, num_warps=warps, hot=True, tensor_cores=unit, archs=("sm_90",)
    )


AOT = (
    _aot(Stream(128, 64, 128, 5), "fp8e4nv", "silu", blocked=False),
    _aot(Stream(64, 32, 256, 4, 4, promote=True), "fp8e4nv", "", blocked=False),
    _aot(Stream(128, 64, 128, 5), "fp8e4nv", "silu", blocked=True),
    _aot(Stream(64, 64, 256, 4, 4), "i8", "", blocked=False),
    _aot(Tiles(), "fp8e4nv", "silu", blocked=False),
    _aot(Tiles(), "fp8e4nv", "", blocked=False),
    _aot(Tiles(6, promote=True), "fp8e4nv", "", blocked=False),
    _aot(Tiles(6, promote=True), "fp8e4nv", "", blocked=True),
    _aot(Tiles(6, promote=True), "fp8e4nv", "silu", blocked=True),
    _aot(Tiles(), "i8", "", blocked=False),
)

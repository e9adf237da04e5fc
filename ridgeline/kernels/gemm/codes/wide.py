"""Linear maps of weights in fragments, for dozens to hundreds of tokens on Hopper: codes become the left operands of
warpgroup products in registers, while bulk copies bring x into shared memory.

A fragment of `mma.sync` is also what one warp of a warpgroup holds, so the order of fragments.py serves here as it is.
It gives each thread neighbouring inputs, whereas warpgroups read x from shared memory with its places in order. So a
small kernel first puts the columns of x in the order of places (places.py).

Two warpgroups of a program own MANY · 64 rows each: neighbours, or with a gate the gates and their ups. Each goes its
own way (wide_products.py). A third partition, one warp, streams x (wide_load.py). Weights are asked for before the
kernel before has ended, since they are never written.

Scales multiply the codes in the same instruction that takes the zero away, so sums stay in the matrix units'
accumulators from the first input to the last, and while these multiply a unit the next one's operands are made. A
weight is thereby rounded to x's type, as a dequantized one is. Programs stay and take tiles in turn; codes of the next
tile are asked for before the last sums of this one are written. If tiles are few, SPLIT programs share the inputs of
one, as in hopper/stream.py.

Legend:
    R  rows of a warpgroup
    P  places of a slice, 16
    T  tokens of a tile
    G  groups of a unit
"""

# mypy: disable-error-code="assignment, misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import launch_options, num_multiprocessors
from ridgeline.kernels.base.weight_format import CodedFormat
from ridgeline.kernels.gemm.codes.choose import Wide
from ridgeline.kernels.gemm.codes.fragments import Fragments, span, unit
from ridgeline.kernels.gemm.codes.fragments_asm import scaled
from ridgeline.kernels.gemm.codes.op import Q4_K, W4
from ridgeline.kernels.gemm.codes.places import in_places
from ridgeline.kernels.gemm.codes.wide_load import _producer, _ring
from ridgeline.kernels.gemm.codes.wide_products import _consumer
from ridgeline.kernels.hopper.finish import shared_sums
from ridgeline.kernels.hopper.gluon_names import barriers
from ridgeline.kernels.hopper.ring import box, descriptor


@gluon.jit(do_not_specialize=["tokens"])
def wide_kernel(
    x_desc, code_ptr, scale_ptr, zero_ptr, outer_ptr, outer_minimum_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr,
    arrival_ptr, tokens, outputs,
    inputs: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, ASM: gl.constexpr, EVEN: gl.constexpr,
    ODD: gl.constexpr, ZERO: gl.constexpr, POWER: gl.constexpr, ZEROS: gl.constexpr, NESTED: gl.constexpr,
    GROUP: gl.constexpr, UNIT: gl.constexpr, MANY: gl.constexpr, TOKENS: gl.constexpr, TILES: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, FACTOR: gl.constexpr, BIAS: gl.constexpr,
    GATE: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [T, O]. x's columns are in the order of places.

    code: int16. LOW, HIGH: bits of the planes; HIGH is 0 if there is only one.
    EVEN, ODD, ZERO, POWER: see `Scaled`.
    TILES: tiles of TOKENS tokens.
    REGISTERS: of a thread that multiplies.
    DEPTH: units of codes that are asked for ahead.
    sums, arrival: as in hopper/stream.py, for tiles of one warpgroup's rows. With a SPLIT there is a program for
    every item.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    UNITS: gl.constexpr = inputs // UNIT
    PANEL: gl.constexpr = x_desc.block_shape[1]
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES * (UNIT // PANEL), TOKENS, PANEL], x_desc.layout)
    ROWS: gl.constexpr = 64 * MANY if GATE != "" else 1
    COLUMNS: gl.constexpr = TOKENS if GATE != "" else 1
    ups = gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    low, high = _ring(DEPTH, 4 * MANY, UNIT * LOW), 0
    other_low, other_high = _ring(DEPTH, 4 * MANY, UNIT * LOW), 0
    if HIGH:
        high, other_high = _ring(DEPTH, 4 * MANY, UNIT * HIGH), _ring(DEPTH, 4 * MANY, UNIT * HIGH)
    full, empty = barriers(STAGES), barriers(STAGES, 2)
    # A barrier that nothing waits for would be no barrier to the compiler, which then puts other numbers in its place:
    # the hardware may write it back over them
    handed, taken = 0, 0
    if GATE != "":
        handed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(handed, count=1)
        mbarrier.init(taken, count=1)
    fence_async_shared()
    items = outputs // ((64 if GATE != "" else 128) * MANY) * TILES * SPLIT
    gl.warp_specialize(
        [
            (_consumer, (
                x, low, high, full, empty, ups, handed, taken, code_ptr, scale_ptr, zero_ptr, outer_ptr,
                outer_minimum_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, arrival_ptr, items, tokens, outputs,
                0, TILES, UNIT, UNITS, GROUP, MANY, TOKENS, DEPTH, STAGES, SPLIT,
                LOW, HIGH, ASM, EVEN, ODD, ZERO, POWER, ZEROS, NESTED, FACTOR, BIAS, GATE,
            )),
            (_consumer, (
                x, other_low, other_high, full, empty, ups, handed, taken, code_ptr, scale_ptr, zero_ptr, outer_ptr,
                outer_minimum_ptr, factor_ptr, bias_ptr, y_ptr, sums_ptr, arrival_ptr, items, tokens, outputs,
                1, TILES, UNIT, UNITS, GROUP, MANY, TOKENS, DEPTH, STAGES, SPLIT,
                LOW, HIGH, ASM, EVEN, ODD, ZERO, POWER, ZEROS, NESTED, FACTOR, BIAS, GATE,
            )),
            (_producer, (x_desc, x, full, empty, items, tokens, UNIT, UNITS, TOKENS, TILES, STAGES, SPLIT, PDL)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def _constants(plan: Wide, how: CodedFormat, inputs: int, dtype: torch.dtype) -> dict[str, Any]:
    low, high = (*how.planes(), 0)[:2]
    form = scaled(how, dtype)
    return {
        "inputs": inputs, "LOW": low, "HIGH": high, "ASM": form.asm, "EVEN": form.even, "ODD": form.odd,
        "ZERO": form.zero, "POWER": form.power, "ZEROS": how.zeros if how.values == "levels" else "middle",
        "NESTED": how.nested,
        "GROUP": how.group or inputs, "UNIT": unit(how), "MANY": plan.many, "TOKENS": plan.tokens,
        "DEPTH": plan.depth, "STAGES": plan.stages, "SPLIT": plan.split,
        "REGISTERS": (3 * plan.registers - 24) // 16 * 8,  # what three warpgroups have, less what the third needs
    }  # fmt: skip


def launch(
    plan: Wide, x_TI: Tensor, weight: Fragments, bias_O: Tensor | None, gate: str | None, placed: bool = False
) -> Tensor:
    """Return the product, gated if there is a gate. x's columns are in the order of the weight's, or already `placed`
    as the kernel reads them."""
    (tokens, inputs), how, device = x_TI.shape, weight.format, x_TI.device
    outputs = weight.code_OB.shape[0] // (2 if gate else 1)
    pairs = outputs // (plan.many * (64 if gate else 128))
    token_tiles = triton.cdiv(tokens, plan.tokens)
    items = pairs * token_tiles * plan.split
    y_TO = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=device)
    sums, arrivals = shared_sums(items * 2 * plan.many * 64 * plan.tokens, 2 * pairs * token_tiles, plan.split, x_TI)
    x_TI = x_TI if placed else in_places(x_TI, span(how))
    numbers = (weight.zero_OG, weight.outer_OS, weight.outer_minimum_OS, weight.scale, bias_O)
    some = [x_TI if x is None else x for x in numbers]
    programs = items if plan.split > 1 else min(items, num_multiprocessors(device))
    wide_kernel[(programs,)](
        descriptor(x_TI, min(plan.tokens, 32)), weight.code_OB.view(torch.int16), weight.scale_OG, *some, y_TO, sums,
        arrivals, tokens, outputs, **_constants(plan, how, inputs, x_TI.dtype), TILES=token_tiles,
        FACTOR=weight.scale is not None, BIAS=bias_O is not None, GATE=gate or "", num_warps=4,
        maxnreg=plan.registers, **launch_options(device),
    )  # fmt: skip
    return y_TO


def _aot(plan: Wide, gate: str, how: CodedFormat = W4, scale: str = "*fp16") -> AotKernel:
    signature = {"x_desc": box("bf16", min(plan.tokens, 32))}
    signature |= {"code_ptr": "*i16", "scale_ptr": scale, "zero_ptr": scale, "outer_ptr": "*fp16"}
    signature |= {"outer_minimum_ptr": "*fp16", "factor_ptr": "*fp32", "bias_ptr": "*bf16", "y_ptr": "*bf16"}
    signature |= {"sums_ptr": "*fp32", "arrival_ptr": "*i32", "tokens": "i32", "outputs": "i32:16"}
    constants = _constants(plan, how, 4096, torch.bfloat16) | {"TILES": 1, "FACTOR": False, "BIAS": False, "GATE": gate}
    # with 256 tokens two registers are spilled at the ends of tiles, none in between
    return AotKernel(
        wide_kernel,
        signature,
        constants,
        num_warps=4,
        registers=plan.registers,
        hot=plan.tokens < 256,
        tensor_cores="HGMMA",
        archs=("sm_90",),
    )


AOT = (
    _aot(Wide(many=2, tokens=64, depth=4, stages=4), "silu"),
    _aot(Wide(many=1, tokens=256, depth=6, stages=2), ""),
    _aot(Wide(many=1, tokens=64, depth=8, stages=5, split=4), "", Q4_K, "*i8"),
)

"""Weights in FP8 or codes as the left operand of Hopper's matrix units: they are widened to bfloat16 in registers, just
where the units expect them, so they pass through shared memory once and in their stored size.

A thread of the operand holds pairs of neighbouring inputs. Two neighbouring codes are one byte, so a byte becomes one
register, by bit moves that forms.py describes and one product with the scale; the root of what is missing is
multiplied to the sums. Scales of codes travel through the ring beside their weights, with the rows of a group together.

Legend:
    R  weight rows of a part
    B  inputs of a block, or their bytes
    G  groups of a block
    C  weight rows of one part, which are the outputs of a tile
    W  pairs of a tile
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from ridgeline.kernels.gemm.hopper import PANEL, _awaited
from ridgeline.kernels.gluon_names import load_rows, viewed
from ridgeline.kernels.grouped_gemm.hopper_walk import next_piece

INPUTS_OF_BLOCK = gl.constexpr(128)

_E2M1 = gl.constexpr("""{
.reg .b32 p, q;
mul.lo.u32 p, $2, 0x00040040;
mul.lo.u32 q, $2, 0x01001000;
and.b32 p, p, 0x01C001C0;
and.b32 q, q, 0x80008000;
or.b32 p, p, q;
mul.bf16x2 p, p, $3;
mov.b32 {$0, $1}, p;
}""")
_LEVELS = gl.constexpr("""{
.reg .b32 p, q;
mul.lo.u32 p, $2, 0x00001001;
and.b32 p, p, 0x000F000F;
or.b32 p, p, 0x43004300;
mov.b32 q, 0x43084308;
sub.bf16x2 p, p, q;
mul.bf16x2 p, p, $3;
mov.b32 {$0, $1}, p;
}""")
_E4M3 = gl.constexpr("""{
.reg .b32 p, q, r;
prmt.b32 p, $2, 0, 0x1404;
prmt.b32 q, $2, 0, 0x3424;
shr.b32 r, p, 4;
and.b32 r, r, 0x07F007F0;
and.b32 p, p, 0x80008000;
or.b32 p, p, r;
mul.bf16x2 $0, p, $3;
shr.b32 r, q, 4;
and.b32 r, r, 0x07F007F0;
and.b32 q, q, 0x80008000;
or.b32 q, q, r;
mul.bf16x2 $1, q, $3;
}""")


@gluon.constexpr_function
def _layout(rows, per_byte):
    """Return the layout of a block's bytes [R, B] in which a thread has those of its part of the operand."""
    lanes = [[1, 0], [2, 0], [4, 0]]
    warps = [[16 << i, 0] for i in range((int(rows) // 16).bit_length() - 1)]
    if int(per_byte) == 1:
        regs = [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32], [0, 64]]
        return gl.DistributedLinearLayout(regs, [[0, 2], [0, 4], *lanes], warps, [], [int(rows), 128])
    regs = [[8, 0], [0, 4], [0, 8], [0, 16], [0, 32]]
    return gl.DistributedLinearLayout(regs, [[0, 1], [0, 2], *lanes], warps, [], [int(rows), 64])


@gluon.constexpr_function
def _grouped(rows, groups):
    """Return the same layout with the bytes of each group apart: [R, G, B / G]."""
    flat = _layout(rows, 2)
    each = 64 // int(groups)

    def apart(basis):
        row, byte = basis
        return [row, byte // each, byte % each]

    regs, lanes, warps = ([apart(b) for b in bases] for bases in (flat.reg_bases, flat.lane_bases, flat.warp_bases))
    return gl.DistributedLinearLayout(regs, lanes, warps, [], [int(rows), int(groups), each])


@gluon.jit
def _packed(scale):
    """Return a bfloat16 twice in an int32."""
    bits = scale.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@gluon.jit
def _multipliers(s, ROWS: gl.constexpr, SCALES: gl.constexpr, LIFT: gl.constexpr):
    """Return the scales of a block's bytes [R, B], lifted, each twice in an int32. s: [G, R]."""
    GROUPS: gl.constexpr = s.shape[0]
    apart: gl.constexpr = _grouped(ROWS, GROUPS)
    scale_RG = s.permute((1, 0)).load(gl.SliceLayout(2, apart))
    if SCALES == "e8m0":
        bits = (scale_RG.to(gl.int32) + 63) << 7  # 2^63 is the lift of E2M1
        both_RG = bits | (bits << 16)
    else:
        both_RG = _packed(scale_RG.to(gl.float32) * LIFT)
    both = gl.expand_dims(both_RG, 2) + gl.zeros([ROWS, GROUPS, 64 // GROUPS], gl.int32, apart)
    return gl.convert_layout(both.reshape([ROWS, 64]), _layout(ROWS, 2))


@gluon.jit
def _operand(w, s, scalar, ROWS: gl.constexpr, KIND: gl.constexpr, SCALES: gl.constexpr, LIFT: gl.constexpr):
    """Return a block of weights [R, 128] in bfloat16. w: their bytes. s: their scales if they are codes. scalar: the
    multiplier of E4M3, twice in an int32."""
    if KIND == "fp8":
        byte = w.load(_layout(ROWS, 1))
        same = gl.full([ROWS, 128], 0, gl.int32, _layout(ROWS, 1)) + scalar
        wide = gl.inline_asm_elementwise(
            _E4M3, "=r,=r,r,r,r,r,r", [byte, same], dtype=gl.bfloat16, is_pure=True, pack=4
        )  # fmt: skip
    else:
        byte = w.load(_layout(ROWS, 2)).to(gl.int32)
        low, high = gl.inline_asm_elementwise(
            _E2M1 if KIND == "e2m1" else _LEVELS, "=h,=h,r,r", [byte, _multipliers(s, ROWS, SCALES, LIFT)],
            dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
        wide = gl.join(low, high).reshape([ROWS, 128])
    return wide


@gluon.jit
def first_rows(tile, WIDTH: gl.constexpr):
    """Return the first WIDTH rows of a panel of pairs."""
    layout: gl.constexpr = tile.layout
    return viewed(tile, [tile.shape[0] // WIDTH, WIDTH, PANEL], layout).index(0)


@gluon.jit
def widened_products(
    w, s, x, full, empty, scale_ptr, step, steps,
    ROWS: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    SPAN: gl.constexpr, SCALES: gl.constexpr, LIFT: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """Return the parts' sums, [C, W] each, of blocks of 128 inputs. They lack a factor LIFT, and scales of each output.

    scale_ptr: the scale of the first block, of FP8 in blocks. BEHIND: the second part's scales behind the first's.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, WIDTH, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    sums = ()
    for _ in gl.static_range(PARTS):
        sums = sums + (gl.zeros([ROWS, WIDTH], gl.float32, layout),)  # type: ignore[assignment]  # noqa: RUF005
    for i in range(steps):
        here = (step + i) % STAGES
        scalars = ()  # asked for before the wait, which takes longer
        for part in gl.static_range(PARTS):
            if KIND == "fp8" and SPAN > 1:
                scalar = _packed(gl.load(scale_ptr + part * BEHIND + i) * LIFT)
            else:
                scalar = i * 0 + 0x5D805D80  # 2^60, the lift of E4M3, twice
            scalars = scalars + (scalar,)  # type: ignore[assignment]  # noqa: RUF005
        mbarrier.wait(full.index(here), ((step + i) // STAGES) & 1)
        fence_async_shared()  # rows that threads copied are read by the matrix units next
        grown = ()
        for part in gl.static_range(PARTS):
            at = here * PARTS + part
            wide = _operand(w.index(at), s.index(at), scalars[part], ROWS, KIND, SCALES, LIFT)
            left, right = wide.reshape([ROWS, 2, 64]).permute((0, 2, 1)).split()
            sum_CW = sums[part]  # type: ignore[var-annotated]
            near = first_rows(x.index(here * 2), WIDTH).permute((1, 0))
            sum_CW = warpgroup_mma(gl.convert_layout(left, operand), near, sum_CW, is_async=True)
            far = first_rows(x.index(here * 2 + 1), WIDTH).permute((1, 0))
            sum_CW = warpgroup_mma(gl.convert_layout(right, operand), far, sum_CW, is_async=True)
            grown = grown + (sum_CW,)  # type: ignore[assignment]  # noqa: RUF005
        sums = _awaited(grown, 0, PARTS)
        mbarrier.arrive(empty.index(here), count=1)
    return sums


@gluon.jit
def rescaled(
    sums, scale_ptr, factor_ptr, expert, row,
    OUTPUTS: gl.constexpr, PARTS: gl.constexpr, KIND: gl.constexpr, SPAN: gl.constexpr, FACTOR: gl.constexpr,
    LIFT: gl.constexpr,
):  # fmt: skip
    """Return the sums with all that they lack."""
    grown = ()
    for part in gl.static_range(PARTS):
        sum_CW = sums[part] * LIFT
        if FACTOR:
            sum_CW = sum_CW * gl.load(factor_ptr + expert)
        if KIND == "fp8" and SPAN == 1:
            row_C = row + gl.arange(0, sum_CW.shape[0], gl.SliceLayout(1, sum_CW.type.layout))
            at_C = (expert * PARTS + part) * OUTPUTS + row_C
            sum_CW = sum_CW * gl.expand_dims(gl.load(scale_ptr + at_C, mask=row_C < OUTPUTS, other=0), 1)
        grown = grown + (sum_CW,)  # type: ignore[assignment]  # noqa: RUF005
    return grown


@gluon.jit
def scaler(
    scale_ptr, counts, s, full, empty, at, end, expert, place, first, count,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the scales of codes, for all items of this program. They lie as [E, groups, outputs]."""
    BLOCKS: gl.constexpr = (INPUTS + INPUTS_OF_BLOCK - 1) // INPUTS_OF_BLOCK
    GROUPS: gl.constexpr = INPUTS // GROUP
    EACH: gl.constexpr = s.shape[1]
    WIDE: gl.constexpr = 128 // s.dtype.primitive_bitwidth  # 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([1, WIDE], [32 * WIDE // ROWS, ROWS // WIDE], [1, 1], [1, 0])
    group_G1 = gl.expand_dims(gl.arange(0, EACH, gl.SliceLayout(1, layout)), 1)
    row_1R = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, layout)), 0)
    step = at * 0
    while at < end:
        row = place // ((count + (TOKENS - 1)) // TOKENS) * ROWS
        block = at % BLOCKS
        steps = gl.minimum(BLOCKS - block, end - at)
        for i in range(steps):
            here = (step + i) % STAGES
            mbarrier.wait(empty.index(here), (((step + i) // STAGES) & 1) ^ 1)
            local_G1 = (block + i) * EACH + group_G1
            mask = (local_G1 < GROUPS) & (row_1R < OUTPUTS - row)
            line_G1 = (expert * GROUPS + local_G1) * (PARTS * OUTPUTS) + row
            for part in gl.static_range(PARTS):
                load_rows(s.index(here * PARTS + part), scale_ptr + line_G1 + (part * OUTPUTS + row_1R), mask=mask)
            async_copy.mbarrier_arrive(full.index(here), increment_count=False)
        step += steps
        at += steps
        expert, place, first, count = next_piece(counts, at, end, expert, place, first, count, TOKENS, TILES)

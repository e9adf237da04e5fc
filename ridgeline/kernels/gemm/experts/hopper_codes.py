"""Weights of MXFP4 as the left operand of Hopper's matrix units: codes go through shared memory once and in their
stored size, in the order of packed.py, and become bfloat16 in the registers where the units expect them.

A thread reads 16 bytes for 32 codes. Two codes cost one to four moves of bits and one product with their scale, in all
15 instructions for 8 codes. A number placed so is too small by 2^126; scales lift half of that, and sums the rest, so
that neither leaves the range of their types.

Legend:
    R  weight rows of a part
    P  inputs of one product, 16
    C  weight rows of one part, which are the outputs of a tile
    W  pairs of a tile
"""

# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005 - Gluon knows no starred tuples
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from ridgeline.kernels.gemm.experts.hopper_sums import first_rows
from ridgeline.kernels.hopper.ring import awaited, sums_layout, zeros

LIFT = gl.constexpr(2.0**63)


def _instructions(left: int, sign_left: int) -> str:
    """Return the assembly that places codes of which magnitudes move by `left` bits, and signs by `sign_left`."""

    def moved(to: str, by: int) -> str:
        return f"{'shl' if by >= 0 else 'shr'}.b32 {to}, $1, {abs(by)};"

    asm = moved("a", left) + "and.b32 a, a, 0x81C081C0;"
    if sign_left != left:
        asm = moved("a", left) + "and.b32 a, a, 0x01C001C0;"
        asm += moved("b", sign_left) + "lop3.b32 a, b, 0x80008000, a, 0xea;"
    return "{ .reg .b32 a, b; " + asm + "mul.bf16x2 $0, a, $2; }"


_ASM = gl.constexpr(tuple(_instructions(left, sign) for left, sign in ((0, 0), (3, 3), (6, 2), (-3, 1))))


@gluon.constexpr_function
def _code_layout(tiles):
    """Return the layout [tiles · 32, 64] in which a thread has its 8 words of each of a stage's two panels."""
    warps = [[4, 0], [8, 0]] + [[32 << i, 0] for i in range(int(tiles).bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [16, 0]], lanes, warps, [], [32 * int(tiles), 64])


@gluon.constexpr_function
def _scale_layout(tiles):
    """Return the layout [tiles, 256] in which a thread has the scales of its rows in a stage's two panels."""
    warps = [[0, 32], [0, 64]] + [[1 << i, 0] for i in range(int(tiles).bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 128]], lanes, warps, [], [int(tiles), 256])


@gluon.jit
def _words(w, operand: gl.constexpr):
    """Return the words of both panels as left operands [R, P]. w: [tiles · 32, 64] int16."""
    TILES: gl.constexpr = w.shape[0] // 32
    raw = w.load(_code_layout(TILES)).reshape([TILES, 2, 4, 8, 4, 2, 2, 2])
    near, far = raw.permute([0, 2, 6, 3, 5, 4, 7, 1]).reshape([TILES * 64, 16, 2]).split()
    near = gl.convert_layout(near, operand, assert_trivial=True)
    return near, gl.convert_layout(far, operand, assert_trivial=True)


@gluon.jit
def _multiplier(scale_R, operand: gl.constexpr):
    """Return 2^63 times the scales as the bits of bfloat16, for all places of a product: [R, P]."""
    bits = ((scale_R.to(gl.int32) + 63) << 7).to(gl.int16)
    bits = gl.convert_layout(bits, gl.SliceLayout(1, operand), assert_trivial=True)
    return gl.expand_dims(bits, 1)


@gluon.jit
def _multipliers(s, operand: gl.constexpr):
    """Return the multipliers of a stage's four groups. s: [tiles, 256] bytes."""
    TILES: gl.constexpr = s.shape[0]
    raw = s.load(_scale_layout(TILES)).reshape([TILES, 2, 4, 8, 2, 2])  # tile, panel, warp, row of 8, half, group
    first, second = raw.permute([0, 2, 4, 3, 5, 1]).reshape([TILES * 64, 2, 2]).split()  # by panel
    a, b = first.split()
    c, d = second.split()
    return (
        (_multiplier(a, operand), _multiplier(b, operand)),
        (_multiplier(c, operand), _multiplier(d, operand)),
    )


@gluon.jit
def coded_products(
    w, s, x, full, empty, step, steps,
    ROWS: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return the parts' sums, [C, W] each, of stages of 128 inputs. The operands of four products are made while the
    four before are under way, which is as many as the registers hold. A stage is given back in the course of the
    next."""
    layout: gl.constexpr = sums_layout(ROWS, WIDTH, 16)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    sums = zeros(ROWS, WIDTH, PARTS, layout, gl.float32)
    for i in range(steps):
        here = (step + i) % STAGES
        mbarrier.wait(full.index(here), ((step + i) // STAGES) & 1)
        fence_async_shared()  # rows that threads copied are read by the matrix units next
        for part in gl.static_range(PARTS):
            words = _words(w.index(here * PARTS + part), operand)
            scales = _multipliers(s.index(here * PARTS + part), operand)
            for panel in gl.static_range(2):
                left = ()
                for j in gl.static_range(4):
                    given = [words[panel], scales[panel][j // 2]]
                    left = left + (gl.inline_asm_elementwise(_ASM[j], "=r,r,r", given, gl.bfloat16, True, 2),)
                sum_CW = sums[part]
                for j in gl.static_range(4):
                    right = first_rows(x.index(here * 2 + panel), WIDTH).slice(j * 16, 16, 1).permute((1, 0))
                    sum_CW = warpgroup_mma(left[j], right, sum_CW, is_async=True)
                sums = awaited(_replaced(sums, sum_CW, part, PARTS), 4, PARTS)
                if part == 0 and panel == 0:
                    mbarrier.arrive(empty.index((step + i + STAGES - 1) % STAGES), count=1, pred=i > 0)
    sums = awaited(sums, 0, PARTS)
    mbarrier.arrive(empty.index((step + steps + STAGES - 1) % STAGES), count=1)
    return sums


@gluon.jit
def _replaced(sums, new, part: gl.constexpr, PARTS: gl.constexpr):
    """Return the sums with a new one in the place of one part's."""
    if PARTS == 1:
        return (new,)
    elif part == 0:
        return new, sums[1]
    else:
        return sums[0], new


@gluon.jit
def lifted(sums, factor_ptr, expert, PARTS: gl.constexpr, FACTOR: gl.constexpr):
    """Return the sums with what they lack: half of the lift, and the expert's factor if there is one."""
    factor = LIFT
    if FACTOR:
        factor = gl.load(factor_ptr + expert) * LIFT
    grown = ()
    for part in gl.static_range(PARTS):
        grown = grown + (sums[part] * factor,)
    return grown

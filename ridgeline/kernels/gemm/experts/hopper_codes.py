"""Weights of MXFP4 or four-bit levels as the left operand of Hopper's matrix units: codes go through shared memory once
and in their stored size, in the order of packed.py, and become bfloat16 in the registers where the units expect them.

A thread reads 16 bytes for 32 codes. Two codes cost one to four moves of bits and one product with their scale, in all
13 instructions for 8 codes. A number placed so is too small by 2^126; scales lift half of that, and sums the rest, so
that neither leaves the range of their types.

A level is placed in the mantissa of 128, and 128 plus its zero is subtracted: 11 instructions for 8 codes. The sums of
a group are multiplied with its scale, so scales are not rounded.

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
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from ridgeline.kernels.gemm.experts.hopper_sums import first_rows
from ridgeline.kernels.hopper.ring import awaited, sums_layout, zeros

LIFT = gl.constexpr(2.0**63)


_PLACED = (
    "and.b32 a, $1, 0x81C081C0;",
    "shf.r.wrap.b32 a, $1, $1, 6; and.b32 a, a, 0x81C081C0;",
    "shl.b32 a, $1, 6; and.b32 a, a, 0x81C081C0;",
    "shf.r.wrap.b32 a, $1, $1, 4; and.b32 a, a, 0x80C080C0; shl.b32 b, $1, 4; lop3.b32 a, b, 0x01000100, a, 0xea;",
)  # each product's codes, at the places of bfloat16's sign, last two bits of the exponent and first of the mantissa
_ASM = gl.constexpr(tuple("{ .reg .b32 a, b; " + placed + " mul.bf16x2 $0, a, $2; }" for placed in _PLACED))
# Four exponents of scales, less 63 and at the place of bfloat16's, in two instructions for two of them
_SCALE_ASM = gl.constexpr(
    "{ .reg .b32 a, b; prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;"
    " mad.lo.u32 $0, a, 128, 0x1F801F80; mad.lo.u32 $1, b, 128, 0x1F801F80; }"
)


def _level_instructions(right: int) -> str:
    """Return the assembly that makes numbers of the levels of which the bits move by `right`."""
    asm = f"shr.b32 a, $1, {right}; lop3.b32 a, a, 0x000F000F, 0x43004300, 0xea;"
    return "{ .reg .b32 a; " + asm + "add.bf16x2 $0, a, $2; }"


_LEVEL_ASM = gl.constexpr(tuple(_level_instructions(4 * j) for j in range(4)))


@gluon.constexpr_function
def _code_layout(tiles, warps):
    """Return the layout [tiles · 32, 64] in which a thread has its 8 words of each of a stage's two panels. Four warps
    have all tiles, or more warps one each."""
    lanes, more = [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]], [[32 << i, 0] for i in range(int(tiles).bit_length() - 1)]
    several, apart = ([], more) if int(warps) == 4 else (more, [])
    registers = [[0, 1], [0, 2], [0, 4], [16, 0], *apart]
    return gl.DistributedLinearLayout(registers, lanes, [[4, 0], [8, 0], *several], [], [32 * int(tiles), 64])


@gluon.constexpr_function
def _scale_layout(tiles, warps):
    """Return the layout [tiles, 256] in which a thread has the scales of its rows in a stage's two panels."""
    lanes, more = [[0, 0], [0, 0], [0, 4], [0, 8], [0, 16]], [[1 << i, 0] for i in range(int(tiles).bit_length() - 1)]
    several, apart = ([], more) if int(warps) == 4 else (more, [])
    registers = [[0, 1], [0, 2], [0, 128], *apart]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 32], [0, 64], *several], [], [int(tiles), 256])


@gluon.constexpr_function
def _group_layout(tiles, each):
    """Return the layout [tiles, 64 · each] in which one of four warps' threads has the scales of its rows of the sums,
    `each` for each row of a stage."""
    n, more = int(each), [[1 << i, 0] for i in range(int(tiles).bit_length() - 1)]
    registers = [*([0, 1 << i] for i in range(n.bit_length() - 1)), [0, n], *more]
    lanes = [[0, 0], [0, 0], [0, 2 * n], [0, 4 * n], [0, 8 * n]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 16 * n], [0, 32 * n]], [], [int(tiles), 64 * n])


@gluon.jit
def _words(w, operand: gl.constexpr):
    """Return the words of both panels as left operands [R, P]. w: [tiles · 32, 64] int16."""
    TILES: gl.constexpr = w.shape[0] // 32
    raw = w.load(_code_layout(TILES, gl.num_warps())).reshape([TILES, 2, 4, 8, 4, 2, 2, 2])
    near, far = raw.permute([0, 2, 6, 3, 5, 4, 7, 1]).reshape([TILES * 64, 16, 2]).split()
    near = gl.convert_layout(near, operand, assert_trivial=True)
    return near, gl.convert_layout(far, operand, assert_trivial=True)


@gluon.jit
def _multiplier(bits_R, operand: gl.constexpr):
    """Return multipliers of rows for all places of a product: [R, P]."""
    return gl.expand_dims(gl.convert_layout(bits_R, gl.SliceLayout(1, operand), assert_trivial=True), 1)


@gluon.jit
def _multipliers(s, operand: gl.constexpr):
    """Return 2^63 times the scales of a stage's four groups, as the bits of bfloat16. s: [tiles, 256] bytes."""
    TILES: gl.constexpr = s.shape[0]
    bytes = s.load(_scale_layout(TILES, gl.num_warps()))
    bits = gl.inline_asm_elementwise(_SCALE_ASM, "=r,=r,r", [bytes], gl.int16, True, 4)
    raw = bits.reshape([TILES, 2, 4, 8, 2, 2])  # tile, panel, warp, row of 8, half, group
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
def _operand(words, scales, j: gl.constexpr, LEVELS: gl.constexpr):
    """Return the left operand [R, P] of a panel's product j. scales: of levels what their zeros subtract."""
    if LEVELS:
        return gl.inline_asm_elementwise(_LEVEL_ASM[j], "=r,r,r", [words, scales], gl.bfloat16, True, 2)
    else:
        return gl.inline_asm_elementwise(_ASM[j], "=r,r,r", [words, scales[j // 2]], gl.bfloat16, True, 2)


@gluon.jit
def _panel(words, scales, operand: gl.constexpr, LEVELS: gl.constexpr):
    """Return the left operand [R, 64] of all products of a panel. scales: as `_operand` has them."""
    low = gl.join(_operand(words, scales, 0, LEVELS), _operand(words, scales, 1, LEVELS))
    both = gl.join(low, gl.join(_operand(words, scales, 2, LEVELS), _operand(words, scales, 3, LEVELS)))
    wide = both.permute((0, 3, 2, 1)).reshape([words.shape[0], 64])
    return gl.convert_layout(wide, operand, assert_trivial=True)


@gluon.jit
def _by_group(s, row: gl.constexpr):
    """Return the scales or zeros of each group of a stage's levels, [R, 1] each. s: [tiles, 64 · groups]."""
    TILES: gl.constexpr = s.shape[0]
    EACH: gl.constexpr = s.shape[1] // 64
    raw = s.load(_group_layout(TILES, EACH)).reshape([TILES, 4, 8, 2, EACH])  # warp, row of 8, half
    x = raw.permute((0, 1, 3, 2, 4)).reshape([TILES * 64, EACH])
    if EACH == 1:
        return (gl.expand_dims(gl.convert_layout(x.reshape([TILES * 64]), row, assert_trivial=True), 1),)
    else:
        first, second = x.split()
        first = gl.convert_layout(first, row, assert_trivial=True)
        return gl.expand_dims(first, 1), gl.expand_dims(gl.convert_layout(second, row, assert_trivial=True), 1)


@gluon.jit
def _less(zero):
    """Return the bits of -128 - zero as bfloat16."""
    return zero.to(gl.int16) + (-0x3D00)


@gluon.jit
def _part(w, s, z, columns, sum_CW, operand: gl.constexpr, LEVELS: gl.constexpr, ZEROS: gl.constexpr):
    """Return the sums of a part with those of a stage. columns: the right operands of both panels."""
    words = _words(w, operand)
    if LEVELS:
        layout: gl.constexpr = sum_CW.type.layout
        scales = _by_group(s, gl.SliceLayout(1, layout))
        zeros_ = (gl.full([sum_CW.shape[0], 1], 8, gl.int16, operand),)
        if ZEROS:
            zeros_ = _by_group(z, gl.SliceLayout(1, operand))
        zero_CW = gl.zeros([sum_CW.shape[0], sum_CW.shape[1]], gl.float32, layout)
        own_CW = zero_CW
        for panel in gl.static_range(2):
            less = _less(zeros_[panel % len(zeros_)])
            own_CW = mma_v2(_panel(words[panel], less, operand, LEVELS), columns[panel], own_CW)
            if panel == 1 or len(scales) == 2:
                sum_CW += own_CW * scales[panel % len(scales)].to(gl.float32)
                own_CW = zero_CW
    else:
        multipliers = _multipliers(s, operand)
        for panel in gl.static_range(2):
            sum_CW = mma_v2(_panel(words[panel], multipliers[panel], operand, LEVELS), columns[panel], sum_CW)
    return sum_CW


@gluon.jit
def coded_warp_products(
    w, s, z, x, full, empty, step, steps,
    ROWS: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, LEVELS: gl.constexpr,
    ZEROS: gl.constexpr,
):  # fmt: skip
    """Return the sums of `coded_products`, by products of single warps. For few columns these take fewer instructions:
    no fence, no group to begin or await. A stage is given back at the beginning of the next one, when all that was
    read of it has been multiplied."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    sums = zeros(ROWS, WIDTH, PARTS, layout, gl.float32)
    for i in range(steps):
        here = (step + i) % STAGES
        mbarrier.arrive(empty.index((step + i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        mbarrier.wait(full.index(here), ((step + i) // STAGES) & 1)
        columns = ()
        for panel in gl.static_range(2):
            columns = columns + (first_rows(x.index(here * 2 + panel), WIDTH).permute((1, 0)).load(right),)
        grown = ()
        for part in gl.static_range(PARTS):
            at = here * PARTS + part
            own_z = z.index(at if ZEROS else 0)
            grown = grown + (_part(w.index(at), s.index(at), own_z, columns, sums[part], operand, LEVELS, ZEROS),)
        sums = grown
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
def lifted(sums, factor_ptr, expert, PARTS: gl.constexpr, FACTOR: gl.constexpr, LEVELS: gl.constexpr):
    """Return the sums with what they lack: half of the lift of MXFP4, and the expert's factor if there is one."""
    factor = 1.0 if LEVELS else LIFT
    if FACTOR:
        factor = gl.load(factor_ptr + expert) * factor
    grown = ()
    for part in gl.static_range(PARTS):
        grown = grown + (sums[part] * factor,)
    return grown

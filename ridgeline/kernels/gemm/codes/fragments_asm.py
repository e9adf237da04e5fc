"""Codes in registers → operands of the matrix units, two at a time: bit operations that place a code in the mantissa of
a number of which a constant is then subtracted.

128 + code is exact in bfloat16 for codes of up to 7 bits, and 1024 + code in float16 for all. E2M1 has the layout of a
small float, so shifts place its exponent and its mantissa; a product then corrects the bias of the exponent.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ridgeline.kernels.base.weight_format import CodedFormat
from ridgeline.kernels.gemm.codes.fragments import SLICE, unit
from ridgeline.kernels.gemm.codes.op import TABLES

_MAGIC = {"bf16": (0x4300, 128), "fp16": (0x6400, 1024)}  # the bits of a number, and the number
_ONE = {"bf16": 0x3F80, "fp16": 0x3C00}
_PTX = {"bf16": "bf16x2", "fp16": "f16x2"}
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _twice(bits: int) -> str:
    return f"0x{bits << 16 | bits:08x}"


def _bits(value: float, dtype: str) -> int:
    """Return the bits of a number that the type can hold, or the nearest that it can."""
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    return int(torch.tensor(value, dtype=kind).view(torch.int16)) & 0xFFFF


def _shifted(to: str, source: str, left: int) -> str:
    """Return an instruction that shifts to the left, or to the right if `left` is negative."""
    if left == 0:
        return f"mov.b32 {to}, {source};"
    return f"{'shl' if left > 0 else 'shr'}.b32 {to}, {source}, {abs(left)};"


def _added(to: str, value: str, other: str, dtype: str) -> str:
    """Return an instruction that adds: a fused product with one, since sm_80 has no sum of bfloat16."""
    return f"mov.b32 one, {_twice(_ONE[dtype])}; fma.rn.{_PTX[dtype]} {to}, {value}, one, {other};"


def _levels(i: int, low: int, high: int, dtype: str, zeros: bool) -> str:
    magic, number = _MAGIC[dtype]
    at, width = i % (16 // low) * low, low + high
    asm = _shifted("a", "$1", -at) + f"lop3.b32 a, a, {_twice((1 << low) - 1)}, {_twice(magic)}, 0xea;"
    if high:
        at = i % (16 // high) * high
        asm += _shifted("b", "$2", low - at) + f"lop3.b32 a, b, {_twice(((1 << high) - 1) << low)}, a, 0xea;"
    if zeros:
        return asm + _added("$0", "a", f"${3 if high else 2}", dtype)
    return asm + f"mov.b32 c, {_twice(_bits(-number - 2.0 ** (width - 1), dtype))};" + _added("$0", "a", "c", dtype)


def _minimum(i: int, low: int, high: int, dtype: str) -> str:
    """Return instructions for levels of which nothing is subtracted here."""
    _, number = _MAGIC[dtype]
    width = low + high
    middle = _twice(_bits(-number - 2.0 ** (width - 1), dtype))
    return _levels(i, low, high, dtype, False).replace(middle, _twice(_bits(-number, dtype)))


def _bytes(i: int, dtype: str, zeros: bool, middle: bool) -> str:
    """Return instructions for codes of 8 bits. bfloat16 holds code - 128: 128 plus the low 7 bits, less 128 or 256."""
    asm = _shifted("a", "$1", -8 * (i % 2))
    if dtype == "fp16":
        asm += "lop3.b32 a, a, 0x00ff00ff, 0x64006400, 0xea;"
        if zeros:
            return asm + _added("$0", "a", "$2", dtype)
        return (
            asm + f"mov.b32 c, {_twice(_bits(-1152.0 if middle else -1024.0, dtype))};" + _added("$0", "a", "c", dtype)
        )
    asm += "lop3.b32 b, a, 0x00800080, 0x43804380, 0x6a; lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea;"
    asm += f"mov.b32 one, {_twice(_bits(-1.0, dtype))}; fma.rn.bf16x2 a, b, one, a;"
    if zeros:
        return asm + _added("$0", "a", "$2", dtype)
    if middle:
        return asm + "mov.b32 $0, a;"
    return asm + f"mov.b32 c, {_twice(_bits(128.0, dtype))};" + _added("$0", "a", "c", dtype)


def _e2m1(i: int, dtype: str) -> str:
    j = i % 4
    place = {"bf16": 6, "fp16": 9}[dtype]
    asm = _shifted("a", "$1", place - 3 * j) + f"and.b32 a, a, {_twice(7 << place)};"
    asm += _shifted("b", "$1", 3 - j) + "lop3.b32 a, b, 0x80008000, a, 0xea;"
    factor = _bits(2.0**126 if dtype == "bf16" else 2.0**14, dtype)
    return asm + f"mov.b32 one, {_twice(factor)}; mov.b32 c, 0x80008000; fma.rn.{_PTX[dtype]} $0, a, one, c;"


def _table(i: int, values: str, dtype: str) -> str:
    """Return instructions that look codes up, byte by byte: `prmt` chooses among eight bytes for four codes at once.

    The eight codes of a word take 27 instructions together: all but the last one or two are the same for its four
    slices, and the compiler drops what it has already.
    """
    bits = [_bits(value, dtype) for value in TABLES[values]]

    def four(first: int, shift: int) -> str:
        return f"0x{sum((bits[first + k] >> shift & 0xFF) << 8 * k for k in range(4)):08x}"

    # the selectors: the codes' low three bits, and which half of the table each is from
    asm = "and.b32 a, $1, 0x77777777; shr.b32 b, $1, 3; and.b32 b, b, 0x11111111;"
    for half in range(2):
        if half:
            asm += "mov.b32 one, l; shr.b32 a, a, 16; shr.b32 b, b, 16;"
        asm += "mov.b32 c, 0x0000ff00; prmt.b32 e, c, c, b;"
        for name, shift in (("l", 0), ("h", 8)):
            asm += f"mov.b32 c, {four(0, shift)}; mov.b32 d, {four(4, shift)}; prmt.b32 {name}, c, d, a;"
            asm += f"mov.b32 c, {four(8, shift)}; mov.b32 d, {four(12, shift)}; prmt.b32 c, c, d, a;"
            asm += f"lop3.b32 {name}, c, {name}, e, 0xe4;"
        asm += f"prmt.b32 l, l, h, {('0x5140', '0x7362')[i % 4 // 2]};"
    return asm + f"prmt.b32 $0, one, l, {('0x5410', '0x7632')[i % 2]};"


@cache
def instructions(how: CodedFormat, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the assembly for each slice of a unit."""
    name = _NAMES[dtype]
    low, high = (*how.planes(), 0)[:2]

    def body(i: int) -> str:
        if how.values == "e2m1":
            return _e2m1(i, name)
        if how.values != "levels":
            return _table(i, how.values, name)
        if low == 8:
            return _bytes(i, name, how.zeros == "levels", how.zeros == "middle")
        if how.zeros == "minimum":
            return _minimum(i, low, high, name)
        return _levels(i, low, high, name, how.zeros == "levels")

    return _wrapped(body(i) for i in range(unit(how) // SLICE))


def _wrapped(bodies: Iterable[str]) -> tuple[str, ...]:
    return tuple("{ .reg .b32 a, b, c, d, e, l, h, one; " + body + " }" for body in bodies)


class Scaled(NamedTuple):
    """A way to make operands: a code's number times a scale, plus a multiple of the scale. It is that of wide.py.

    asm: for each slice of a unit. The last two operands are the factor and what is added.
    even, odd: what a scale is multiplied with, for the factor in even and in odd slices.
    zero: likewise for what is added, or what a minimum is multiplied with.
    power: what sums are multiplied with.
    """

    asm: tuple[str, ...]
    even: float
    odd: float
    zero: float
    power: float


_LIFT = 100  # scales of masked codes are lifted by this power of two: operands are normal, and a scale may be 2**27


@cache
def scaled(how: CodedFormat, dtype: torch.dtype) -> Scaled:
    """Return the way for a format.

    Codes of 4 or 8 bits need only be masked: bits 0 to 7 of a bfloat16 count in steps of 2**-133, whether the number is
    subnormal or not. So eight codes of 4 bits take a shift and four masks; odd slices have theirs 4 bits higher.
    """
    asm, even, odd, power = instructions(how, dtype), 1.0, 1.0, 1.0
    if dtype == torch.bfloat16 and how.zeros != "levels" and how.planes() in ((4,), (8,)):
        if how.values == "e2m1":
            bare = (_e2m1(i, "bf16").partition("mov.b32 one")[0] + "mov.b32 $0, a;" for i in range(len(asm)))
            asm, even, odd, power = _wrapped(bare), 2.0**_LIFT, 2.0**_LIFT, 2.0 ** (126 - _LIFT)
        elif how.values == "levels":
            higher = 4 if how.bits == 4 else 0
            asm = _wrapped(_masked(i, how.bits) for i in range(len(asm)))
            even, odd, power = 2.0**_LIFT, 2.0 ** (_LIFT - higher), 2.0 ** (133 - _LIFT)
    zero = -1 / power if how.zeros == "minimum" else -0.0
    if how.values == "levels" and how.zeros == "middle" and power != 1:
        zero = -(2.0 ** (how.bits - 1)) / power
    words = len(how.planes()) + (how.zeros == "levels" and how.values == "levels")
    last = f"fma.rn.{_PTX[_NAMES[dtype]]} $0, h, ${words + 1}, ${words + 2}; }}"
    asm = tuple(text.replace("$0", "h").rstrip(" }") + " " + last for text in asm)
    return Scaled(asm, even, odd, zero, power)


def _masked(i: int, bits: int) -> str:
    """Return instructions that leave the codes of a slice where they stand in their bytes."""
    mask = 0xFF if bits == 8 else 0xF << 4 * (i % 2)
    return _shifted("a", "$1", -8 * (i % (16 // bits) * bits // 8)) + f"and.b32 $0, a, {_twice(mask)};"


@gluon.constexpr_function
def _place(i, bits):
    """Return the tile of words that has the i-th slice."""
    return i // (16 // bits)


@gluon.jit
def subtracted(zero, BITS: gl.constexpr, dtype: gl.constexpr):
    """Return the terms that take zeros, which are levels, from the numbers that codes were placed in: their bits,
    int16."""
    if dtype == gl.float16:
        return zero.to(gl.int16) | -7168  # the bits of -1024
    elif BITS == 8:
        return (128.0 - zero.to(gl.float32)).to(gl.bfloat16).to(gl.int16, bitcast=True)
    else:
        return zero.to(gl.int16) | -15616  # the bits of -128


@gluon.jit
def operands(
    low, high, minus, i: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, ASM: gl.constexpr,
    ZEROS: gl.constexpr, x,
):  # fmt: skip
    """Return slice i of a unit's codes as numbers, less the zeros: [W, R, P] or [R, P].

    low, high: the words of the two planes.
    minus: of `subtracted`, with an axis for places, if zeros are levels.
    """
    words = low[_place(i, LOW)]
    if HIGH:
        more = high[_place(i, HIGH)]
        if ZEROS == "levels":
            return gl.inline_asm_elementwise(ASM[i], "=r,r,r,r", [words, more, minus], x.dtype, True, 2)
        else:
            return gl.inline_asm_elementwise(ASM[i], "=r,r,r", [words, more], x.dtype, True, 2)
    elif ZEROS == "levels":
        return gl.inline_asm_elementwise(ASM[i], "=r,r,r", [words, minus], x.dtype, True, 2)
    else:
        return gl.inline_asm_elementwise(ASM[i], "=r,r", [words], x.dtype, True, 2)


@gluon.jit
def scaled_operands(
    low, high, minus, by, zero, i: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, ASM: gl.constexpr,
    ZEROS: gl.constexpr, x,
):  # fmt: skip
    """Return slice i of a unit's codes as numbers, less the zeros, times `by`, plus `zero`: [R, P]."""
    words = low[_place(i, LOW)]
    if HIGH:
        more = high[_place(i, HIGH)]
        if ZEROS == "levels":
            return gl.inline_asm_elementwise(ASM[i], "=r,r,r,r,r,r", [words, more, minus, by, zero], x.dtype, True, 2)
        else:
            return gl.inline_asm_elementwise(ASM[i], "=r,r,r,r,r", [words, more, by, zero], x.dtype, True, 2)
    elif ZEROS == "levels":
        return gl.inline_asm_elementwise(ASM[i], "=r,r,r,r,r", [words, minus, by, zero], x.dtype, True, 2)
    else:
        return gl.inline_asm_elementwise(ASM[i], "=r,r,r,r", [words, by, zero], x.dtype, True, 2)

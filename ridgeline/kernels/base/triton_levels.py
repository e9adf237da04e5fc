"""Levels of 8 bits in Triton's kernels: how numbers become levels, and how levels become operands of matrix products.

A cache is read as pairs of levels, one 16-bit word for two neighbouring elements of a head. A pair is taken apart in
registers, into a tile of even elements and one of odd ones, and a product over the head is the sum of two. So every
word moves as a 16-bit number does (shared memory can be read transposed only in units of 16 bits), and no level
crosses to another thread. On Hopper four levels, a register, cost

    e4m3: 1 permutation of bytes, 2 conversions      int8: 2 masks, 1 shift, 2 sums      e5m2: 2 permutations

so about 3/4, 5/4 and 1/2 of an instruction each. A multiprocessor gets 20.6 bytes of cache a clock (4.8 TB/s, 132 of
them, 1.76 GHz) and issues 128 lanes: taking apart is 12, 20 and 8 % of what it can issue in that time, and a tile of
64 keys and values of 128 takes 800 clocks to arrive and 96, 160 or 64 to convert. (In bfloat16 it would be 2.25
instructions a level.) In float16 all levels are exact, and products are summed in float32.

The keys' scales multiply the scores and the values' the probabilities, so neither is multiplied element by element.
`UNIT` keeps the latter in float16's range: a probability times scale times UNIT is about the largest number of its
row, so values up to 1e5 can be held; with larger ones the result is not a number.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: a sum with it is rounded to a whole number, ties to even
INFINITE = tl.constexpr(float("inf"))

# Two registers of float16 from one register of four levels (a0 b0 a1 b1): the a's, and the b's
TAKE_E4M3 = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)
TAKE_E5M2 = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;")  # float16 without the low byte
# A level + 128 is put into the digits of 1024, and 1152 is subtracted
TAKE_INT8 = tl.constexpr(
    "{ .reg .b32 t, u; shr.b32 t, $2, 8; mov.b32 u, 0x64806480; "
    "lop3.b32 $0, $2, 0x00ff00ff, u, 0x6a; lop3.b32 $1, t, 0x00ff00ff, u, 0x6a; "
    "sub.rn.f16x2 $0, $0, u; sub.rn.f16x2 $1, $1, u; }"
)


@triton.constexpr_function
def largest_level(KV):
    """Return the largest level of a format: "e4m3", "e5m2" or "int8"."""
    return {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}[KV]


@triton.constexpr_function
def unit(KV):
    """Return the power of two that probabilities are multiplied by beside the values' scales; 1 without levels."""
    return {None: 1.0, "e4m3": 256.0, "e5m2": 32768.0, "int8": 128.0}[KV]


@triton.jit
def levels(x, KV: tl.constexpr):
    """Return the levels nearest to float32 numbers, ties to even, as bytes. They must not be beyond the largest. Whole
    numbers do this everywhere, GPUs without these types included."""
    if KV == "int8":
        return ((x + MAGIC) - MAGIC).to(tl.int8)
    else:
        digits: tl.constexpr = 3 if KV == "e4m3" else 2
        bias: tl.constexpr = 7 if KV == "e4m3" else 15
        drop: tl.constexpr = 23 - digits
        size = tl.abs(x)
        bits = size.to(tl.int32, bitcast=True)
        normal = (bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) >> drop
        small = (size * 2.0 ** (bias - 1 + digits) + MAGIC) - MAGIC  # below the normal ones levels are evenly spaced
        level = tl.where(size < 2.0 ** (1 - bias), small.to(tl.int32), normal - ((127 - bias) << digits))
        level = tl.where(size != size, 127, level)
        return tl.where(x < 0, level - 128, level).to(tl.int8)


@triton.jit
def value_of(level, KV: tl.constexpr):
    """Return the numbers that levels in bytes are, before any scale, in float16."""
    if KV == "int8":
        return level.to(tl.float16)
    elif KV == "e5m2":
        return ((level.to(tl.int16) & 0xFF) << 8).to(tl.float16, bitcast=True)
    else:
        bits = level.to(tl.int16)
        number = ((bits & 0x7F) << 7 | (bits & -0x8000)).to(tl.float16, bitcast=True) * 256
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def magnitude(x):
    """Return |x| in float32, with inf for what is not a number: a maximum would not see that."""
    x = tl.abs(x.to(tl.float32))
    return tl.where(x != x, INFINITE, x)


@triton.jit
def row_scale(largest, KV: tl.constexpr):
    """Return the scale of rows whose largest magnitude this is: rounded up to a bfloat16, 1 where all is 0, and no
    number where something is infinite."""
    scale = largest * (1 / largest_level(KV))
    up = ((scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(largest == INFINITE, float("nan"), tl.where(scale == 0, 1.0, up))


@triton.jit
def e4m3_scale(x, AXIS: tl.constexpr):
    """Return the scale of each stretch of float32 numbers along an axis for E4M3; at least 1e-30, so that zeros need no
    case."""
    return tl.maximum(tl.max(tl.abs(x), AXIS) * (1 / 448), 1e-30)


@triton.jit
def e4m3_quotient(x, scale):
    """Return numbers over their scales, cut off at 448, which a rounding may pass. What is no number stays so."""
    every: tl.constexpr = tl.PropagateNan.ALL
    x *= 1 / scale
    return tl.minimum(tl.maximum(x, -448.0, propagate_nan=every), 448.0, propagate_nan=every)


@triton.jit
def taken_apart(x, like, KV: tl.constexpr, ASM: tl.constexpr):
    """Return the (even, odd) elements of words of two levels, as operands of products with `like`.

    ASM: this is Hopper or later. Elsewhere the compiler finds the instructions.
    """
    if ASM:
        take: tl.constexpr = TAKE_E4M3 if KV == "e4m3" else (TAKE_E5M2 if KV == "e5m2" else TAKE_INT8)
        even, odd = tl.inline_asm_elementwise(
            take, "=&r,=&r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        even = value_of((x & 0xFF).to(tl.int8), KV)
        odd = value_of((x >> 8).to(tl.int8), KV)
    return even.to(like.dtype), odd.to(like.dtype)


@triton.jit
def multiplier(x, KV: tl.constexpr):
    """Return queries in the type in which they are multiplied with levels."""
    if KV is None or x.dtype == tl.float32:
        return x
    else:
        return x.to(tl.float16)


@triton.jit
def rows_apart(x_DM, DIM: tl.constexpr, COLUMNS: tl.constexpr, KV: tl.constexpr):
    """Return the even rows and the odd ones; without levels all rows."""
    if KV is None:
        return x_DM
    else:
        return tl.split(tl.permute(tl.reshape(x_DM, (DIM // 2, 2, COLUMNS)), (0, 2, 1)))


@triton.jit
def rows_joined(x, DIM: tl.constexpr, COLUMNS: tl.constexpr, KV: tl.constexpr):
    """Return the rows that `rows_apart` has parted, without the unit."""
    if KV is None:
        return x
    else:
        x_DM = tl.reshape(tl.permute(tl.join(x[0], x[1]), (0, 2, 1)), (DIM, COLUMNS))
        return x_DM * (1 / unit(KV))


@triton.jit
def columns_apart(x_MD, ROWS: tl.constexpr, DIM: tl.constexpr, KV: tl.constexpr):
    """Return the even columns and the odd ones; without levels all columns."""
    if KV is None:
        return x_MD
    else:
        return tl.split(tl.reshape(x_MD, (ROWS, DIM // 2, 2)))


@triton.jit
def columns_joined(x, ROWS: tl.constexpr, DIM: tl.constexpr, KV: tl.constexpr):
    """Return the columns that `columns_apart` has parted, without the unit."""
    if KV is None:
        return x
    else:
        return tl.reshape(tl.join(x[0], x[1]), (ROWS, DIM)) * (1 / unit(KV))


@triton.jit
def scores_of(q, k, scale_K, KV: tl.constexpr, ASM: tl.constexpr):
    """Return the products of queries [M, D] with a tile's keys [K, D], or words [K, D / 2]."""
    if KV is None:
        return tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    else:
        even_KW, odd_KW = taken_apart(k, q[0], KV, ASM)
        x_MK = tl.dot(q[0], tl.trans(even_KW), input_precision="ieee")
        return tl.dot(q[1], tl.trans(odd_KW), x_MK, input_precision="ieee") * scale_K[None, :]


@triton.jit
def with_values(acc, shrink_M, p_MK, v, scale_K, like, KV: tl.constexpr, ASM: tl.constexpr):
    """Return the sums `acc`, shrunk, with a tile's values [K, D], or words [K, D / 2], weighted by probabilities."""
    if KV is None:
        v = v.to(like.dtype)
        return tl.dot(p_MK.to(v.dtype), v, acc * shrink_M[:, None], input_precision="ieee")
    else:
        even_KW, odd_KW = taken_apart(v, like[0], KV, ASM)
        p_MK = (p_MK * scale_K[None, :]).to(even_KW.dtype)
        even_MW = tl.dot(p_MK, even_KW, acc[0] * shrink_M[:, None], input_precision="ieee")
        return even_MW, tl.dot(p_MK, odd_KW, acc[1] * shrink_M[:, None], input_precision="ieee")

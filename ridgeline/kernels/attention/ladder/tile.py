"""A tile of keys without its copies, for the rungs in `pingpong.py` and `ahead.py`: products, the softmax, weights as
an operand, and the order of tiles. In Gluon, for sm_90a; what they compute is in `ideas.py` in NumPy.
"""

from __future__ import annotations

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ridgeline.kernels.attention.ladder.ideas import COEFFICIENTS, LEAST, MAGIC, THRESHOLD

# Weights in fp8 are 2**8 times as large, as E4M3 ends at 448 and begins at 2**-9. With a threshold both share that.
RAISED, HALF = gl.constexpr(8.0), gl.constexpr(4.0)
TO_FP8 = gl.constexpr("""{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }""")


def _assembly(polynomials: int) -> str:
    """Return the instructions for four powers of 2, so many of them by `ideas.exp2_polynomial`."""

    def number(x: float) -> str:
        return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"

    c0, c1, c2, c3 = map(number, COEFFICIENTS)
    lines = ["{ .reg .f32 x, n, f, p; .reg .b32 e, b;"]
    for i in range(4):
        if i < 4 - polynomials:
            lines.append(f"ex2.approx.ftz.f32 ${i}, ${i + 4};")
            continue
        lines += [
            f"max.ftz.f32 x, ${i + 4}, {number(LEAST)};",
            f"add.rn.ftz.f32 n, x, {number(MAGIC)};",
            f"sub.rn.ftz.f32 f, n, {number(MAGIC)};",
            "sub.rn.ftz.f32 f, x, f;",
            f"mov.f32 p, {c3};",
            f"fma.rn.ftz.f32 p, p, f, {c2};",
            f"fma.rn.ftz.f32 p, p, f, {c1};",
            f"fma.rn.ftz.f32 p, p, f, {c0};",
            f"mov.b32 e, n; shl.b32 e, e, 23; mov.b32 b, p; add.s32 b, b, e; mov.b32 ${i}, b;",
        ]
    return "\n".join([*lines, "}"])


ONE_OF_FOUR, TWO_OF_FOUR = gl.constexpr(_assembly(1)), gl.constexpr(_assembly(2))
GROWN = gl.constexpr(THRESHOLD)


@gluon.jit
def _exp2(x, POLYNOMIAL: gl.constexpr):
    """Return 2**x, POLYNOMIAL of each four by a polynomial."""
    if POLYNOMIAL == 0:
        return gl.exp2(x)
    assembly: gl.constexpr = ONE_OF_FOUR if POLYNOMIAL == 1 else TWO_OF_FOUR
    return gl.inline_asm_elementwise(assembly, "=f,=f,=f,=f,f,f,f,f", [x], dtype=gl.float32, is_pure=True, pack=4)


@gluon.jit
def _as_column(x, like):
    """Return one value per row in a form that broadcasts over the columns of `like`."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, like.type.layout)), 1)


@gluon.jit
def _place(T, heads, at_once, LONGEST: gl.constexpr):
    """Return the program's tile of queries and its head, in the order of `ideas.tile_order`."""
    tiles = (T + 127) // 128
    n = gl.program_id(0)
    if LONGEST:
        section = n // (tiles * at_once)
        rest = n - section * tiles * at_once
        here = gl.minimum(at_once, heads - section * at_once)
        return tiles - 1 - rest // here, section * at_once + rest % here
    else:
        return n % tiles, n // tiles


@gluon.jit
def _scores(q, keys, KEYS: gl.constexpr, FP8: gl.constexpr):
    """Start the product of 64 queries with a tile of keys."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32 if FP8 else 16])
    nothing = gl.zeros([64, KEYS], gl.float32, layout)
    return warpgroup_mma(q, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _weighted(p, values, o, FP8: gl.constexpr):
    """Start the product of weights with a tile of values, which in fp8 lies by channels."""
    if FP8:
        return warpgroup_mma(p, values.permute((1, 0)), o, is_async=True)
    else:
        return warpgroup_mma(p, values, o, is_async=True)


@gluon.jit
def _rounded(weights, dtype: gl.constexpr, layout: gl.constexpr):
    """Return weights as an operand, in fp8 as words of four: a thread's numbers of 16 keys stay in its registers in
    their order, so keys 8 h + 2 c + i take the places 4 c + 2 h + i, as those of the values do. Words, since a loop
    that hands on single bytes takes them apart."""
    if dtype == gl.float8e4nv:
        keys: gl.constexpr = weights.shape[1]
        turned = weights.reshape([64, keys // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, keys // 4, 2, 2])
        even, odd = gl.split(turned)
        w0, w2 = gl.split(even)
        w1, w3 = gl.split(odd)
        return gl.inline_asm_elementwise(
            TO_FP8, "=r,f,f,f,f", [w0, w1, w2, w3], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip
    else:
        return gl.convert_layout(weights.to(dtype), layout)


@gluon.jit
def _operand(p, dtype: gl.constexpr, layout: gl.constexpr):
    """Return the operand in what `_rounded` gave."""
    if dtype == gl.float8e4nv:
        twice = gl.join(p, p)
        words = gl.join(twice, twice).reshape([64, p.shape[1] * 4])
        words = gl.convert_layout(words, layout)
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [words], dtype=gl.float8e4nv, is_pure=False,
                                         pack=4)  # fmt: skip
    else:
        return p


@gluon.jit
def _softmax(s, m, total, factor, less, POLYNOMIAL: gl.constexpr, THRESHOLD: gl.constexpr, FP8: gl.constexpr,
             BESIDE: gl.constexpr = False):  # fmt: skip
    """Return (maxima, weights, sums, what is kept of the output, the largest growth). factor: of scores, so that they
    are exponents of 2. less: the power of 2 by which values of the tile are smaller than they lie, which weights are
    then as well. With THRESHOLD maxima stay as they are unless one has grown by more than it. With BESIDE the growth is
    that of all rows, taken before the exponentials, and each thread keeps its own sums."""
    grows: gl.constexpr = HALF if FP8 else GROWN
    raised: gl.constexpr = (HALF if THRESHOLD else RAISED) if FP8 else 0.0
    new = gl.maximum(m, gl.max(s, 1) * factor)
    grown = new - m
    if THRESHOLD:
        new = gl.where(grown > grows, new, m)
    shrink = gl.exp2(m - new)
    if BESIDE:
        grown = gl.max(grown, 0)
    if FP8:
        weights = _exp2(s * factor - gl.expand_dims(new - (raised - less), 1), POLYNOMIAL)
        total = _grown_sums(total, shrink, weights, gl.exp2(less), BESIDE)
    else:
        weights = _exp2(s * factor - gl.expand_dims(new, 1), POLYNOMIAL)
        total = _grown_sums(total, shrink, weights, 1.0, BESIDE)
    return new, weights, total, shrink, grown


@gluon.jit
def _grown_sums(total, shrink, weights, factor, BESIDE: gl.constexpr):
    """Return sums with those of a tile."""
    if BESIDE:
        return total * _as_column(shrink, total) + _own_sums(weights) * factor
    else:
        return total * shrink + gl.sum(weights, 1) * factor


@gluon.jit
def _own_sums(weights):
    """Return the sums of each thread's own weights, [64, 4]: no thread asks another."""
    keys: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([64, keys // 8, 4, 2]), 3), 1)


@gluon.jit
def _no_sums(like, BESIDE: gl.constexpr):
    """Return the sums before the first tile, whose scores are as `like`."""
    if BESIDE:
        return _own_sums(gl.zeros_like(like))
    else:
        return gl.zeros([64], gl.float32, gl.SliceLayout(1, like.type.layout))


@gluon.jit
def _all_sums(total, BESIDE: gl.constexpr):
    """Return the sums of rows, [64]."""
    if BESIDE:
        return gl.sum(total, 1)
    else:
        return total

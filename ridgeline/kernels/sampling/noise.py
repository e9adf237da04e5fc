"""The random stream of philox.py as Triton device functions: the same words, and the same noise up to rounding.

Legend:
    Q  groups of four neighbouring tokens
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def random_words(group_Q, position, seed):
    """Return the four words of each group of tokens (uint32 [Q] each): Philox4x32-10 at (group, position, 0, 0)."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = group_Q.to(tl.uint32)
    c1 = c0 * 0 + position.to(tl.uint32)
    c2 = c0 * 0
    c3 = c0 * 0
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _log2(x, APPROX: tl.constexpr):
    """Return log2(x); x is never subnormal. With APPROX it is NVIDIA's own instruction, off by 2**-22 at most, where
    tl.log2 makes a dozen instructions."""
    if APPROX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def gumbel(word, APPROX: tl.constexpr):
    """Return standard Gumbel noise, float32, from uint32 words.

    The hardware's -log(u) loses its digits where u is near 1, which is where the large noise is. There 1 - u is exact,
    and a series gives the logarithm (truncated below 5e-7 of its value).
    """
    u = ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    v = 1.0 - u
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * (0.2 + v * 0.16666667)))))
    exponential = tl.where(v < 0.125, series, _log2(u, APPROX) * -LN2)
    return _log2(exponential, APPROX) * -LN2


@triton.jit
def log2_below(word, APPROX: tl.constexpr):
    """Return log2(1 - u) of uint32 words. Its negative is a bound of the noise in bits, for a third of the work, since
    -ln u ≥ 1 - u.

    The larger the noise is, the closer the bound is (they are half of 1 - u apart), and large noise is what wins.
    """
    one_to_two = (((word ^ 0xFFFFFFFF) >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    return _log2(one_to_two - 0.99999994039535522, APPROX)  # 1 - u, exact: 23 bits and a half step


@triton.jit
def _spread(w0, w1, w2, w3, Q: tl.constexpr):
    """Return the words of tokens 4 g … 4 g + 3 as [Q, 4]."""
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (Q, 4))


@triton.jit
def log2_below_groups(group_Q, position, seed, Q: tl.constexpr, APPROX: tl.constexpr):
    """Return `log2_below` for tokens 4 g … 4 g + 3: [Q, 4]."""
    w0, w1, w2, w3 = random_words(group_Q, position, seed)
    return log2_below(_spread(w0, w1, w2, w3, Q), APPROX)


@triton.jit
def gumbel_of_groups(group_Q, position, seed, Q: tl.constexpr, APPROX: tl.constexpr):
    """Return the noise of tokens 4 g … 4 g + 3: [Q, 4]."""
    w0, w1, w2, w3 = random_words(group_Q, position, seed)
    return gumbel(_spread(w0, w1, w2, w3, Q), APPROX)


@triton.jit
def gumbel_of_tokens(token, position, seed, APPROX: tl.constexpr):
    """Return the noise of single tokens (any ids), at four times the work per token."""
    w0, w1, w2, w3 = random_words(token // 4, position, seed)
    word = token % 4
    return gumbel(tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3)), APPROX)

"""The exponential of float32 in operations that the processor has for vectors.

x = n · ln 2 + r, and e^x = 2^n · e^r. e^r is a polynomial of degree 7 on |r| ≤ ln 2 / 2 (coefficients of Cephes' expf),
and 2^n is made of two exponents, so that numbers below 2^-126 come out as they should. Largest error: 2 units in the last
place. e^-inf is 0, e^inf is inf, and NaN stays.
"""

from __future__ import annotations

from collections.abc import Iterator

POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
LOWEST, HIGHEST = -104.0, 89.0  # beyond them e^x is 0 and inf in float32
CONSTANTS = {
    "lo": LOWEST,
    "hi": HIGHEST,
    "log2e": 1.4426950408889634,
    "ln2_a": -0.693359375,  # -ln 2 in two parts, of which the first has few bits
    "ln2_b": 2.12194440e-4,
    "unit": 1.0,
    "none": 0.0,
}


def exponential(x: str) -> Iterator[str]:
    """Yield the operations that make %r, e to the power of x."""
    for name, number in CONSTANTS.items():
        yield f"%{name} = arith.constant {number:e} : f32"
    for at, number in enumerate(POLYNOMIAL):
        yield f"%p{at} = arith.constant {number:e} : f32"
    yield "%bias = arith.constant 127 : i32"
    yield "%half = arith.constant 1 : i32"
    yield "%place = arith.constant 23 : i32"
    yield f"%above = arith.maximumf {x}, %lo : f32"
    yield "%inside = arith.minimumf %above, %hi : f32"
    yield "%scaled = arith.mulf %inside, %log2e : f32"
    yield "%whole = math.roundeven %scaled : f32"
    yield "%rest_a = math.fma %whole, %ln2_a, %inside : f32"
    yield "%rest = math.fma %whole, %ln2_b, %rest_a : f32"
    at = "%p0"
    for step in range(1, len(POLYNOMIAL)):
        yield f"%q{step} = math.fma {at}, %rest, %p{step} : f32"
        at = f"%q{step}"
    yield "%square = arith.mulf %rest, %rest : f32"
    yield f"%tail = math.fma {at}, %square, %rest : f32"
    yield "%near = arith.addf %tail, %unit : f32"
    yield "%lost = arith.cmpf uno, %whole, %whole : f32"
    yield "%known = arith.select %lost, %none, %whole : f32"
    yield "%n = arith.fptosi %known : f32 to i32"
    yield "%n_a = arith.shrsi %n, %half : i32"
    yield "%n_b = arith.subi %n, %n_a : i32"
    for part in "ab":
        yield f"%e_{part} = arith.addi %n_{part}, %bias : i32"
        yield f"%s_{part} = arith.shli %e_{part}, %place : i32"
        yield f"%t_{part} = arith.bitcast %s_{part} : i32 to f32"
    yield "%once = arith.mulf %near, %t_a : f32"
    yield "%r = arith.mulf %once, %t_b : f32"

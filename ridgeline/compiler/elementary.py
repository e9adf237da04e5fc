"""Elementary functions of float32 in operations that processors have for vectors.

* e^x: x = n · ln 2 + r, and e^x = 2^n · e^r. e^r is a polynomial on |r| ≤ ln 2 / 2, and 2^n is made of two exponents:
  so numbers below 2^-126 come out as they should. e^-inf is 0, e^inf is inf, and NaN stays.
* tanh x: an odd polynomial up to |x| = 0.625, and beyond 1 - 2 / (e^2|x| + 1) with the sign of x.

Coefficients are those of Cephes' expf and tanhf. The largest error is 2 units in the last place; a test measures it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
SMALL = 0.625  # where the polynomial of tanh ends
LOWEST, HIGHEST = -104.0, 89.0  # beyond them e^x is 0 and inf in float32


def exponential(x: str, result: str = "%r") -> Iterator[str]:
    """Yield the operations that make e to the power of x."""
    constants = {"lo": LOWEST, "hi": HIGHEST, "log2e": 1.4426950408889634, "unit": 1.0, "none": 0.0}
    constants |= {"ln2_a": -0.693359375, "ln2_b": 2.12194440e-4}  # -ln 2 in two parts, of which the first has few bits
    yield from _constants(constants)
    for name, number in {"bias": 127, "half": 1, "place": 23}.items():
        yield f"%{name} = arith.constant {number} : i32"
    yield f"%above = arith.maximumf {x}, %lo : f32"
    yield "%inside = arith.minimumf %above, %hi : f32"
    yield "%scaled = arith.mulf %inside, %log2e : f32"
    yield "%whole = math.roundeven %scaled : f32"
    yield "%rest_a = math.fma %whole, %ln2_a, %inside : f32"
    yield "%rest = math.fma %whole, %ln2_b, %rest_a : f32"
    yield from _polynomial("e", EXP, "%rest")
    yield "%square = arith.mulf %rest, %rest : f32"
    yield "%tail = math.fma %e, %square, %rest : f32"
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
    yield f"{result} = arith.mulf %once, %t_b : f32"


def hyperbolic_tangent(x: str) -> Iterator[str]:
    """Yield the operations that make tanh x."""
    yield from _constants({"small": SMALL, "two": 2.0})
    yield f"%size = math.absf {x} : f32"
    yield f"%z = arith.mulf {x}, {x} : f32"
    yield from _polynomial("t", TANH, "%z")
    yield f"%xz = arith.mulf {x}, %z : f32"
    yield f"%inner = math.fma %t, %xz, {x} : f32"
    yield "%twice = arith.mulf %size, %two : f32"
    yield from exponential("%twice", "%grown")
    yield "%below = arith.addf %grown, %unit : f32"
    yield "%part = arith.divf %two, %below : f32"
    yield "%most = arith.subf %unit, %part : f32"
    yield f"%outer = math.copysign %most, {x} : f32"
    yield "%is_small = arith.cmpf olt, %size, %small : f32"
    yield "%r = arith.select %is_small, %inner, %outer : f32"


def _constants(numbers: dict[str, float]) -> Iterator[str]:
    for name, number in numbers.items():
        yield f"%{name} = arith.constant {number:.17e} : f32"


def _polynomial(name: str, coefficients: Sequence[float], x: str) -> Iterator[str]:
    """Yield the operations that make %name, a polynomial by Horner's rule."""
    yield from _constants({f"{name}_c{at}": number for at, number in enumerate(coefficients)})
    sum, last = f"%{name}_c0", len(coefficients) - 1
    for at in range(1, len(coefficients)):
        made = f"%{name}" if at == last else f"%{name}_{at}"
        yield f"{made} = math.fma {sum}, {x}, %{name}_c{at} : f32"
        sum = made

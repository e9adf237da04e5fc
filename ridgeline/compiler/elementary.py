"""Elementary functions of float32 in operations that processors have for vectors.

* e^x: x = n · ln 2 + r, and e^x = 2^n · e^r. e^r is a polynomial on |r| ≤ ln 2 / 2, and 2^n is made of two exponents:
  so numbers below 2^-126 come out as they should. e^-inf is 0, e^inf is inf, and NaN stays.
* tanh x: an odd polynomial up to |x| = 0.625, and beyond 1 - 2 / (e^2|x| + 1) with the sign of x.
* On NVIDIA's GPUs e^x is 2^(x · log2 e) by the instruction for powers of two, with the rounding error of the product
  made good. Results below 2^-126 are 0. A quotient is right to two units in the last place.
* Where all that a kernel writes has 16 bits, GPUs are spared what is far below their rounding: the correction of e^x
  (22 units in the last place of float32 at most, 2^-18), tanh is the instruction for it (2^-11) if the 16 bits are
  bfloat16, and a quotient by a number of the row is a product with its reciprocal.

Coefficients are those of Cephes' expf and tanhf. The largest error on CPUs is 2 units in the last place; a test
measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
SMALL = 0.625  # where the polynomial of tanh ends
LOWEST, HIGHEST = -104.0, 89.0  # beyond them e^x is 0 and inf in float32
SHORT = 11  # significant bits of what a kernel of 16-bit numbers writes
LOG2_E = 1.4426950408889634
LOG2_E_HIGH = 1.44269502162933349609375  # the float32 next to it
LN_2 = 0.6931471805599453
ASSEMBLY = {
    "power": ("ex2.approx.ftz.f32 $0, $1;", 1),
    "reciprocal": ("rcp.approx.ftz.f32 $0, $1;", 1),
    "quotient": ("div.full.f32 $0, $1, $2;", 2),
    "root": ("sqrt.rn.f32 $0, $1;", 1),
    "tanh": ("tanh.approx.f32 $0, $1;", 1),
}  # of PTX


@dataclass(frozen=True)
class OperationWriter:
    """Emits operations on numbers (width 1) or vectors.

    emit: takes an operation of one result, and returns the result's name. machine: "": the operations of MLIR alone,
    "nvidia": PTX's as well, "avx512": the scaling by powers of two of AVX-512. bits: significant ones that results
    need.
    """

    emit: Callable[[str], str]
    width: int = 1
    machine: str = ""
    bits: int = 64

    def type(self, element: str) -> str:
        return f"vector<{self.width}x{element}>" if self.width > 1 else element

    def literal(self, text: str, element: str) -> str:
        return self.emit(f"arith.constant {f'dense<{text}>' if self.width > 1 else text} : {self.type(element)}")

    def number(self, number: float) -> str:
        """Return a constant of float32."""
        return self.literal(f"{number:.17e}", "f32")

    def whole(self, number: int) -> str:
        return self.literal(str(number), "i32")

    def op(self, name: str, *operands: str, element: str = "f32") -> str:
        return self.emit(f"{name} {', '.join(operands)} : {self.type(element)}")

    def fma(self, a: str, b: str, c: str) -> str:
        """Return a · b + c, rounded once."""
        if self.machine != "nvidia":
            return self.op("math.fma", a, b, c)
        kind = self.type("f32")
        return self.emit(f"llvm.intr.fma({a}, {b}, {c}) : ({kind}, {kind}, {kind}) -> {kind}")

    def convert(self, name: str, operand: str, source: str, target: str) -> str:
        return self.emit(f"{name} {operand} : {self.type(source)} to {self.type(target)}")

    def scaled(self, a: str, exponents: str) -> str:
        """Return a · 2^exponents by AVX-512's instruction, 16 numbers at a time."""
        half, made = "vector<16xf32>", self.literal("0.0", "f32")
        every, rounding = self.emit("arith.constant -1 : i16"), self.emit("arith.constant 4 : i32")
        for at in range(0, self.width, 16):
            cut = f"{{offsets = [{at}], sizes = [16], strides = [1]}} : {self.type('f32')} to {half}"
            x, n = (self.emit(f"vector.extract_strided_slice {each} {cut}") for each in (a, exponents))
            part = self.emit(
                f'llvm.call_intrinsic "llvm.x86.avx512.mask.scalef.ps.512"({x}, {n}, {x}, {every}, {rounding})'
                f" : ({half}, {half}, {half}, i16, i32) -> {half}"
            )
            place = f"{{offsets = [{at}], strides = [1]}} : {half} into {self.type('f32')}"
            made = self.emit(f"vector.insert_strided_slice {part}, {made} {place}")
        return made

    def instruction(self, name: str, *operands: str) -> str:
        """Emit an instruction of PTX for each number of a vector."""
        text, count = ASSEMBLY[name]
        signature = f"({', '.join(['f32'] * count)}) -> f32"
        asm = f'llvm.inline_asm "{text}", "{",".join(["=f", *["f"] * count])}"'
        if self.width == 1:
            return self.emit(f"{asm} {', '.join(operands)} : {signature}")
        kind, made = self.type("f32"), []
        for at in range(self.width):
            parts = [self.emit(f"vector.extract {each}[{at}] : f32 from {kind}") for each in operands]
            made.append(self.emit(f"{asm} {', '.join(parts)} : {signature}"))
        return self.emit(f"vector.from_elements {', '.join(made)} : {kind}")


def exponential(w: OperationWriter, x: str) -> str:
    """Return e to the power of x."""
    if w.machine == "nvidia":
        return _power(w, x)
    ln2_a, ln2_b = w.number(-0.693359375), w.number(2.12194440e-4)  # -ln 2 in two parts; the first has few bits
    inside = x
    for bound, name in ((w.number(LOWEST), "ogt"), (w.number(HIGHEST), "olt")):  # NaN stays
        inside = select(w, w.op(f"arith.cmpf {name},", bound, inside), bound, inside, "f32")
    whole = w.op("math.roundeven", w.op("arith.mulf", inside, w.number(LOG2_E)))
    rest = w.fma(whole, ln2_b, w.fma(whole, ln2_a, inside))
    tail = w.fma(_polynomial(w, EXP, rest), w.op("arith.mulf", rest, rest), rest)
    near = w.op("arith.addf", tail, w.number(1.0))
    if w.machine == "avx512" and w.width % 16 == 0:
        return w.scaled(near, whole)
    lost = w.op("arith.cmpf uno,", whole, whole)
    n = w.convert("arith.fptosi", select(w, lost, w.number(0.0), whole, "f32"), "f32", "i32")
    half = w.op("arith.shrsi", n, w.whole(1), element="i32")
    for part in (half, w.op("arith.subi", n, half, element="i32")):
        exponent = w.op("arith.addi", part, w.whole(127), element="i32")
        bits = w.op("arith.shli", exponent, w.whole(23), element="i32")
        near = w.op("arith.mulf", near, w.convert("arith.bitcast", bits, "i32", "f32"))
    return near


def hyperbolic_tangent(w: OperationWriter, x: str) -> str:
    """Return tanh x."""
    if w.machine == "nvidia" and w.bits <= 8:
        return w.instruction("tanh", x)
    one, two = w.number(1.0), w.number(2.0)
    size, z = w.op("math.absf", x), w.op("arith.mulf", x, x)
    inner = w.fma(_polynomial(w, TANH, z), w.op("arith.mulf", x, z), x)
    below = w.op("arith.addf", exponential(w, w.op("arith.mulf", size, two)), one)
    most = w.op("arith.subf", one, quotient(w, two, below))
    outer = w.op("math.copysign", most, x)
    small = w.op("arith.cmpf olt,", size, w.number(SMALL))
    return select(w, small, inner, outer, "f32")


def quotient(w: OperationWriter, a: str, b: str) -> str:
    """Return a / b."""
    return w.instruction("quotient", a, b) if w.machine == "nvidia" else w.op("arith.divf", a, b)


def root(w: OperationWriter, x: str) -> str:
    """Return the square root of x."""
    return w.instruction("root", x) if w.machine == "nvidia" else w.op("math.sqrt", x)


def select(w: OperationWriter, where: str, a: str, b: str, element: str) -> str:
    kinds = f"{w.type('i1')}, {w.type(element)}" if w.width > 1 else element
    return w.emit(f"arith.select {where}, {a}, {b} : {kinds}")


def _power(w: OperationWriter, x: str) -> str:
    """Return e^x by the instruction for powers of two."""
    if w.bits <= SHORT:
        return w.instruction("power", w.op("arith.mulf", x, w.number(LOG2_E)))
    inside = w.op("arith.minimumf", w.op("arith.maximumf", x, w.number(LOWEST)), w.number(HIGHEST))
    log2_e = w.number(LOG2_E_HIGH)
    product = w.op("arith.mulf", inside, log2_e)
    lost = w.fma(inside, log2_e, w.op("arith.negf", product))
    lost = w.fma(inside, w.number(LOG2_E - LOG2_E_HIGH), lost)
    return w.op("arith.mulf", w.instruction("power", product), w.fma(lost, w.number(LN_2), w.number(1.0)))


def _polynomial(w: OperationWriter, coefficients: Sequence[float], x: str) -> str:
    """Return a polynomial of x by Horner's rule."""
    sum = w.number(coefficients[0])
    for coefficient in coefficients[1:]:
        sum = w.fma(sum, x, w.number(coefficient))
    return sum

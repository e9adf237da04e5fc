"""The problems of the GEMM ladder: C = A · Bᵀ of square matrices and of few rows in bfloat16, beside cuBLAS, and the
formats and epilogues of its top rung beside cuBLAS' product in the same format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu

from ridgeline.kernels.cuda.compile import NoCudaCompiler
from ridgeline.kernels.cuda.predict import MMA_SHARE, chip_here
from ridgeline.kernels.gemm.ladder.cute_rung import NAME as CUTE
from ridgeline.kernels.gemm.ladder.cute_rung import LoadedCute
from ridgeline.kernels.gemm.ladder.cutlass_rungs import CUTLASS_RUNGS, LoadedCutlass
from ridgeline.kernels.gemm.ladder.endings import ENDINGS, EndingOperands, LadderEnding, is_largest, is_near
from ridgeline.kernels.gemm.ladder.predict import predict
from ridgeline.kernels.gemm.ladder.run import LoadedCeiling, LoadedRung, numbers, runs_here
from ridgeline.kernels.gemm.ladder.rungs import RUNGS, VARIANTS, Extras
from ridgeline.kernels.gemm.ladder.triton_rungs import GLUON_RUNG, TRITON_RUNGS, call, predict_triton
from ridgeline_bench.ladders.runs import OPERANDS, Call


@dataclass(frozen=True)
class SizedProduct:
    """C = A · Bᵀ: A is [rows, size], B is [size, size]. rows: 0 for as many."""

    size: int
    rows: int = 0

    @property
    def name(self) -> str:
        return f"{self.rows} x {self.size}²" if self.rows else f"{self.size}³"

    @property
    def flops(self) -> float:
        return 2.0 * (self.rows or self.size) * self.size**2

    def least(self) -> Iterator[tuple[str, float, str]]:
        sizes = self.rows or self.size, self.size, self.size
        for rung in RUNGS:
            found = predict(rung, chip_here(_gpu()), *sizes)
            yield rung.name, found.bound, found.limiter
        for variant in VARIANTS:
            rate = chip_here(_gpu()).matrix * MMA_SHARE * variant.speed
            if variant is not VARIANTS[0]:  # which is rung 8 itself
                yield variant.product.name, self.flops / rate, "tensor cores"
            yield variant.ceiling.name, self.flops / rate, "tensor cores"
        for template in TEMPLATES:
            like = next(rung for rung in RUNGS if rung.name == template.like)
            found = predict(like, chip_here(_gpu()), *sizes)
            yield template.name, found.bound, found.limiter
        for each in (*TRITON_RUNGS, GLUON_RUNG):
            found = predict_triton(each, chip_here(_gpu()), *sizes)
            yield each.name, found.bound, found.limiter

    def operands(self, cubins: Path | None) -> Matrices:
        return Matrices(self.rows or self.size, self.size, cubins)


class Matrices:
    """Operands in turn, and one output."""

    def __init__(self, rows: int, size: int, cubins: Path | None = None) -> None:
        self.cubins = cubins
        self.a, self.b = (torch.randn(OPERANDS, n, size, device="cuda", dtype=torch.bfloat16) for n in (rows, size))
        self.c = torch.empty(rows, size, device="cuda", dtype=torch.bfloat16)
        self.bias = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        self.exact = self.a[0].float() @ self.b[0].float().T

    @property
    def peers(self) -> Mapping[str, Sequence[Call]]:
        fused = partial(torch._addmm_activation, self.bias, out=self.c)
        return {
            "cuBLAS": [partial(torch.mm, x, y.T, out=self.c) for x, y in self._pairs()],
            "cuBLASLt, bias and ReLU": [BiasedCall(fused, x, y.T) for x, y in self._pairs()],
        }

    def rung(self, name: str) -> Sequence[Call] | None:
        if found := [each for each in TRITON_RUNGS if each.name == name]:
            programs = torch.cuda.get_device_properties("cuda").multi_processor_count
            rung_call = partial(call, found[0], c_MN=self.c, programs=programs)
            return [partial(rung_call, x, y) for x, y in self._pairs()]
        if name == GLUON_RUNG.name:
            return self._gluon()
        if variants := [each for each in VARIANTS if each.ceiling.name == name]:
            return [LoadedCeiling(variants[0], 2.0 * self.c.numel() * self.a.shape[-1], self.cubins)]
        if variants := [each for each in VARIANTS if each.product.name == name]:
            product = LoadedRung(variants[0].product, self.cubins)
            c = torch.empty_like(self.c, dtype=getattr(torch, variants[0].result))
            return [VariantCall(product, *(numbers(z, variants[0]) for z in (x, y)), c) for x, y in self._pairs()]
        if templates := [each for each in TEMPLATES if each.name == name]:
            return self._template(templates[0])
        rung = next(each for each in RUNGS if each.name == name)
        if not runs_here(rung):
            return None
        product = LoadedRung(rung, self.cubins)
        return [lambda x=x, y=y: product(x, y, self.c) for x, y in self._pairs()]  # type: ignore[misc]

    def fault(self, call: Call, rung: str = "") -> str:
        if isinstance(call, LoadedCeiling | VariantCall):
            return call.fault()
        self.c.fill_(torch.nan)
        call()
        exact = call.activation(self.exact + self.bias) if isinstance(call, BiasedCall) else self.exact
        return difference(self.c, exact)

    def _gluon(self) -> Sequence[Call] | None:
        if torch.cuda.get_device_capability() != (9, 0):
            return None
        from ridgeline.kernels.gemm.ladder.gluon_rung import gluon_product  # Triton, which predictions need not

        return [partial(gluon_product, x, y, self.c) for x, y in self._pairs()]

    def _template(self, template: TemplateRung) -> Sequence[Call] | None:
        try:
            product = template.load(self.cubins) if torch.cuda.get_device_capability() == (9, 0) else None
        except NoCudaCompiler:  # an extra that is not installed
            return None
        return product and [template.call(product, x, y, self.c, self.bias) for x, y in self._pairs()]

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.a, self.b, strict=True)


@dataclass(frozen=True)
class FormatProduct:
    """C = A · Bᵀ of square matrices in one format, by the top rung with each of its epilogues."""

    size: int
    dtype: str
    word: str

    @property
    def name(self) -> str:
        return f"{self.size}³ in {self.word}"

    @property
    def flops(self) -> float:
        return 2.0 * self.size**3

    @property
    def endings(self) -> list[LadderEnding]:
        return [each for each in ENDINGS if each.dtype == self.dtype]

    def least(self) -> Iterator[tuple[str, float, str]]:
        for each in self.endings:
            top = next(rung for rung in RUNGS if rung.extras)
            found = predict(top, chip_here(_gpu()), self.size, self.size, self.size, each.item)
            yield each.rung.name, found.bound, found.limiter

    def operands(self, cubins: Path | None) -> FormatMatrices:
        return FormatMatrices(self, cubins)


class FormatMatrices:
    """Operands of one format in turn, with what epilogues read."""

    def __init__(self, problem: FormatProduct, cubins: Path | None = None) -> None:
        self.problem, self.cubins, size = problem, cubins, problem.size
        self.sets = [EndingOperands(problem.dtype, size, size, size, "cuda") for _ in range(OPERANDS)]

    @property
    def peers(self) -> Mapping[str, Sequence[Call]]:
        results = {"float8_e4m3fn": torch.bfloat16, "int8": torch.int32}
        dtype = getattr(torch, self.problem.dtype)
        out = torch.empty(
            self.problem.size, self.problem.size, device="cuda", dtype=results.get(self.problem.dtype, dtype)
        )
        one = torch.ones((), device="cuda")
        return {"cuBLAS": [LibraryCall(library_product, each.a, each.b.T, out, one) for each in self.sets]}

    def rung(self, name: str) -> Sequence[Call] | None:
        ending = next(each for each in self.problem.endings if each.rung.name == name)
        if not runs_here(ending.rung):
            return None
        product, size = LoadedRung(ending.rung, self.cubins), self.problem.size
        columns = size // 2 if "SwiGlu" in ending.steps else size
        c = torch.empty(size, columns, device="cuda", dtype=getattr(torch, ending.result))
        return [EndingCall(product, each, ending, c) for each in self.sets]

    def fault(self, call: Call, rung: str = "") -> str:
        assert isinstance(call, EndingCall | LibraryCall)
        return call.fault()


class LibraryCall(partial[object]):
    """A product by cuBLAS in any format."""

    def fault(self) -> str:
        """Run it, and return what is wrong with it, or ""."""
        a, b, out, _ = self.args
        self()
        exact = a.double() @ b.double()
        off = (out.double() - exact).abs().max() / exact.abs().max()
        return "" if off <= 2**-7 else f"it is off by {float(off):.1e} of the largest"  # bfloat16; others by less


def library_product(a: Tensor, b: Tensor, out: Tensor, one: Tensor) -> Tensor:
    """Write the product to `out`, in tf32 if its operands are float32. one: the scale of operands in fp8."""
    if a.dtype == torch.int8:
        return torch._int_mm(a, b, out=out)
    if a.dtype == torch.float8_e4m3fn:
        return torch._scaled_mm(a, b, one, one, out_dtype=out.dtype, out=out)
    kept, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        return torch.mm(a, b, out=out)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = kept


@dataclass(frozen=True)
class EndingCall:
    """The top rung with an ending, on one set of operands."""

    product: Callable[[Tensor, Tensor, Tensor, Extras], None]
    operands: EndingOperands
    ending: LadderEnding
    c: Tensor

    def __call__(self) -> None:
        vectors = self.operands.vectors
        pointers = self.operands.pointers(self.ending, lambda name: vectors[name].data_ptr())
        self.product(self.operands.a, self.operands.b, self.c, Extras(**pointers))

    def fault(self) -> str:
        """Run it, and return what is wrong with it, or ""."""
        largest = self.operands.vectors["row_largest"].zero_()  # another ending may have written it
        self.c.zero_()
        self()
        exact, wrong = self.operands.exact(self.ending)
        right = is_near(self.c, exact, wrong) and is_largest(largest, self.ending, exact, wrong)
        return "" if right else "it is not as near as its format allows"


class VariantCall(partial[object]):
    """A product in another format, with its own operands and output."""

    def fault(self) -> str:
        """Run it, and return what is wrong with it, or ""."""
        a, b, c = self.args
        c.zero_()
        self()
        return difference(c, a.float() @ b.float().T)


class BiasedCall(partial[object]):
    """A call whose result is the activation of product + bias."""

    activation: Callable[[Tensor], Tensor] = staticmethod(relu)


class GeluCall(BiasedCall):
    activation = staticmethod(gelu)


@dataclass(frozen=True)
class TemplateRung:
    """A rung of NVIDIA's templates.

    like: the rung that does the same work. load: takes the folder of cubins. call: what a launch of it is.
    """

    name: str
    like: str
    load: Callable[[Path | None], Callable[..., object]]
    call: type[partial[object]]


TEMPLATES = (
    *(
        TemplateRung(x.name, "persistent", partial(LoadedCutlass, x), BiasedCall if x.steps else partial)
        for x in CUTLASS_RUNGS
    ),
    TemplateRung(CUTE, "warp_roles", LoadedCute, GeluCall),
)


def difference(found: Tensor, exact: Tensor) -> str:
    """Return the fault in words, or "". bfloat16 rounds by 2**-8, and sums of normal numbers are off by far less."""
    bound = 2**-8 * exact.abs() + 2**-12 * exact.shape[-1] ** 0.5
    wrong = ~((found.float() - exact).abs() <= bound)
    return f"{int(wrong.sum())} of {wrong.numel()} outputs are wrong" if wrong.any() else ""


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


FORMATS = {"bfloat16": "bfloat16", "float16": "float16", "float32": "tf32", "float8_e4m3fn": "fp8", "int8": "int8"}
PROBLEMS = (
    SizedProduct(4096),
    SizedProduct(8192),
    SizedProduct(4096, rows=512),
    *(FormatProduct(4096, dtype, word) for dtype, word in FORMATS.items()),
)

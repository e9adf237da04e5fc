"""The problems of the GEMM ladder: C = A · Bᵀ of square matrices and of few rows in bfloat16, beside cuBLAS."""

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
from ridgeline.kernels.gemm.ladder.predict import predict
from ridgeline.kernels.gemm.ladder.run import LoadedCeiling, LoadedRung, numbers, runs_here
from ridgeline.kernels.gemm.ladder.rungs import RUNGS, VARIANTS
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


PROBLEMS = (SizedProduct(4096), SizedProduct(8192), SizedProduct(4096, rows=512))

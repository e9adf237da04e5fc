"""The problems of the GEMM ladder: C = A · Bᵀ of square matrices in bfloat16, beside cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.kernels.cuda.predict import MMA_SHARE, chip_here
from ridgeline.kernels.gemm.ladder.predict import predict
from ridgeline.kernels.gemm.ladder.run import LoadedCeiling, LoadedRung, runs_here
from ridgeline.kernels.gemm.ladder.rungs import RUNGS, VARIANTS
from ridgeline.kernels.gemm.ladder.triton_rungs import TRITON_RUNGS, call, predict_triton
from ridgeline_bench.ladders.runs import OPERANDS, Call


@dataclass(frozen=True)
class SquareProduct:
    """M = N = K = size."""

    size: int

    @property
    def name(self) -> str:
        return f"{self.size}³"

    @property
    def flops(self) -> float:
        return 2.0 * self.size**3

    def least(self) -> Iterator[tuple[str, float, str]]:
        for rung in RUNGS:
            found = predict(rung, chip_here(_gpu()), self.size, self.size, self.size)
            yield rung.name, found.bound, found.limiter
        for variant in VARIANTS:
            rate = chip_here(_gpu()).matrix * MMA_SHARE * variant.speed
            yield variant.ceiling.name, self.flops / rate, "tensor cores"
        for each in TRITON_RUNGS:
            found = predict_triton(each, chip_here(_gpu()), self.size, self.size, self.size)
            yield each.name, found.bound, found.limiter

    def operands(self, cubins: Path | None) -> Matrices:
        return Matrices(self.size, cubins)


class Matrices:
    """Operands in turn, and one output."""

    def __init__(self, size: int, cubins: Path | None = None) -> None:
        self.cubins = cubins
        self.a, self.b = (torch.randn(OPERANDS, size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.c = torch.empty(size, size, device="cuda", dtype=torch.bfloat16)
        self.exact = self.a[0].float() @ self.b[0].float().T

    @property
    def peers(self) -> Mapping[str, Sequence[Call]]:
        return {"cuBLAS": [lambda x=x, y=y: torch.mm(x, y.T, out=self.c) for x, y in self._pairs()]}

    def rung(self, name: str) -> Sequence[Call] | None:
        if found := [each for each in TRITON_RUNGS if each.name == name]:
            programs = torch.cuda.get_device_properties("cuda").multi_processor_count
            rung_call = partial(call, found[0], c_MN=self.c, programs=programs)
            return [partial(rung_call, x, y) for x, y in self._pairs()]
        if variants := [each for each in VARIANTS if each.ceiling.name == name]:
            return [LoadedCeiling(variants[0], 2.0 * len(self.c) ** 3, self.cubins)]
        rung = next(each for each in RUNGS if each.name == name)
        if not runs_here(rung):
            return None
        product = LoadedRung(rung, self.cubins)
        return [lambda x=x, y=y: product(x, y, self.c) for x, y in self._pairs()]  # type: ignore[misc]

    def fault(self, call: Call, rung: str = "") -> str:
        if isinstance(call, LoadedCeiling):
            return call.fault()
        self.c.fill_(torch.nan)
        call()
        return difference(self.c, self.exact)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.a, self.b, strict=True)


def difference(found: Tensor, exact: Tensor) -> str:
    """Return the fault in words, or "". bfloat16 rounds by 2**-8, and sums of normal numbers are off by far less."""
    bound = 2**-8 * exact.abs() + 2**-12 * exact.shape[-1] ** 0.5
    wrong = ~((found.float() - exact).abs() <= bound)
    return f"{int(wrong.sum())} of {wrong.numel()} outputs are wrong" if wrong.any() else ""


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


PROBLEMS = (SquareProduct(4096), SquareProduct(8192))

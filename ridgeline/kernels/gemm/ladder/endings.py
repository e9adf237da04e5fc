"""The formats and epilogues of rung 15, as that rung's file with other definitions, and their reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.gemm.ladder.rungs import RUNGS, Rung

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24, torch.float8_e4m3fn: 2**-4}
LEAST = {torch.float8_e4m3fn: 2**-10}  # half of the smallest number but zero
FP8_SUMS = 2**-12  # what Hopper's tensor cores keep of a sum of fp8 products: some 13 bits, by others' measurements


@dataclass(frozen=True, kw_only=True)
class LadderEnding:
    """Rung 15 in another format, or with an epilogue: steps of `epilogue.cuh`, from left to right."""

    name: str
    steps: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    result: str = "bfloat16"
    needs: str = "HGMMA.64x256x16.F32.BF16"

    @property
    def item(self) -> int:
        """Bytes of a number of the operands."""
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def rung(self) -> Rung:
        """Rung 15, so defined."""
        words = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "e4m3", "int8": "int8", "float32": "float"}
        columns = (2 if "SwiGlu" in self.steps else 1) * 16 // getattr(torch, self.result).itemsize
        last = next(rung for rung in RUNGS if rung.extras)
        defines = {"ELEMENT": words[self.dtype], "OUTPUT": words[self.result]}
        return replace(
            last, name=f"{last.name}-{self.name}", depth=128 // self.item, multiple=max(8, 16 // self.item, columns),
            defines={**defines, "EPILOGUE": ",".join(self.steps)}, needs=(self.needs, "UTMASTG.2D"),
            file=last.source.name,
        )  # fmt: skip


FP8, INT8 = "QGMMA.64x256x32.F32.E4M3.E4M3", "IGMMA.64x256x32.S8.S8"
ENDINGS = (
    LadderEnding(name="fp16", dtype="float16", result="float16", needs="HGMMA.64x256x16.F32 "),
    LadderEnding(name="float32", result="float32"),
    LadderEnding(name="tf32", dtype="float32", result="float32", needs="HGMMA.64x256x8.F32.TF32"),
    LadderEnding(name="tf32-bias-relu", steps=("Bias", "Relu"), dtype="float32", needs="HGMMA.64x256x8.F32.TF32"),
    LadderEnding(name="bias-gelu", steps=("Bias", "Gelu")),
    LadderEnding(name="bias-gelu-row-max", steps=("Bias", "Gelu", "RowMax")),
    LadderEnding(name="bias-relu-residual", steps=("Bias", "Relu", "Residual")),
    LadderEnding(name="swiglu", steps=("SwiGlu",)),
    LadderEnding(name="fp8", steps=("Scale",), dtype="float8_e4m3fn", needs=FP8),
    LadderEnding(
        name="fp8-swiglu-fp8", steps=("Scale", "SwiGlu"), dtype="float8_e4m3fn", result="float8_e4m3fn", needs=FP8
    ),
    LadderEnding(name="int8", steps=("Scale",), dtype="int8", needs=INT8),
    LadderEnding(name="int8-bias", steps=("Scale", "Bias"), dtype="int8", needs=INT8),
)


class EndingOperands:
    """Operands in a format and what epilogues read, at random, and the exact result: A is [m, k], B is [n, k].

    vectors: what `Extras` points to, by its names.
    """

    def __init__(self, dtype: str, m: int, n: int, k: int, device: str = "cpu") -> None:
        self.dtype = getattr(torch, dtype)
        with torch.device(device):
            self.a, self.b = (self._drawn(rows, k) for rows in (m, n))
            scales = {"row_scales": torch.rand(m, 1) / 4 + 0.1, "column_scales": torch.rand(1, n) / 4 + 0.1}
            self.vectors = {name: x / (1000 if dtype == "int8" else 1) for name, x in scales.items()}
            self.vectors |= {"bias": torch.randn(1, n).bfloat16(), "residual": torch.randn(m, n).bfloat16()}
            self.vectors["row_largest"] = torch.zeros(m, 1)

    def pointers(self, ending: LadderEnding, place: Callable[[str], int | None]) -> dict[str, int | None]:
        """Return the pointers that the ending reads, with `place(name)` as their addresses."""
        used = {
            "Scale": ("row_scales", "column_scales"), "Bias": ("bias",), "Residual": ("residual",),
            "RowMax": ("row_largest",),
        }  # fmt: skip
        return {name: place(name) for step in ending.steps for name in used.get(step, ())}

    def _drawn(self, rows: int, k: int) -> Tensor:
        drawn = (torch.randn(rows, k) * (30 if self.dtype == torch.int8 else 1)).to(self.dtype)
        return (drawn.view(torch.int32) & ~0x1FFF).view(torch.float32) if self.dtype == torch.float32 else drawn  # tf32

    def after(self, step: str, x: Tensor) -> Tensor:
        """Return sums behind a step, in float64."""
        wide = {name: values.double() for name, values in self.vectors.items()}
        if step == "SwiGlu":
            return functional.silu(x[:, ::2]) * x[:, 1::2]
        return {
            "Scale": lambda: x * wide["row_scales"] * wide["column_scales"],
            "Bias": lambda: x + wide["bias"],
            "Residual": lambda: x + wide["residual"],
            "Relu": lambda: functional.relu(x),
            "Gelu": lambda: functional.gelu(x),
            "RowMax": lambda: x,
        }[step]()

    def exact(self, ending: LadderEnding) -> tuple[Tensor, Tensor]:
        """Return the result, and how far float32 may be from it before it is rounded.

        A sum of K products is off by K units of roundoff of the sum of their sizes at most, and each step by a few
        units of the largest number it meets: 16 allow for erf and exp. A step passes an error on at most 1.13 times
        (GELU), or times the other factor. The tensor cores keep fewer bits of sums of fp8 products.
        """
        x = self.a.double() @ self.b.double().T
        kept = FP8_SUMS if self.dtype == torch.float8_e4m3fn and self.a.is_cuda else 0.0
        wrong = (self.a.shape[1] * 2**-24 + kept) * (self.a.double().abs() @ self.b.double().abs().T)
        for step in ending.steps:
            if step == "Scale":
                wrong = self.after("Scale", wrong)
            if step == "SwiGlu":
                gate, value = x[:, ::2].abs(), x[:, 1::2].abs()
                wrong = 1.13 * wrong[:, ::2] * value + (gate + wrong[:, ::2]) * wrong[:, 1::2]
            x = self.after(step, x)
            wrong = 1.13 * wrong + 16 * 2**-24 * (x.abs() + 4)
        return x, wrong


def is_near(found: Tensor, exact: Tensor, wrong: Tensor) -> bool:
    """Return True if a result is the exact one, off by as much as float32 may be and then rounded to its format. What
    is too large for fp8 becomes its largest number."""
    if found.dtype == torch.float8_e4m3fn:
        most = torch.finfo(found.dtype).max
        exact = exact.clamp(-most, most)
    bound = ROUNDING[found.dtype] * (exact.abs() + wrong) + wrong + LEAST.get(found.dtype, 0)
    return bool(((found.double() - exact).abs() <= bound).all())


def is_largest(found: Tensor, ending: LadderEnding, exact: Tensor, wrong: Tensor) -> bool:
    """Return True if an ending that says each row's largest size says the right one, and another leaves zeros."""
    if "RowMax" not in ending.steps:
        return not found.any()
    off = (found.double() - exact.abs().amax(1, keepdim=True)).abs()
    return bool((off <= wrong.amax(1, keepdim=True)).all())

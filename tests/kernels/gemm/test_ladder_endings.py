"""The last rung of the GEMM ladder in every format and with every epilogue, emulated, beside torch in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.kernels.base.native import has_compiler
from ridgeline.kernels.cuda.compile import compilers
from ridgeline.kernels.cuda.emulate import LaunchShape, build
from ridgeline.kernels.gemm.ladder.rungs import ENDINGS, Extras, LadderEnding
from tests.kernels.compiled import costly, facts
from tests.kernels.cuda.memory import Matrix

FEW = ("bias-relu-residual", "bias-gelu-row-max", "fp8-swiglu-fp8", "tf32-bias-relu")
each_ending = pytest.mark.parametrize(
    "ending",
    [each if each.name in FEW else pytest.param(each, marks=pytest.mark.thorough) for each in ENDINGS],
    ids=lambda ending: ending.name,
)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24, torch.float8_e4m3fn: 2**-4}
LEAST = {torch.float8_e4m3fn: 2**-10}  # half of the smallest number but zero


class Given:
    """Operands and what epilogues read, and the exact result."""

    def __init__(self, ending: LadderEnding, m: int, n: int, k: int) -> None:
        self.dtype = getattr(torch, ending.dtype)
        self.a, self.b = (self._drawn(rows, k) for rows in (m, n))
        self.vectors = {"row_scales": torch.rand(m, 1) / 4 + 0.1, "column_scales": torch.rand(1, n) / 4 + 0.1}
        if ending.dtype == "int8":
            self.vectors = {name: x / 1000 for name, x in self.vectors.items()}
        self.vectors |= {"bias": torch.randn(1, n).bfloat16(), "residual": torch.randn(m, n).bfloat16()}
        self.vectors["row_largest"] = torch.zeros(m, 1)

    def to(self, device: str) -> Given:
        """Move all of it."""
        self.a, self.b = self.a.to(device), self.b.to(device)
        self.vectors = {name: x.to(device) for name, x in self.vectors.items()}
        return self

    def pointers(self, ending: LadderEnding, place: Callable[[str], int | None]) -> dict[str, int | None]:
        """Return what the ending reads, with `place(name)` as its address."""
        used = {
            "Scale": ("row_scales", "column_scales"), "Bias": ("bias",), "Residual": ("residual",),
            "RowMax": ("row_largest",),
        }  # fmt: skip
        return {name: place(name) for step in ending.steps for name in used.get(step, ())}

    def _drawn(self, rows: int, k: int) -> Tensor:
        drawn = (torch.randn(rows, k) * (30 if self.dtype == torch.int8 else 1)).to(self.dtype)
        return (drawn.view(torch.int32) & ~0x1FFF).view(torch.float32) if self.dtype == torch.float32 else drawn  # tf32

    def after(self, step: str, x: Tensor) -> Tensor:
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
        (GELU), or times the other factor.
        """
        x = self.a.double() @ self.b.double().T
        wrong = self.a.shape[1] * 2**-24 * (self.a.double().abs() @ self.b.double().abs().T)
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
    bound = ROUNDING[found.dtype] * (exact.abs() + wrong) + wrong + LEAST.get(found.dtype, 0)
    return bool(((found.double() - exact).abs() <= bound).all())


def is_largest(found: Tensor, ending: LadderEnding, exact: Tensor, wrong: Tensor) -> bool:
    """True if an ending that says each row's largest size says the right one, and another leaves zeros."""
    if "RowMax" not in ending.steps:
        return not found.any()
    off = (found.double() - exact.abs().amax(1, keepdim=True)).abs()
    return bool((off <= wrong.amax(1, keepdim=True)).all())


@pytest.mark.few(2)
@pytest.mark.skipif(not has_compiler(), reason="the emulator needs a C++ compiler (c++, g++ or clang++)")
@each_ending
def test_an_ending_is_torchs_in_float64(ending: LadderEnding, tmp_path: Path) -> None:
    rung, m, n, k = ending.rung, 77, 352, 272
    given = Given(ending, m, n, k)
    kernel = build(rung.source, "gemm", rung.defines, tmp_path)
    result = getattr(torch, ending.result)
    a_, b_ = Matrix(m, k, given.dtype, given.a), Matrix(n, k, given.dtype, given.b)
    exact, wrong = given.exact(ending)
    c_ = Matrix(*exact.shape, result)
    held = {name: Matrix(*x.shape, x.dtype, x) for name, x in given.vectors.items()}
    pointers = given.pointers(ending, lambda name: held[name].pointer.value)
    maps = [x.map(rows) for x, rows in zip((a_, b_, c_), rung.boxes, strict=True)]
    shape = LaunchShape(rung.grid(m, n, 2), (*rung.block, 1), cluster=rung.cluster, shared=rung.shared, order=2)
    kernel.launch(shape, [*maps, *map(ctypes.c_int, (m, n, k)), Extras(**pointers)])
    assert c_.guarded(), "it wrote outside its output"
    assert is_near(c_.values(), exact, wrong)
    assert is_largest(held["row_largest"].values(), ending, exact, wrong)


@pytest.mark.skipif(not compilers(), reason="no NVRTC and no nvcc")
@pytest.mark.parametrize("ending", [
    pytest.param(each, marks=[pytest.mark.thorough]) if each.name not in FEW[:1] and costly(
        each.rung.source, each.rung.arch, each.rung.defines
    ) else each for each in ENDINGS
], ids=lambda ending: ending.name)  # fmt: skip
def test_an_ending_spills_nothing_and_multiplies_in_its_format(ending: LadderEnding) -> None:
    pytest.importorskip("triton", reason="its package has the disassembler")
    rung = ending.rung
    code = facts(rung.source, rung.arch, rung.defines)
    assert all(map(code.has, rung.needs)), [name for name in code.counts if "GMMA" in name]
    assert code.stack == 0
    assert code.registers <= rung.registers


def test_steps_in_another_order_are_found_wrong() -> None:
    ending = next(each for each in ENDINGS if each.name == "bias-relu-residual")
    given = Given(ending, 20, 16, 64)
    exact, wrong = given.exact(ending)
    other, _ = given.exact(replace(ending, steps=("Relu", "Bias", "Residual")))
    assert is_near(exact.bfloat16(), exact, wrong)
    assert not is_near(other.bfloat16(), exact, wrong)

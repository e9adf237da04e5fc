"""The last rung of the GEMM ladder in every format and with every epilogue, emulated, beside torch in float64."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.kernels.base.native import has_compiler
from ridgeline.kernels.cuda.compile import compilers
from ridgeline.kernels.cuda.emulate import LaunchShape, build
from ridgeline.kernels.gemm.ladder.endings import ENDINGS, EndingOperands, LadderEnding, is_largest, is_near
from ridgeline.kernels.gemm.ladder.rungs import Extras
from tests.kernels.compiled import costly, facts
from tests.kernels.cuda.memory import Matrix

FEW = ("bias-relu-residual", "bias-gelu-row-max", "fp8-swiglu-fp8", "tf32-bias-relu")
each_ending = pytest.mark.parametrize(
    "ending",
    [each if each.name in FEW else pytest.param(each, marks=pytest.mark.thorough) for each in ENDINGS],
    ids=lambda ending: ending.name,
)


@pytest.mark.few(2)
@pytest.mark.skipif(not has_compiler(), reason="the emulator needs a C++ compiler (c++, g++ or clang++)")
@each_ending
def test_an_ending_is_torchs_in_float64(ending: LadderEnding, tmp_path: Path) -> None:
    rung, m, n, k = ending.rung, 77, 352, 272
    given = EndingOperands(ending.dtype, m, n, k)
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
    given = EndingOperands(ending.dtype, 20, 16, 64)
    exact, wrong = given.exact(ending)
    other, _ = given.exact(replace(ending, steps=("Relu", "Bias", "Residual")))
    assert is_near(exact.bfloat16(), exact, wrong)
    assert not is_near(other.bfloat16(), exact, wrong)

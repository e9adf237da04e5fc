"""Every rung of the GEMM ladder on a GPU, beside float64. RIDGELINE_TEST_CUBINS names a folder of machine code."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from ridgeline.kernels.cuda.compile import NoCudaCompiler
from ridgeline.kernels.gemm.ladder import cute_rung
from ridgeline.kernels.gemm.ladder.cute_rung import LoadedCute
from ridgeline.kernels.gemm.ladder.cutlass_rungs import CUTLASS_RUNGS, ArgumentFiller, LoadedCutlass
from ridgeline.kernels.gemm.ladder.endings import ENDINGS, EndingOperands, LadderEnding, is_largest, is_near
from ridgeline.kernels.gemm.ladder.other_gpus import PAIRS
from ridgeline.kernels.gemm.ladder.run import LoadedRung, runs_here
from ridgeline.kernels.gemm.ladder.rungs import RUNGS, Extras, Rung
from tests.kernels.cuda.memory import difference
from tests.kernels.gemm.test_ladder import ragged


def on_this_gpu(rung: Rung) -> LoadedRung:
    if not runs_here(rung):
        pytest.skip(f"it is for {rung.arch}")
    carried = os.environ.get("RIDGELINE_TEST_CUBINS")
    try:
        return LoadedRung(rung, Path(carried) if carried else None)
    except NoCudaCompiler as none:
        pytest.skip(f"{none} RIDGELINE_TEST_CUBINS names a folder.")


@pytest.mark.gpu
@pytest.mark.parametrize("rung", [*RUNGS, PAIRS], ids=lambda rung: rung.name)
def test_rungs_on_a_gpu(rung: Rung) -> None:
    loaded = on_this_gpu(rung)
    for m, n, k in ((256, 512, 384), (1000, 1016, 520), ragged(rung), (1, 8, 8)):
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        c = torch.full((m * n + 4096,), torch.nan, device="cuda", dtype=torch.bfloat16)
        loaded(a, b, c[: m * n].view(m, n))
        assert difference(c[: m * n].view(m, n).cpu(), a.cpu(), b.cpu()) == ""
        assert c[m * n :].isnan().all(), "it wrote behind its output"


@pytest.mark.gpu
def test_the_gluon_rung_on_a_gpu() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it is for Hopper")
    from ridgeline.kernels.gemm.ladder.gluon_rung import gluon_product

    for m, n, k in ((256, 512, 384), (1000, 1016, 520), (5, 64, 64), (3000, 2304, 1024)):
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        c = torch.full((m * n + 4096,), torch.nan, device="cuda", dtype=torch.bfloat16)
        gluon_product(a, b, c[: m * n].view(m, n))
        assert difference(c[: m * n].view(m, n).cpu(), a.cpu(), b.cpu()) == ""
        assert c[m * n :].isnan().all(), "it wrote behind its output"


@pytest.mark.gpu
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.name)
def test_endings_on_a_gpu(ending: LadderEnding) -> None:
    loaded = on_this_gpu(ending.rung)
    for m, n, k in ((256, 512, 384), (1000, 1056, 528), (1, 32, 16)):
        given = EndingOperands(ending.dtype, m, n, k, "cuda")
        exact, wrong = given.exact(ending)
        c = torch.zeros(exact.shape, device="cuda", dtype=getattr(torch, ending.result))
        pointers = given.pointers(ending, lambda name, held=given.vectors: held[name].data_ptr())
        loaded(given.a, given.b, c, Extras(**pointers))
        assert is_near(c, exact, wrong)
        assert is_largest(given.vectors["row_largest"], ending, exact, wrong)


TEMPLATES = {
    **{each.name: (each.steps, partial(LoadedCutlass, each)) for each in CUTLASS_RUNGS},
    cute_rung.NAME: (cute_rung.STEPS, LoadedCute),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_on_a_gpu(name: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it is for sm_90a")
    (steps, load), carried = TEMPLATES[name], os.environ.get("RIDGELINE_TEST_CUBINS")
    try:
        loaded = load(Path(carried) if carried else None)
    except NoCudaCompiler as none:
        pytest.skip(str(none))
    ending = LadderEnding(name=name, steps=steps)
    for m, n, k in ((256, 512, 384), (1000, 1040, 528), (1, 16, 16), (3000, 2304, 1024)):
        given = EndingOperands(ending.dtype, m, n, k, "cuda")
        memory = torch.full((m * n + 4096,), torch.nan, device="cuda", dtype=torch.bfloat16)
        c = memory[: m * n].view(m, n)
        loaded(given.a, given.b, c, given.vectors["bias"])
        assert is_near(c, *given.exact(ending))
        assert memory[m * n :].isnan().all(), "it wrote behind its output"


@pytest.mark.gpu
def test_cutlass_refuses_sizes_that_are_no_multiples() -> None:
    carried = os.environ.get("RIDGELINE_TEST_CUBINS", "")
    library = CUTLASS_RUNGS[0].files(Path(carried))[1]
    if not library.is_file():
        pytest.skip("RIDGELINE_TEST_CUBINS names a folder.")
    with pytest.raises(ValueError, match="multiples of 8, got 16 and 12"):
        ArgumentFiller(library).argument((256, 256, 256, 256), (8, 16, 12), 132)

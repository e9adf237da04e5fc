"""Every rung of the GEMM ladder on a GPU, beside float64. RIDGELINE_TEST_CUBINS names a folder of machine code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ridgeline.kernels.cuda.compile import NoCudaCompiler
from ridgeline.kernels.gemm.ladder.run import LoadedRung, runs_here
from ridgeline.kernels.gemm.ladder.rungs import RUNGS, Rung
from tests.kernels.cuda.memory import difference
from tests.kernels.gemm.test_ladder import ragged


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_rungs_on_a_gpu(rung: Rung) -> None:
    if not runs_here(rung):
        pytest.skip(f"it is for {rung.arch}")
    carried = os.environ.get("RIDGELINE_TEST_CUBINS")
    try:
        loaded = LoadedRung(rung, Path(carried) if carried else None)
    except NoCudaCompiler as none:
        pytest.skip(f"{none} RIDGELINE_TEST_CUBINS names a folder.")
    for m, n, k in ((256, 512, 384), (1000, 1016, 520), ragged(rung), (1, 8, 8)):
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        c = torch.full((m * n + 4096,), torch.nan, device="cuda", dtype=torch.bfloat16)
        loaded(a, b, c[: m * n].view(m, n))
        assert difference(c[: m * n].view(m, n).cpu(), a.cpu(), b.cpu()) == ""
        assert c[m * n :].isnan().all(), "it wrote behind its output"

"""Every rung of the memory-bound ops on a GPU, beside float64. RIDGELINE_TEST_CUBINS names a folder of machine code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ridgeline.kernels.cuda.compile import NoCudaCompiler
from ridgeline.kernels.memory_bound import reference
from ridgeline.kernels.memory_bound.launches import MatrixShape
from ridgeline.kernels.memory_bound.run import LoadedRung, runs_here, takes
from ridgeline.kernels.memory_bound.rungs import RUNGS, MemoryRung


def fault(rung: MemoryRung, shape: MatrixShape) -> str:
    """Return what is wrong with a rung's result for this shape, or ""."""
    carried = os.environ.get("RIDGELINE_TEST_CUBINS")
    try:
        loaded = LoadedRung(rung, shape, Path(carried) if carried else None)
    except NoCudaCompiler as none:
        pytest.skip(f"{none} RIDGELINE_TEST_CUBINS names a folder.")
    given, wanted = reference.inputs(rung.op, shape, "cuda"), reference.output(rung.op, shape, "cuda")
    memory = torch.full((wanted.numel() + 4096,), torch.nan, device="cuda", dtype=wanted.dtype)
    y = memory[: wanted.numel()].view_as(wanted)
    loaded.bound({**given, "y": y})()
    assert memory[wanted.numel() :].isnan().all(), "it wrote behind its output"
    return reference.fault(rung, rung.op, y, given)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.title)
def test_rungs_on_a_gpu(rung: MemoryRung) -> None:
    if not runs_here(rung):
        pytest.skip(f"it is for {rung.arch}")
    step = rung.multiple
    found = 0
    shapes = (
        (1024, 1024), (4 * 517, 1000 + 7 * step), (333 * step, 4096 + step), (step, step), (64, 65536 - 3 * step),
        (40, 262144 - 8 * step),
    )  # fmt: skip
    for shape in (MatrixShape(*each) for each in shapes):
        if takes(rung, shape):
            found += 1
            assert fault(rung, shape) == "", shape
    assert found >= (2 if rung.clustered else 4)  # they leave short rows to others

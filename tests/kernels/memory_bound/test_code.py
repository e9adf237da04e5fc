"""The machine code of the memory-bound rungs: the instructions that each is about, and no spills."""

from __future__ import annotations

import pytest

from ridgeline.kernels.cuda.compile import compilers
from ridgeline.kernels.memory_bound.launches import MatrixShape
from ridgeline.kernels.memory_bound.run import codes, takes
from ridgeline.kernels.memory_bound.rungs import RUNGS, MemoryRung
from tests.kernels.compiled import costly, facts

pytest.importorskip("triton", reason="its package has the disassembler")
needs_compiler = pytest.mark.skipif(
    not compilers(), reason='no NVRTC and no nvcc; try pip install "ridgeline[ladders]"'
)
FULL = 64 << 10  # registers of a multiprocessor


def widest(rung: MemoryRung) -> int:
    """The most columns for which the rung is cut in its own way: with a cluster, where it has any."""
    return max(n for n in (1024, 4096, 16384, 65536, 262144) if takes(rung, MatrixShape(1024, n)))


@needs_compiler
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.title)
def test_a_rung_uses_the_machine_as_it_says(rung: MemoryRung) -> None:
    cut = rung.cut(widest(rung))
    code = rung.code(cut)
    if costly(code.source, "sm_90", code.defines) and rung.number < 4:
        pytest.skip("unchanged, and the compiler is another: others are compiled")
    found = facts(code.source, "sm_90", code.defines)
    assert [needed for needed in rung.needs if not found.has(needed)] == []
    assert found.stack == 0, "registers are spilled"
    assert found.registers <= rung.registers
    assert rung.kind != "cluster" or not found.has("MEMBAR.ALL.GPU"), "a row waits for what others stored"


@needs_compiler
@pytest.mark.thorough
def test_no_cut_spills() -> None:
    for code in codes():
        found = facts(code.source, "sm_90", code.defines)
        assert found.stack == 0, code.name
        threads = int(code.defines.get("THREADS", 0))
        assert found.registers * threads <= FULL, code.name

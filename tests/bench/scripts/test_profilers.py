"""What scripts read from profilers and checkers, without these."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ridgeline_bench.named_kernels import title
from ridgeline_bench.profile.ncu import run_tool
from ridgeline_bench.scripts.forward_ops import ForwardOp, Roofs, lines
from ridgeline_bench.scripts.sanitized import FAULTS, FAULTY, KERNELS, Outcome, line, owner, reports, right_ones

ROOFS = Roofs(bandwidth=1e12, product=1e14, launch=1e-6)


@pytest.mark.parametrize(("op", "bound"), [
    (ForwardOp("aten::addmm", ((768,), (1, 3072), (3072, 768)), 12, 12e-5), "memory"),
    (ForwardOp("aten::addmm", ((768,), (8192, 3072), (3072, 768)), 12, 12e-3), "compute"),
    (ForwardOp("aten::mm", ((8, 8), (8, 8)), 10, 5e-6), "launch"),
    (ForwardOp("aten::view", ((8, 8),), 10, 0.0), "view"),
    (ForwardOp("aten::mul", ((8192, 3072), ()), 1, 1e-3), "memory"),
])  # fmt: skip
def test_what_bounds_an_op(op: ForwardOp, bound: str) -> None:
    assert op.bound(ROOFS, 2)[0] == bound


def test_work_of_ops() -> None:
    product = ForwardOp("aten::addmm", ((768,), (128, 3072), (3072, 768)), 1, 1e-3)
    assert product.flops == 2 * 128 * 3072 * 768
    assert product.nbytes(2) == 2 * (768 + 128 * 3072 + 3072 * 768 + 128 * 768)
    linear = ForwardOp("aten::linear", ((8, 128, 3072), (768, 3072), (768,)), 1, 1e-3)
    assert linear.flops == 2 * 8 * 128 * 3072 * 768
    assert linear.nbytes(4) == 4 * (8 * 128 * 3072 + 768 * 3072 + 768 + 8 * 128 * 768)
    heads, tokens = ((2, 12, 64, 32),) * 3, ((2, 64, 12, 32),) * 3
    whole = ForwardOp("aten::_scaled_dot_product_flash_attention_for_cpu", heads, 1, 1e-3)
    assert (
        whole.flops
        == ForwardOp("aten::_flash_attention_forward", tokens, 1, 1e-3).flops
        == 4 * 2 * 12 * 64 * 64 * 32 / 2
    )
    first, second = lines([product, whole], ROOFS, 2, 2)
    assert (first["share"], second["share"]) == (0.5, 0.5)
    assert product.label == "addmm [768] [128 x 3072] [3072 x 768]"


SAID = """ran gemm:mma_sync: right
ran op:sample:1x128256: off by up to 3
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at faulty_memory(int *, int *)+0x30
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f is out of bounds
=========
========= Error: Race reported between Write access at gemm+0x90
=========     and Read access at gemm+0xa0 [2048 hazards]
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::foo<int>(int)+0x20 in x.cu:3
========= ERROR SUMMARY: 2 errors
"""


def test_reports_have_a_kernel_and_an_owner() -> None:
    found = Counter(reports(SAID))
    assert {(kernel, owner(kernel)) for kernel, _ in found} == {
        ("faulty_memory", "faulty"), ("gemm", "ours"), ("void at::native::foo<int>", "torch's"),
    }  # fmt: skip
    outcome = Outcome("memcheck", right_ones(SAID), found)
    assert outcome.right == ["gemm:mma_sync"]
    stored = line(outcome, "2025.3")
    assert (stored["ours"], stored["torch's"], stored["faulty"]) == (1, 1, 1)


def test_each_tool_has_its_fault_and_each_kernel_its_name() -> None:
    text = FAULTS.read_text()
    assert all(f"void {name}(" in text for name in FAULTY.values())
    assert len({title(name) for name in KERNELS}) == len(KERNELS)


def test_a_tool_that_hangs_ends_with_the_program_it_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    text, ended = run_tool(["bash", "-c", f"echo begun; sleep 60 & echo $! > {started}; wait"], 0.5)
    assert (text, ended) == ("begun\n", False)
    number = started.read_text().strip()
    status = Path(f"/proc/{number}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"
    assert run_tool(["bash", "-c", "echo $WORD >&2"], 20, WORD="said") == ("said\n", True)

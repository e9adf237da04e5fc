"""The Triton rungs of the GEMM ladder in Triton's interpreter, beside float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda.memory import difference

pytest.importorskip("triton")
from ridgeline.kernels.gemm.ladder import triton_rungs
from ridgeline.kernels.gemm.ladder.triton_rungs import TRITON_RUNGS, TritonRung, call

each_rung = pytest.mark.parametrize("rung", TRITON_RUNGS, ids=lambda rung: rung.name)
SHAPES = ((128, 512, 128), (200, 272, 144), (1, 16, 16), (1100, 40, 80))  # the last: more rows of tiles than a group


def product(rung: TritonRung, a: Tensor, b: Tensor, programs: int) -> str:
    m, n = len(a), len(b)
    memory = torch.full((m * n + 256,), torch.nan, dtype=a.dtype, device=a.device)
    call(rung, a, b, memory[128:-128].view(m, n), programs)
    assert memory[:128].isnan().all()
    assert memory[-128:].isnan().all(), "it wrote outside its output"
    return difference(memory[128:-128].view(m, n).cpu(), a.cpu(), b.cpu())


@each_rung
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_triton_rung_is_right(rung: TritonRung, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    assert product(rung, torch.randn(m, k).half(), torch.randn(n, k).half(), programs=3) == ""


@pytest.mark.parametrize("programs", [1, 2, 5, 7, 13, 40])
def test_stretches_of_any_length_meet_every_step_once(programs: int) -> None:
    """6 tiles of 5 steps: stretches of several tiles, of one tile, within one tile, and of single steps."""
    rung = next(each for each in TRITON_RUNGS if each.name == "triton_stream_k")
    assert product(rung, torch.randn(300, 300).half(), torch.randn(512, 300).half(), programs) == ""


def test_the_page_has_the_predictions() -> None:
    from tests.kernels.gemm.test_ladder import PAGE

    assert "\n".join(triton_rungs.table()) in PAGE.read_text()


def test_rungs_say_what_they_are() -> None:
    for number, rung in enumerate(TRITON_RUNGS, 1):
        text = rung.file.read_text()
        assert text.startswith(f'"""Triton {number}. ')
        assert all(f"\n{word} " in text for word in ("Idea", "FLOPs", "Bytes", "Limit", "Next"))


@pytest.mark.gpu
@each_rung
def test_triton_rungs_on_a_gpu(rung: TritonRung) -> None:
    for m, n, k in ((1024, 2048, 512), (1000, 1040, 528), (1, 16, 16)):
        a, b = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
        assert product(rung, a, b, torch.cuda.get_device_properties("cuda").multi_processor_count) == ""

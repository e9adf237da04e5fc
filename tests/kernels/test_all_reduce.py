"""Sums over ranks: processes that write into each other's memory, as GPUs do over a link."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ridgeline.kernels.all_reduce.peers import inbox_bytes, peers
from ridgeline.kernels.all_reduce.triton import LARGEST, all_reduce, all_reduce_norm, fits, fits_rows
from ridgeline.kernels.norm.op import rms_norm

SHAPES = [(1, 64), (3, 96), (2, 1030), (1, 64)]  # of sums that follow each other; the first size again
CPU = torch.device("cpu")
EPS = 1e-5


def inputs(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(SHAPES[step], generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def wanted(size: int, step: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([inputs(rank, step, dtype).float() for rank in range(size)]).sum(0).to(dtype)


def rank(number: int, size: int, folder: Path, kind: str) -> None:
    """One process: it sums, and sums with a norm, in turn, and saves what it got."""
    boxes = [
        torch.from_file(str(folder / f"inbox{n}"), shared=True, size=inbox_bytes(size) // 8, dtype=torch.int64)
        for n in range(size)
    ]
    own = peers([box.data_ptr() for box in boxes], number, CPU)
    got, dtype = [], getattr(torch, kind)
    for step, (_, width) in enumerate(SHAPES):
        x_TM, weight_M = inputs(number, step, dtype), torch.linspace(0.5, 1.5, width)
        residual_TM = inputs(99, step, dtype) if step % 2 else None
        got.append(all_reduce(x_TM, own))
        got.extend(all_reduce_norm(x_TM, residual_TM, weight_M, EPS, own))
    torch.save(got, folder / f"got{number}")


@pytest.mark.parametrize(("size", "kind"), [(3, "bfloat16")])
def test_every_rank_gets_the_sum(size: int, kind: str, tmp_path: Path) -> None:
    dtype: torch.dtype = getattr(torch, kind)
    for number in range(size):
        with (tmp_path / f"inbox{number}").open("wb") as file:
            file.truncate(inbox_bytes(size))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "from pathlib import Path; from tests.kernels.test_all_reduce import rank; "
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"{code}rank({n}, {size}, Path({str(tmp_path)!r}), {kind!r})"], env=environment
        )
        for n in range(size)
    ]
    try:
        assert [process.wait(120) for process in processes] == [0] * size
    finally:
        for process in processes:
            process.kill()
    results = [torch.load(tmp_path / f"got{number}") for number in range(size)]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    got, near = iter(results[0]), {"rtol": 1e-2, "atol": 3e-2}  # the interpreter rounds bfloat16 to zero
    for step, (_, width) in enumerate(SHAPES):
        want_TM = wanted(size, step, dtype)
        torch.testing.assert_close(next(got), want_TM, **near)
        residual_TM = inputs(99, step, dtype) if step % 2 else None
        y_TM, s_TM = rms_norm(want_TM, residual_TM, torch.linspace(0.5, 1.5, width), EPS)
        torch.testing.assert_close(next(got), y_TM, **near)
        torch.testing.assert_close(next(got), s_TM, **near)


def test_tensors_that_are_too_large_or_of_other_types_go_another_way() -> None:
    assert fits(torch.empty(LARGEST // 2, dtype=torch.bfloat16))
    assert not fits(torch.empty(LARGEST // 2 + 2, dtype=torch.bfloat16))
    assert not fits(torch.empty(8))
    assert not fits(torch.empty(3, dtype=torch.bfloat16))
    assert fits_rows(torch.empty(128, 8192, dtype=torch.bfloat16))
    assert not fits_rows(torch.empty(129, 64, dtype=torch.bfloat16))
    assert not fits_rows(torch.empty(1, 8194, dtype=torch.bfloat16))

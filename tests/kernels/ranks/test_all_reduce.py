"""Sums over ranks: processes that write into each other's memory, as GPUs do over a link."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from ridgeline.kernels.ranks.all_reduce import choose, direct
from ridgeline.kernels.ranks.all_reduce.peers import inbox_bytes, peers
from ridgeline.kernels.ranks.all_reduce.triton import (
    LARGEST,
    all_gather,
    all_reduce,
    all_reduce_norm,
    fits,
    fits_gather,
    fits_rows,
)
from ridgeline.kernels.small.norm.op import rms_norm
from tests.kernels.ranks.ranks import run_ranks
from tests.kernels.test_compile import lines_printed

SHAPES = [(1, 64), (3, 96), (2, 1030), (1, 64)]  # of sums that follow each other; the first size again
DIRECT = [(1, 64), (130, 8), (2, 1024), (1, 64)]  # 130: programs have two rows, and then other owners
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
        got.append(all_gather(x_TM.float(), own))
    torch.save(got, folder / f"got{number}")
    torch.save(rank_direct(number, size, folder, dtype), folder / f"direct{number}")


def rank_direct(number: int, size: int, folder: Path, dtype: torch.dtype) -> list[Tensor]:
    """All ranks in two shots, then the first two of them in one."""
    got = []
    for ranks in (size, 2):
        if number >= ranks:
            break
        files = [str(folder / f"rows{ranks}of{n}") for n in range(ranks)]
        nbytes = direct.memory_bytes(ranks)
        maps = [torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8) for name in files]
        own = direct.memory([each.data_ptr() for each in maps], number, CPU)
        for step, shape in enumerate(DIRECT):
            x_TM, weight_M = direct_inputs(number, step, dtype), torch.linspace(0.5, 1.5, shape[1])
            assert direct.fits(x_TM, ranks)
            got.append(direct.all_reduce(x_TM, own))
            residual_TM = direct_inputs(99, step, dtype) if step % 2 else None
            got.extend(direct.all_reduce_norm(x_TM, residual_TM, weight_M, EPS, own))
    return got


def direct_inputs(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(DIRECT[step], generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


@pytest.mark.parametrize(("size", "kind"), [(3, "bfloat16")])
def test_every_rank_gets_the_sum(size: int, kind: str, tmp_path: Path) -> None:
    dtype: torch.dtype = getattr(torch, kind)
    for number in range(size):
        with (tmp_path / f"inbox{number}").open("wb") as file:
            file.truncate(inbox_bytes(size))
        for ranks in (size, 2):
            with (tmp_path / f"rows{ranks}of{number}").open("wb") as file:
                file.truncate(direct.memory_bytes(ranks))
    run_ranks("tests.kernels.ranks.test_all_reduce", size, tmp_path, kind)
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
        beside = torch.cat([inputs(rank, step, dtype) for rank in range(size)], -1).float()
        assert torch.equal(next(got), beside)
    sums = [torch.load(tmp_path / f"direct{number}") for number in range(size)]
    assert all(torch.equal(a, b) for a, b in zip(sums[0], sums[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(sums[0], sums[2], strict=False))
    assert len(sums[0]) == 2 * len(sums[2])
    check_direct(iter(sums[0]), size, dtype, near)


def check_direct(got: Iterator[Tensor], size: int, dtype: torch.dtype, near: dict[str, float]) -> None:
    for ranks in (size, 2):
        for step, (_, width) in enumerate(DIRECT):
            want_TM = torch.stack([direct_inputs(rank, step, dtype).float() for rank in range(ranks)]).sum(0).to(dtype)
            torch.testing.assert_close(next(got), want_TM, **near)
            residual_TM = direct_inputs(99, step, dtype) if step % 2 else None
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
    assert fits_gather(torch.empty(3, 2, dtype=torch.int32))
    assert not fits_gather(torch.empty(3, 3, dtype=torch.bfloat16))


def test_rows_that_the_memory_does_not_hold_go_another_way() -> None:
    half = torch.bfloat16
    assert direct.fits_rows(torch.empty(1024, 4096, dtype=half), 2)  # 8 MiB
    assert not direct.fits_rows(torch.empty(1025, 4096, dtype=half), 2)
    assert direct.fits_rows(torch.empty(1024, 4096, dtype=half), 8)
    assert not direct.fits_rows(torch.empty(128, 8192, dtype=half), 16)  # a row is more than a rank's share
    assert not direct.fits_rows(torch.empty(1, 8200, dtype=half), 2)
    assert not direct.fits_rows(torch.empty(1, 4100, dtype=half), 2)
    assert not direct.fits_rows(torch.empty(1, 4096), 2)
    assert not direct.fits_rows(torch.empty(1, 4096, dtype=half), 3, shots=1)
    assert direct.fits(torch.empty(1 << 22, dtype=half), 2)
    assert not direct.fits(torch.empty(0, 8, dtype=half), 2)
    assert not direct.fits(torch.empty(64, 64, dtype=half).T, 2)


def test_a_sums_size_chooses_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "DIRECT_BYTES", {2: 4 << 20})
    kib = [8, 16, 17, 256, 257, 4096, 4097]

    def ways(ranks: int, **can: bool) -> list[str]:
        return [choose.way(each << 10, ranks, **can) for each in kib]

    assert ways(2, words=True, direct=True) == ["words"] * 4 + ["direct"] * 2 + ["library"]
    assert ways(2, words=False, direct=True) == ["direct"] * 6 + ["library"]
    assert ways(2, words=True, direct=False) == ["words"] * 4 + ["library"] * 3
    assert ways(2, words=False, direct=False) == ["library"] * 7
    assert ways(4, words=True, direct=True) == ["words"] * 4 + ["library"] * 3
    assert ways(4, words=True, direct=True, norm=True) == ["words"] * 5 + ["library"] * 2


COUNTING = """
import json
from ridgeline.kernels.ranks.all_reduce.triton import AOT
from ridgeline.kernels.base.aot import build
for kernel in AOT:
    text = build(kernel, "sm_90").asm["ptx"]
    words = kernel.constexprs["W"] // (32 * kernel.options.num_warps)
    print(json.dumps([words, text.count("ld.relaxed.sys"), text.count("st.relaxed.sys")]))
"""


@pytest.mark.dealt
def test_a_thread_sends_and_awaits_each_of_its_words_once() -> None:
    """Triton 3.6 repeats a wait for every layout that its words are wanted in, and each takes a trip to memory."""
    for words, awaited, sent in lines_printed("-c", COUNTING):
        assert awaited == words
        assert sent == words

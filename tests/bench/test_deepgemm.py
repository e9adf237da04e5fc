"""DeepGEMM's headers as a peer: what nvcc is given, and what the functions get of our arguments."""

from __future__ import annotations

import ctypes
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.gemm.fp8.cases import Fp8Case
from ridgeline.kernels.gemm.fp8.op import IN_BLOCKS
from ridgeline_bench.machine import built
from ridgeline_bench.sweep import deepgemm

CPU = torch.device("cpu")


def test_the_build_gets_a_function_for_each_tile(tmp_path: Path) -> None:
    package, library, nvcc = tmp_path / "deep_gemm", tmp_path / "build" / "some.so", tmp_path / "nvcc"
    (package / deepgemm.HEADER).parent.mkdir(parents=True)
    (package / deepgemm.HEADER).touch()
    nvcc.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked; touch {library}\n')
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    assert deepgemm.build(package, library, str(nvcc)) == library
    source, asked = library.with_suffix(".cu").read_text(), (tmp_path / "asked").read_text()
    assert source.count('extern "C" int product_') == len(deepgemm.ROWS) * len(deepgemm.COLUMNS)
    assert source.count("{") == source.count("}")
    assert "code=sm_90a" in asked
    assert f"-I{package}/include" in asked
    with pytest.raises(SystemExit, match="nvcc failed"):
        deepgemm.build(package, library, "false")
    with pytest.raises(SystemExit, match=r"has no include/deep_gemm"):
        deepgemm.build(tmp_path, library, str(nvcc))


@pytest.mark.parametrize("tokens", [1, 16, 33])
def test_a_function_gets_the_pointers_of_a_product(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library in plain torch reads from the pointers what the kernel's maps would."""
    case = Fp8Case(tokens, deepgemm.SIZE, deepgemm.SIZE, IN_BLOCKS, fed=True)
    x, weight, _ = case.inputs(torch.bfloat16, CPU)
    scale_TC = x.scale.T.contiguous()
    call = deepgemm.product(32, False, x.q_TI, scale_TC, weight.weight_OI, weight.scale_SC)
    seen: list[Tensor] = []

    def launch(*given: ctypes.c_void_p | ctypes.c_int) -> int:
        count, padded = given[5].value, -(-tokens // 4) * 4
        assert count == tokens
        floats = ctypes.c_float * (padded * deepgemm.SIZE // deepgemm.GROUP)
        seen.append(torch.frombuffer(floats.from_address(given[1].value or 0), dtype=torch.float32).view(-1, padded))
        return 700 * (len(seen) - 1)

    rows = next(rows for rows in deepgemm.ROWS if tokens <= rows)
    monkeypatch.setattr(built, "loaded", lambda _: SimpleNamespace(**{f"product_{rows}_32": launch}))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    assert call().shape == (tokens, deepgemm.SIZE)
    assert torch.equal(seen[0][:, :tokens], scale_TC.T)
    assert not seen[0][:, tokens:].any()
    with pytest.raises(RuntimeError, match="error 700"):
        call()


def test_other_sizes_are_refused() -> None:
    x, weight, _ = Fp8Case(5, 384, 320, IN_BLOCKS, fed=True).inputs(torch.bfloat16, CPU)
    with pytest.raises(ValueError, match="4096 x 4096 and up to 64 tokens"):
        deepgemm.product(32, False, x.q_TI, x.scale.T, weight.weight_OI, weight.scale_SC)

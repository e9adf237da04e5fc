"""FlashAttention-3's gradients as a peer: what nvcc is given, and what a function gets of the ladder's operands."""

from __future__ import annotations

import ctypes
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ridgeline_bench.ladders import flash3_gradients
from ridgeline_bench.machine import built


def test_the_build_gets_both_widths(tmp_path: Path) -> None:
    checkout, cutlass, nvcc = tmp_path / "flash", tmp_path / "cutlass", tmp_path / "nvcc"
    for file in (checkout / flash3_gradients.HEADER, cutlass / "cute/tensor.hpp"):
        file.parent.mkdir(parents=True)
        file.touch()
    library = tmp_path / "build" / "some.so"
    nvcc.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked; touch {library}\n')
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    assert flash3_gradients.build(checkout, cutlass, library, str(nvcc)) == library
    asked, source = (tmp_path / "asked").read_text(), library.with_suffix(".cu").read_text()
    assert "code=sm_90a" in asked
    assert f"-I{checkout}/hopper -I{cutlass}" in asked
    assert all(f"FUNCTION({size}, {rows}, " in source for size, rows in flash3_gradients.ROWS.items())
    with pytest.raises(SystemExit, match=r"has no cute/tensor\.hpp"):
        flash3_gradients.build(checkout, tmp_path, library, str(nvcc))


def test_a_function_gets_the_operands_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library in plain torch reads operands from the pointers and writes the gradients, which are right."""
    q, k, v, grad = (torch.randn(2, 3, 128, 64).bfloat16() for _ in range(4))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = (leaves[0] @ leaves[1].mT / 8).masked_fill(~torch.ones(128, 128, dtype=torch.bool).tril(), -torch.inf)
    out, log = scores.softmax(-1) @ leaves[2], scores.logsumexp(-1)
    by_tokens = [x.detach().bfloat16().transpose(1, 2) for x in (*leaves, out)]
    call = flash3_gradients.gradients(*by_tokens, (log / flash3_gradients.LN2).detach().float(), grad.transpose(1, 2))

    def at(pointer: ctypes.c_void_p, dtype: torch.dtype, *shape: int) -> Tensor:
        numbers = ctypes.c_char * (torch.Size(shape).numel() * dtype.itemsize)
        return torch.frombuffer(numbers.from_address(pointer.value or 0), dtype=dtype).view(shape)

    def launch(*given: ctypes.c_void_p) -> int:
        assert [each.value for each in given[13:16]] == [2, 3, 128]
        shape = (2, 128, 3, 64)
        rows = [at(each, torch.bfloat16, *shape).transpose(1, 2).double() for each in given[:5]]
        assert torch.allclose(at(given[9], torch.float32, 2, 3, 128).double(), log, atol=1e-5)
        assert torch.allclose(rows[3], out.detach(), atol=2e-2)
        parts = [x.requires_grad_() for x in rows[:3]]
        exact = torch.autograd.grad(scaled_dot_product_attention(*parts, is_causal=True), parts, rows[4])
        for pointer, found in zip(given[5:8], exact, strict=True):
            at(pointer, torch.bfloat16, *shape).copy_(found.transpose(1, 2))
        return 0

    monkeypatch.setattr(built, "loaded", lambda _: SimpleNamespace(gradients_64=launch))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    wanted = torch.autograd.grad(out, leaves, grad.double())
    for found, want in zip(call(), wanted, strict=True):
        assert torch.allclose(found.transpose(1, 2).double(), want, atol=3e-2, rtol=1e-2)


def test_other_shapes_are_refused() -> None:
    q, k = torch.zeros(1, 128, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="multiples of 128 tokens"):
        flash3_gradients.gradients(q, k, k, q, torch.zeros(1, 4, 128), q)

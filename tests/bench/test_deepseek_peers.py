"""Our ops' arguments as DeepGEMM and FlashMLA take them: plain torch by their documentation gives what our references
give."""

from __future__ import annotations

import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.attention.latent.cases import LatentCase
from ridgeline.kernels.gemm.fp8.cases import Fp8Case
from ridgeline.kernels.gemm.fp8.op import BY_TOKEN, IN_BLOCKS
from ridgeline.kernels.ops import OPS
from ridgeline_bench.kernels import allowed
from ridgeline_bench.sweep import deepseek_peers
from ridgeline_bench.sweep.of_op import copied
from ridgeline_bench.sweep.peers import PeerKernel

CPU = torch.device("cpu")


def plain_gemm(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor) -> None:
    """fp8_gemm_nt by deep-gemm's README: A [m, k] with scales for 1 x 128, B [n, k] with scales for 128 x 128."""
    (x, sx), (w, sw) = a, b
    wide = w.float() * sw.repeat_interleave(128, 0)[: len(w)].repeat_interleave(128, 1)[:, : w.shape[1]]
    d.copy_((x.float() * sx.repeat_interleave(128, 1)[:, : x.shape[1]]) @ wide.T)


def plain_mla(
    q: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, width: int, plan: Any, splits: None, scale: float,
    causal: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    """flash_mla_with_kvcache by its docstring, for one query token a row."""
    assert cache.shape[1:3] == (64, 1)
    assert table.dtype == lengths.dtype == torch.int32
    assert plan == "plan"
    out = q.new_zeros(*q.shape[:-1], width)
    for row, length in enumerate(lengths.tolist()):
        keys = cache[table[row].long()].flatten(0, 2)[:length].double()
        weights = (q[row, 0].double() @ keys.T * scale).softmax(-1)
        out[row, 0] = (weights @ keys[:, :width]).to(q.dtype)
    return out, None


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm, layout, mla = ModuleType("deep_gemm"), ModuleType("deep_gemm.utils.layout"), ModuleType("flash_mla")
    gemm.fp8_gemm_nt = plain_gemm  # type: ignore[attr-defined]
    layout.get_mn_major_tma_aligned_tensor = lambda scales: scales  # type: ignore[attr-defined]
    mla.get_mla_metadata = lambda: ("plan", None)  # type: ignore[attr-defined]
    mla.flash_mla_with_kvcache = plain_mla  # type: ignore[attr-defined]
    for module in (gemm, layout, mla):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("fed", [False, True])
def test_products_of_blocks(fed: bool) -> None:
    case = Fp8Case(5, 384, 320, IN_BLOCKS, fed=fed)
    arguments = case.inputs(torch.bfloat16, CPU)
    want = OPS["fp8_linear"].reference(*arguments)
    got = PeerKernel(deepseek_peers.fp8_linear)(*arguments)
    assert bool(((got.float() - want.float()).abs() <= allowed(want, case)).all())


@pytest.mark.parametrize(
    "case", [Fp8Case(5, 384, 320, BY_TOKEN), Fp8Case(5, 384, 320, IN_BLOCKS, bias=True)], ids=["tokens", "bias"]
)
def test_other_products_are_refused(case: Fp8Case) -> None:
    with pytest.raises(AssertionError, match="in blocks without a bias"):
        PeerKernel(deepseek_peers.fp8_linear)(*case.inputs(torch.bfloat16, CPU))


def test_latent_attention_over_pages_of_64_tokens() -> None:
    """Cells behind a row's last token are NaN in our cache, and zero in the copy."""
    case = LatentCase(rows=((1, 100), (1, 1), (1, 64), (1, 129)), num_heads=3, block_size=16)
    arguments, options = case.inputs(torch.bfloat16, CPU), case.options(torch.bfloat16, CPU)
    want = copied(OPS["latent_attention"].reference(*arguments, **options))
    got = copied(PeerKernel(deepseek_peers.latent_attention)(*arguments, **options))
    assert math.isfinite(float(got[0].float().sum()))
    assert bool(((got[0].float() - want[0].float()).abs() <= allowed(want[0], case)).all())


def test_rows_of_several_tokens_are_refused() -> None:
    case = LatentCase(rows=((2, 100), (1, 9)))
    with pytest.raises(AssertionError, match="rows of one token"):
        PeerKernel(deepseek_peers.latent_attention)(
            *case.inputs(torch.bfloat16, CPU), **case.options(torch.bfloat16, CPU)
        )

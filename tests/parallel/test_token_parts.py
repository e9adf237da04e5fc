"""Sums that ranks make by parts of the tokens give what sums of all tokens do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.layers.dense import DenseCausal
from ridgeline.parallel import token_parts
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.token_parts import TokenParts
from tests.parallel.divided import loaded
from tests.parallel.threads import ThreadAxis, on_ranks

OPS = Ops(Platform(device_type="cpu"))
TOKENS = torch.arange(5, 24)  # 19: pieces are unlike, and the last one does not divide


class Noting(ThreadAxis):
    """An axis that notes how many tokens it normalized at once."""

    def __init__(self, other: ThreadAxis) -> None:
        super().__init__(other.rank, other.size, other._barrier, other._held)
        self.scattered: list[int] = []
        self.whole: list[int] = []

    def reduce_scatter(self, x_TM: Tensor) -> Tensor:
        self.scattered.append(len(x_TM) // self.size)
        return super().reduce_scatter(x_TM)

    def all_reduce_norm(self, x_TM: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        self.whole.append(len(x_TM))
        return super().all_reduce_norm(x_TM, *rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "ranks"), [("llama", 2), ("llama", 4), ("qwen3_moe", 2), ("granite", 2)])
def test_a_model_by_parts_of_its_tokens_scores_as_one_device(
    family: str, ranks: int, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_parts, "MIN_BYTES", 0)
    folder = tiny_model(family)
    want, layers = scores(folder, Mesh(), TOKENS)

    def rank(axis: ThreadAxis) -> tuple[Tensor, Noting]:
        noting = Noting(axis)
        return scores(folder, Mesh(tp=noting), TOKENS)[0], noting

    for got, noting in on_ranks(ranks, rank):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
        assert len(noting.scattered) == 2 * 2 * layers  # two norms of a layer, two pieces each
        assert sum(noting.scattered[:2]) <= -(-len(TOKENS) // ranks) + 1
        assert noting.whole == [len(TOKENS)]  # of the scored tokens


@torch.inference_mode()
def scores(folder: Path, mesh: Mesh, tokens: Tensor) -> tuple[Tensor, int]:
    decoder = loaded(folder, mesh)
    hidden = decoder(tokens, torch.arange(len(tokens)), DenseCausal(1))
    return decoder.logits(hidden), len(decoder.layers)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "neox"])  # a LayerNorm, norms of outputs, parallel parts
def test_models_whose_residual_is_needed_whole_keep_it_whole(
    family: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_parts, "MIN_BYTES", 0)

    def rank(axis: ThreadAxis) -> bool:
        noting = Noting(axis)
        scores(tiny_model(family), Mesh(tp=noting), TOKENS)
        return not noting.scattered

    assert on_ranks(2, rank) == [True, True]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("tokens", [9, 16, 23])
def test_norms_of_parts_are_those_of_the_whole(tokens: int, ranks: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    parts_TM = [torch.randn(tokens, 8, generator=generator) for _ in range(ranks)]
    again_TM = [torch.randn(tokens, 8, generator=generator) for _ in range(ranks)]
    weight_M = torch.rand(8, generator=generator)
    n_TM, s_TM = OPS.rms_norm(torch.stack(parts_TM).sum(0), None, weight_M, 1e-5)
    want = (n_TM, *OPS.rms_norm(torch.stack(again_TM).sum(0), s_TM, weight_M, 1e-5))

    def rank(axis: ThreadAxis) -> tuple[Tensor, ...]:
        own = TokenParts(axis, 1)
        n_TM, s_IM = own.all_reduce_norm(parts_TM[axis.rank], None, weight_M, 1e-5, OPS)
        assert len(s_IM) < tokens
        m_TM, t_IM = own.all_reduce_norm(again_TM[axis.rank], s_IM, weight_M, 1e-5, OPS)
        assert torch.equal(own.whole(n_TM, tokens), n_TM)
        return n_TM, m_TM, own.whole(t_IM, tokens)

    for got in on_ranks(ranks, rank):
        torch.testing.assert_close(got, want)


def test_no_sum_is_made_by_parts_until_a_gpu_has_shown_a_gain() -> None:
    own = TokenParts(ThreadAxis(0, 2, None, []))  # type: ignore[arg-type]
    assert not own.divides(torch.empty(1 << 20, 64), None)

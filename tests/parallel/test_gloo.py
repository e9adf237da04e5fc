"""Ranks that are processes, joined by gloo: sums, gathers, norms by parts of the tokens, and draws."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.core.plan.request import SamplingParams
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.sampling import op
from ridgeline.parallel.processes import ProcessAxis, join
from ridgeline.parallel.token_parts import TokenParts
from ridgeline.worker.vocabulary import Vocabulary
from tests.kernels.sampling.sampling_tables import Row, sampling_of
from tests.parallel.forks import forked, needs_fork, run_apart

CPU = torch.device("cpu")
TOKENS, WIDTH, VOCAB = 19, 24, 50
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, presence_penalty=1.0),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.8),
    SamplingParams(temperature=0.5, top_p=0.6),
    SamplingParams(temperature=9.0, top_p=0.99),
    SamplingParams(temperature=1.0, min_p=0.05, logit_bias={3: 2.0}),
    SamplingParams(temperature=2.0, top_k=30, top_p=0.7, typical_p=0.8),
]
INTERPRETED = PARAMS[:2] + PARAMS[-2:]  # each takes a while; tests/parallel/test_vocabulary.py has more
KERNELS = ("score_tokens", "draw_part", "best_of_parts")


def numbers(which: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(which))


def check(axis: ProcessAxis) -> None:
    """What a rank finds, beside the same from all ranks' numbers at once."""
    parts = [numbers(rank, TOKENS, WIDTH) for rank in range(axis.size)]
    own_TM, weight_M, ops = parts[axis.rank], numbers(9, WIDTH), Ops(Platform(device_type="cpu"))
    torch.testing.assert_close(axis.all_reduce(own_TM), sum(parts, torch.zeros(())))
    assert torch.equal(axis.all_gather(own_TM), torch.cat(parts, -1))
    assert torch.equal(axis.gather_rows(own_TM), torch.cat(parts))
    even_TM = own_TM[: TOKENS // axis.size * axis.size]
    share_TM = sum((part[: len(even_TM)] for part in parts), torch.zeros(())).chunk(axis.size)[axis.rank]
    torch.testing.assert_close(axis.reduce_scatter(even_TM), share_TM)
    assert axis.smallest(7 - axis.rank) == 8 - axis.size

    n_TM, s_TM = ops.rms_norm(sum(parts, torch.zeros(())), None, weight_M, 1e-5)
    m_TM, _ = ops.rms_norm(sum(parts, torch.zeros(())), s_TM, weight_M, 1e-5)
    by_parts = TokenParts(axis, 1)
    got_TM, residual_TM = by_parts.all_reduce_norm(own_TM, None, weight_M, 1e-5, ops)
    torch.testing.assert_close(got_TM, n_TM)
    torch.testing.assert_close(by_parts.all_reduce_norm(own_TM, residual_TM, weight_M, 1e-5, ops)[0], m_TM)
    torch.testing.assert_close(by_parts.whole(residual_TM, TOKENS), s_TM)

    by_kernels = Ops(Platform(device_type="cpu"), dict.fromkeys(KERNELS, "triton"))
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and axis.size == 3  # parts of unlike sizes
    for chosen in (ops, by_kernels) if interpreted else (ops,):
        vocabulary = Vocabulary(VOCAB, axis, chosen)
        batch = [Row(params, seed=seed) for seed, params in enumerate(PARAMS if chosen is ops else INTERPRETED)]
        logits_RV, sampling = 3 * numbers(5, len(batch), VOCAB), sampling_of(batch, VOCAB)
        padded_RV = torch.nn.functional.pad(logits_RV, (0, vocabulary.each * axis.size - VOCAB))
        token_R = vocabulary.sample(padded_RV.split(vocabulary.each, 1)[axis.rank], *sampling)
        assert token_R.tolist() == op.sample_reference(logits_RV, *sampling).tolist()


def forks(folder: Path) -> None:
    for size in (2, 3):
        forked(size, lambda rank, size=size: check(join(rank, size, folder / f"meeting{size}", CPU, 60.0)))


@pytest.mark.dealt
@needs_fork
def test_processes_over_gloo_agree_with_one_that_has_everything(tmp_path: Path) -> None:
    run_apart("tests.parallel.test_gloo", tmp_path, 480)  # seconds on a busy machine; on a quiet one it takes ten

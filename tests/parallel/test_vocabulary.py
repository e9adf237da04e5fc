"""Ranks that divide the vocabulary draw and report what one device does that has all of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.plan.step import Feature
from ridgeline.core.plan.token_bits import packed, part_of, unpacked
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import DETERMINISTIC, Ops
from ridgeline.kernels.sampling import op, parts, scoring
from ridgeline.kernels.sampling.philox import gumbel, gumbel_of
from ridgeline.worker import vocabulary
from ridgeline.worker.vocabulary import Vocabulary
from tests.engine.profiles import quick_settings
from tests.kernels.sampling.sampling_tables import Row, sampling_of
from tests.kernels.sampling.test_sampling import rows
from tests.parallel.threads import ThreadAxis, on_ranks

V = 50  # as the strategy `rows` has it
OPS = Ops(Platform(device_type="cpu"))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Counted(ThreadAxis):
    """An axis that notes how many numbers of a row it gathers at once."""

    most = 0

    def all_gather(self, x: Tensor) -> Tensor:
        self.most = max(self.most, x.shape[-1])
        return super().all_gather(x)


def part_of_scores(logits_RV: Tensor, vocabulary: Vocabulary) -> Tensor:
    """A rank's scores, and what means nothing behind a short part."""
    own_RU = logits_RV[:, vocabulary.first : vocabulary.first + vocabulary.count]
    missing = vocabulary.each - vocabulary.count
    return torch.nn.functional.pad(own_RU, (0, missing), value=torch.nan)


def on_parts(size: int, work: Callable[[Vocabulary], Tensor], ops: Ops = OPS) -> Tensor:
    """What every rank returns, which is the same."""
    results = on_ranks(size, lambda axis: work(Vocabulary(V, axis, ops)))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0, equal_nan=True)
    return results[0]


def scores(count: int, seed: int, *, masked: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits_RV = 3 * torch.randn(count, V, generator=generator)
    if masked:
        logits_RV[torch.rand(count, V, generator=generator) >= 0.3] = -torch.inf
        logits_RV[:, 7] = 1.0  # some token is always left
    return logits_RV


@pytest.mark.dealt
@quick_settings(100)
@given(
    batch=st.lists(rows, min_size=1, max_size=6),
    seed=st.integers(0, 2**30),
    masked=st.booleans(),
    ranks=st.integers(2, 4),
)
def test_ranks_draw_the_tokens_of_one_device(batch, seed: int, masked: bool, ranks: int) -> None:
    logits_RV = scores(len(batch), seed, masked=masked)
    sampling = sampling_of(batch, V)
    wanted = op.sample_reference(logits_RV, *sampling)

    def draw(vocabulary: Vocabulary) -> Tensor:
        return vocabulary.sample(part_of_scores(logits_RV, vocabulary), *sampling)

    assert on_parts(ranks, draw).tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("row", "most"),
    [
        (SamplingParams(temperature=0), 2),
        (SamplingParams(temperature=1.0, presence_penalty=1.0, logit_bias={3: 2.0}, min_tokens=3), 2),
        (SamplingParams(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1, typical_p=0.9), 768),
        (SamplingParams(temperature=0.4, top_p=0.6), 768),
        (SamplingParams(temperature=9.0, top_p=0.99), 768),
        (SamplingParams(temperature=1.0, top_k=1100), 768),
        (SamplingParams(temperature=1.0, typical_p=0.5), 768),
    ],
    ids=str,
)
def test_no_row_is_gathered_whole(row: SamplingParams, most: int) -> None:
    """768: the counts of 256 values of a digit, and their masses of two words each. A rank has 1000 scores."""
    vocab, sampling = 2000, sampling_of([Row(row, seed=3)], 2000)
    logits_RV = 3 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(1))

    def draw(axis: ThreadAxis) -> int:
        counted = Counted(axis.rank, axis.size, axis._barrier, axis._held)
        vocabulary = Vocabulary(vocab, counted, OPS)
        token_R = vocabulary.sample(part_of_scores(logits_RV, vocabulary), *sampling)
        assert token_R.tolist() == op.sample_reference(logits_RV, *sampling).tolist()
        return counted.most

    assert on_ranks(2, draw) == [most, most]


EXTREMES = [
    {"top_k": 1},
    {"top_k": V},
    {"top_k": V - 1},
    {"top_p": 1e-30},
    {"top_p": 1.0},
    {"min_p": 1.0},
    {"top_k": 7, "min_p": 0.0},
    {"top_k": 10, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5},
    {"typical_p": 1e-6},
    {"top_k": 5, "logit_bias": {3: -100.0, 20: 100.0, 49: 100.0}},
    {"top_p": 0.7, "presence_penalty": 2.0, "repetition_penalty": 3.0},
]


@pytest.mark.few(12)
@pytest.mark.parametrize("temperature", [1e-38, 0.01, 1.0, 1e4, 1e10, 3e38])
@pytest.mark.parametrize(("left", "ranks"), [(V, 3), (V, 7), (V, 40), (1, 4), (0, 2)])
def test_extreme_settings_give_the_tokens_of_one_device(temperature: float, left: int, ranks: int) -> None:
    """left: how many tokens are not forbidden. Of 50 tokens seven ranks have 8, the last one 2; of 40 ranks with 2
    tokens each 15 have none."""
    batch = [
        Row(SamplingParams(temperature=temperature, **each), (1, 30), (2, 2), n) for n, each in enumerate(EXTREMES)
    ]
    logits_RV, sampling = scores(len(batch), ranks), sampling_of(batch, V)
    logits_RV[:, torch.randperm(V, generator=torch.Generator().manual_seed(ranks))[left:]] = -torch.inf
    token_R = on_parts(ranks, lambda own: own.sample(part_of_scores(logits_RV, own), *sampling))
    assert token_R.tolist() == OPS.sample(logits_RV, *sampling).tolist()


def test_scores_that_are_no_numbers_give_no_token() -> None:
    batch = [Row(SamplingParams(temperature=t, top_k=k)) for t, k in [(0.0, 0), (1.0, 0), (1.0, 4), (1.0, 0)]]
    logits_RV, sampling = scores(4, 0), sampling_of(batch, V)
    logits_RV[:3] = torch.nan
    token_R = on_parts(3, lambda own: own.sample(part_of_scores(logits_RV, own), *sampling))
    assert token_R.tolist() == op.sample_reference(logits_RV, *sampling).tolist()
    assert token_R[:3].tolist() == [-1] * 3


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("num_top", [0, 3, 40])
def test_ranks_report_the_logprobs_of_one_device(num_top: int, ranks: int) -> None:
    """40: more than a rank has tokens."""
    logits_RV, token_R = scores(9, 5), torch.arange(0, V, 6)
    wanted = scoring.score(logits_RV, token_R, num_top)

    def report(own: Vocabulary) -> Tensor:
        got = own.score(part_of_scores(logits_RV, own), token_R, num_top)
        assert got.rank_R.tolist() == wanted.rank_R.tolist()
        assert got.top_ids_RL.tolist() == wanted.top_ids_RL.tolist()
        torch.testing.assert_close(got.top_logprobs_RL, wanted.top_logprobs_RL, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.logprob_R, wanted.logprob_R, rtol=1e-5, atol=1e-5)
        return got.logprob_R

    on_parts(ranks, report)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_guide_as_one_device(ranks: int) -> None:
    logits_RV = scores(5, 2)
    row_F, negative_F, scale_F = torch.tensor([0, 3]), torch.tensor([1, 2]), torch.tensor([1.5, -0.5])
    wanted = scoring.guide(logits_RV, row_F, negative_F, scale_F)

    def guided(own: Vocabulary) -> Tensor:
        return own.whole(own.guide(part_of_scores(logits_RV, own), row_F, negative_F, scale_F))

    torch.testing.assert_close(on_parts(ranks, guided), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("first", "count"), [(0, 32), (64, 40), (33, 50), (95, 7), (90, 32), (128, 4)])
def test_the_bits_of_a_part_are_those_of_its_tokens(first: int, count: int) -> None:
    members_V = np.random.default_rng(first).random(100) < 0.5
    own = unpacked(part_of(packed(members_V), first, count), count)
    beyond = np.zeros(200, np.bool_)
    beyond[:100] = members_V
    assert own.tolist() == beyond[first : first + count].tolist()


def test_noise_is_that_of_the_token_wherever_it_is_drawn() -> None:
    seed_R, position_R = torch.tensor([3, -(2**62)]), torch.tensor([9, 10])
    whole_RV = gumbel(seed_R, position_R, V)
    for first in range(9):
        assert torch.equal(gumbel(seed_R, position_R, 20, first), whole_RV[:, first : first + 20])
    token_RC = torch.tensor([[4, 49, 0], [17, 3, 22]])
    assert torch.equal(gumbel_of(seed_R, position_R, token_RC), whole_RV.gather(1, token_RC))


@pytest.mark.parametrize("device", DEVICES)
@quick_settings(12)
@given(batch=st.lists(rows, min_size=1, max_size=4), seed=st.integers(0, 2**30), masked=st.booleans())
def test_the_kernels_draw_the_references_winners(device: str, batch, seed: int, masked: bool) -> None:
    pytest.importorskip("triton")
    logits_RV = scores(len(batch), seed, masked=masked).to(device)
    sampling, drawn = sampling_of(batch, V, device), []
    for name in ("reference", "triton"):
        draw = parts.DRAW_PART.choose(Platform(device_type="cpu"), name)
        best = parts.BEST_OF_PARTS.choose(Platform(device_type="cpu"), name)
        pairs = [draw(logits_RV[:, first : first + 28], *sampling, first) for first in (0, 28)]
        drawn.append(best(torch.stack(pairs, 1), *sampling))
    unfiltered = sampling._replace(features=sampling.features & ~parts.UNUSED)
    wanted = OPS.sample(logits_RV, *unfiltered)
    assert drawn[0].tolist() == drawn[1].tolist() == wanted.tolist()


def test_a_rank_without_a_number_leaves_the_draw_to_the_others() -> None:
    pytest.importorskip("triton")
    sampling = sampling_of([Row(SamplingParams(temperature=1.0))] * 3, V)
    score_RN = torch.tensor([[1.0, 2.0], [-torch.inf, 0.5], [0.0, 0.0]])
    token_RN = torch.tensor([[3, -1], [4, 30], [-1, -1]], dtype=torch.int32)
    pairs_RN2 = torch.stack((token_RN, score_RN.view(torch.int32)), -1)
    for name in ("reference", "triton"):
        best = parts.BEST_OF_PARTS.choose(Platform(device_type="cpu"), name)
        for features in (Feature.NONE, Feature.RANDOM):
            assert best(pairs_RN2, *sampling[:-1], features).tolist() == [3, 30, -1]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_named_tokens_have_the_logprobs_of_the_whole_rows(size: int) -> None:
    logits_RV, ids_RL = scores(4, 2), torch.tensor([[0, 49, 17, 17]] * 4)
    told_RL = on_parts(size, lambda own: own.logprobs_of(part_of_scores(logits_RV, own), ids_RL))
    torch.testing.assert_close(told_RL, logits_RV.log_softmax(-1).gather(1, ids_RL), rtol=1e-5, atol=1e-5)


def test_rows_are_gathered_in_pieces_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU does with filters: what is drawn does not depend on the pieces."""
    monkeypatch.setattr(vocabulary, "GATHERED", 4 * V)  # bytes: of ranks' parts of 25 tokens in float32, two rows
    sampling = sampling_of([Row(SamplingParams(temperature=1.0, top_k=9), seed=n) for n in range(7)], V)
    logits_RV = scores(7, 3)

    def work(ours: Vocabulary) -> Tensor:
        return ours._gathered(part_of_scores(logits_RV, ours), *sampling)

    assert on_parts(2, work).tolist() == op.sample_reference(logits_RV, *sampling).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_bit_of_a_logprob_depends_on_the_rows_beside_it_on_a_gpu(ranks: int) -> None:
    """With kernels that promise so. A sum by torch is made in another order where there are more rows."""
    size, ops = 32_000, Ops(Platform.of(torch.device("cuda")), DETERMINISTIC)
    logits_RV = 3 * torch.randn(300, size, generator=torch.Generator().manual_seed(6)).cuda()
    token_R = torch.arange(300, device="cuda")

    def work(axis: ThreadAxis, rows: slice) -> Tensor:
        ours = Vocabulary(size, axis, ops)
        own_RU = logits_RV[rows, ours.first : ours.first + ours.each]
        found = ours.score(own_RU, token_R[rows], 4)
        named_RL = ours.logprobs_of(own_RU, token_R[rows, None] + torch.tensor([[0, 31_000]], device="cuda"))
        return torch.cat((found.logprob_R[:, None], found.top_logprobs_RL, named_RL), 1)

    alone = torch.cat([on_ranks(ranks, lambda axis, n=n: work(axis, slice(n, n + 1)))[0] for n in range(40)])
    together = on_ranks(ranks, lambda axis: work(axis, slice(0, 300)))[0]
    assert torch.equal(alone, together[:40])


@pytest.mark.parametrize("odd", [torch.nan, -torch.inf])
def test_ranks_report_odd_rows_as_one_device_does(odd: float) -> None:
    """More tokens are asked for than a part has, whose length is no multiple of four: nothing that fills it up is
    named, and a row that is no number says so."""
    logits_RV = scores(2, 4)
    logits_RV[1, 20:] = odd

    def work(ours: Vocabulary) -> Tensor:
        found = ours.score(part_of_scores(logits_RV, ours), torch.tensor([3, 5]), 200)
        assert found.top_ids_RL.max() < V
        return torch.cat((found.logprob_R[:, None], found.top_logprobs_RL), 1)

    got, whole = on_parts(3, work), scoring.score(logits_RV, torch.tensor([3, 5]), 200)
    torch.testing.assert_close(got[:, 0], whole.logprob_R, equal_nan=True)
    torch.testing.assert_close(got[0, 1:], whole.top_logprobs_RL[0], equal_nan=True)

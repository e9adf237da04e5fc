"""Ranks that divide a vocabulary keep the tokens that the filters keep of whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.plan.step import Feature
from ridgeline.kernels.sampling import op
from ridgeline.kernels.sampling.filter_cuts import bits_per_logit, cut_begin, cut_end, cut_round, mean, moments
from ridgeline.kernels.sampling.filter_search import MANY_ROWS, Cut
from ridgeline.kernels.sampling.torch_ops import adjusted
from tests.engine.profiles import quick_settings
from tests.kernels.sampling.sampling_tables import Row, Sampling, sampling_of
from tests.kernels.sampling.test_sampling import V, rows

THOROUGH = pytest.mark.thorough


def kept_by_ranks(logits_RV: Tensor, sampling: Sampling, ranks: int) -> Tensor:
    """The logits that ranks keep, beside each other: all of them take each step at the same time."""
    tables, slots_R, _, features = sampling
    vocab = logits_RV.shape[1]
    each = -(-vocab // ranks)
    counts = [max(0, min(each, vocab - rank * each)) for rank in range(ranks)]
    padded_RV = torch.nn.functional.pad(logits_RV, (0, ranks * each - vocab), value=torch.nan)
    begun = [
        cut_begin(own_RU.contiguous(), *sampling, min(rank * each, vocab), counts[rank])
        for rank, own_RU in enumerate(padded_RV.split(each, 1))
    ]
    range_RM2 = torch.cat([range_RJ for _, range_RJ in begun], 1).unflatten(1, (-1, 2))
    cuts = [Cut(tables, slots_R, range_RM2, rank, ranks, counts[rank], vocab) for rank in range(ranks)]

    def cut_all(sources: Sequence[Tensor], cuts: Sequence[Cut]) -> list[Tensor]:
        for number in range(cuts[0].rounds):
            told = [cut_round(source_RU, cut, number) for source_RU, cut in zip(sources, cuts, strict=True)]
            for cut in cuts:
                cut.told.append(torch.cat(told, 1))
        kept = [cut_end(source_RU, cut) for source_RU, cut in zip(sources, cuts, strict=True)]
        return [each[:, :count] for each, count in zip(kept, counts, strict=True)]

    kept = cut_all([source_RU for source_RU, _ in begun], cuts)
    if features & Feature.TYPICAL:
        mean_R = mean(torch.cat([moments(own, cut) for own, cut in zip(kept, cuts, strict=True)], 1))
        sources = [torch.nn.functional.pad(own, (0, each - own.shape[1])) for own in kept]
        kept = cut_all(sources, [replace(cut, mean_R=mean_R) for cut in cuts])
    return torch.cat(kept, 1)


def kept_of_rows(logits_RV: Tensor, sampling: Sampling) -> Tensor:
    """The same of whole rows, by the functions of the reference: True for tokens that stay."""
    tables, slots_R, position_R, features = sampling
    stays = []
    for n, logits_V in enumerate(adjusted(logits_RV, tables, slots_R, position_R, features).double()):
        asked: Any = [float(t[n]) for t in (tables.temperature_S, tables.top_k_S, tables.top_p_S, tables.min_p_S)]
        temperature, top_k, top_p, min_p = asked
        if not temperature:
            stays.append(logits_V > -torch.inf)
            continue
        logits_V = logits_V / temperature
        kept_V = op._filter(logits_V, int(top_k), top_p, min_p)
        kept_V &= op._typical(logits_V.masked_fill(~kept_V, -torch.inf), float(tables.typical_p_S[n]))
        stays.append(kept_V & (logits_V > -torch.inf))
    return torch.stack(stays)


def compare(logits_RV: Tensor, batch: Sequence[Row], ranks: int) -> None:
    vocab = logits_RV.shape[1]
    sampling = sampling_of(batch, vocab)
    source_RV = adjusted(logits_RV, *sampling)
    temperature_R = sampling.tables.temperature_S[sampling.slots_R]
    bits_RV = (source_RV.amax(-1, keepdim=True) - source_RV) * bits_per_logit(temperature_R)[:, None]
    near_RV = bits_RV < 31  # who is further away is never drawn
    wanted_RV = kept_of_rows(logits_RV, sampling) & near_RV
    got_RV = kept_by_ranks(logits_RV, sampling_of(batch, vocab), ranks)
    assert ((got_RV > -torch.inf) & near_RV).nonzero().tolist() == wanted_RV.nonzero().tolist()
    torch.testing.assert_close(got_RV[wanted_RV], source_RV[wanted_RV], rtol=1e-6, atol=1e-6)


def examples(batch: Sequence[Row], seed: int, masked: bool, ranks: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_RV = 3 * torch.randn(len(batch), V, generator=generator)
    if masked:
        logits_RV[torch.rand(len(batch), V, generator=generator) >= 0.3] = -torch.inf
        logits_RV[:, 7] = 1.0
    compare(logits_RV, batch, ranks)


several = st.lists(rows, min_size=1, max_size=5)


@pytest.mark.dealt
@quick_settings(60)
@given(batch=several, seed=st.integers(0, 2**30), masked=st.booleans(), ranks=st.integers(1, 5))
def test_ranks_keep_what_one_device_keeps(batch, seed: int, masked: bool, ranks: int) -> None:
    examples(batch, seed, masked, ranks)


FILTERS = [
    SamplingParams(temperature=1.0, top_k=20, top_p=0.95),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=3.0, top_p=0.5, min_p=0.01),
    SamplingParams(temperature=1.0, top_k=3000),
    SamplingParams(temperature=1.5, top_k=5000, top_p=0.3),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=1, top_p=0.1),
    SamplingParams(temperature=0.01, top_k=40, top_p=0.999),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0),
]


@pytest.mark.parametrize("vocab", [9001])
@pytest.mark.parametrize(
    ("spread", "ranks"),
    [(0.02, 2), (2.5, 3), (9.0, 2), *(pytest.param(*pair, marks=THOROUGH) for pair in ((0.02, 3), (2.5, 2), (9.0, 3)))],
)
def test_large_vocabularies_with_many_equal_logits_are_cut_exactly(spread: float, vocab: int, ranks: int) -> None:
    """bfloat16: at the cut many tokens are equal, and those with the smallest ids stay, on whichever ranks they are."""
    generator = torch.Generator().manual_seed(int(100 * spread) + ranks)
    logits_RV = (spread * torch.randn(len(FILTERS), vocab, generator=generator)).bfloat16()
    compare(logits_RV, [Row(params) for params in FILTERS], ranks)


def test_rows_of_equal_logits_are_cut_by_their_ids() -> None:
    batch = [Row(SamplingParams(temperature=1.0, top_k=k)) for k in (1, 4, 5, 9)]
    kept_RV = kept_by_ranks(torch.zeros(4, 10), sampling_of(batch, 10), 3)
    assert [row.nonzero().flatten().tolist() for row in kept_RV == 0] == [list(range(k)) for k in (1, 4, 5, 9)]


def test_many_rows_take_shorter_messages_and_are_cut_in_the_same_places() -> None:
    batch = [Row(FILTERS[n % len(FILTERS)]) for n in range(MANY_ROWS + 1)]
    compare(2 * torch.randn(len(batch), 300).bfloat16(), batch, 2)


def test_rows_that_are_no_numbers_stay_so() -> None:
    logits_RV = torch.full((2, 12), torch.nan)
    sampling = sampling_of([Row(FILTERS[0]), Row(FILTERS[1])], 12)
    assert kept_by_ranks(logits_RV, sampling, 2).isnan().all()


HOT = [
    SamplingParams(temperature=temperature, **filters)
    for temperature in (30.0, 1e6, 3e38)
    for filters in ({"top_k": 1}, {"top_k": 7}, {"top_k": 3000})
]


def test_hot_rows_are_cut_by_their_logits() -> None:
    """Their probabilities are nearly equal, and still the k largest logits stay, though others are forbidden or far
    below."""
    logits_RV = 3 * torch.randn(len(HOT), 5000, generator=torch.Generator().manual_seed(4))
    logits_RV[:, ::3] = -torch.inf
    logits_RV[:, 1] = -90.0
    sampling = sampling_of([Row(params) for params in HOT], 5000)
    kept_RV = kept_by_ranks(logits_RV, sampling, 3)
    for params, logits_V, kept_V in zip(HOT, logits_RV, kept_RV, strict=True):
        wanted = logits_V.topk(params.top_k).indices.sort().values
        assert (kept_V > -torch.inf).nonzero()[:, 0].tolist() == wanted.tolist()


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_a_score_that_is_no_number_or_infinite_takes_no_other_with_it(odd: float) -> None:
    """Of the others those stay that stay where it is forbidden; beside an infinite one none has any mass."""
    params = [SamplingParams(temperature=1.0, **filters) for filters in ({"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1})]
    logits_RV = 2 * torch.randn(3, 40, generator=torch.Generator().manual_seed(4))
    forbidden_RV = logits_RV.index_fill(1, torch.tensor(25), -torch.inf)
    logits_RV[:, 25] = odd
    sampling = sampling_of([Row(each) for each in params], 40)
    kept_RV, wanted_RV = (kept_by_ranks(x_RV, sampling, 3) for x_RV in (logits_RV, forbidden_RV))
    if odd == torch.inf:
        assert (kept_RV[:, 25] == odd).all()
        assert (kept_RV[1:] > -torch.inf).sum() == 2
    else:
        assert kept_RV[:, 25].isnan().all()
        others = torch.arange(40) != 25
        assert torch.equal(kept_RV[:, others], wanted_RV[:, others])

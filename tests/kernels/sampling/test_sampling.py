"""Sampling: every implementation equals the reference, and the reference equals transformers and the formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.plan.step import Feature
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.sampling import op, torch_ops, triton_logprobs
from ridgeline.kernels.sampling import triton as gpu
from ridgeline.kernels.sampling.noised import NOISED, noised
from ridgeline.kernels.sampling.philox import gumbel
from ridgeline.kernels.sampling.scoring import score
from tests.covering import by_pairs
from tests.engine.profiles import quick_settings
from tests.kernels.sampling.sampling_tables import Row, sampling_of

V = 50
IMPLEMENTATIONS = ["reference", *(implementation.name for implementation in op.SAMPLE.implementations)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

tokens = st.integers(0, V - 1)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.2, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 3, 20, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.99, 0.613, 0.2, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.037, 0.3, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.95, 0.613, 0.2, 1e-6]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.5, 1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.7, 2.0]),
    logit_bias=st.none() | st.dictionaries(tokens, st.sampled_from([-100.0, -2.5, 1.5, 100.0]), max_size=5),
    min_tokens=st.sampled_from([0, 0, 2, 9]),
)
rows = st.builds(
    Row,
    params,
    prompt=st.lists(tokens, min_size=1, max_size=8).map(tuple),
    output=st.lists(tokens, max_size=8).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    stop_ids=st.frozensets(tokens, max_size=4),
)


def choose(name: str, device: str = "cpu") -> Callable[..., torch.Tensor]:
    return op.SAMPLE.choose(Platform.of(torch.device(device)), name)


def same_tokens_as_the_reference(name: str, device: str, batch, seed: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(batch), V, generator=generator)
    if masked:
        logits[torch.rand(len(batch), V, generator=generator) >= 0.7] = -torch.inf
    expected = op.sample_reference(logits, *sampling_of(batch, V))
    before = logits.to(device)
    got = choose(name, device)(before, *sampling_of(batch, V, device))
    assert got.tolist() == expected.tolist()
    assert torch.equal(before.cpu(), logits), "logits are reported afterwards and must stay as they are"


@pytest.mark.parametrize("device", DEVICES)
@quick_settings(60)
@given(batch=st.lists(rows, min_size=1, max_size=7), seed=st.integers(0, 2**30), masked=st.booleans())
def test_sampling_by_sorting_draws_the_references_tokens(device: str, batch, seed: int, masked: bool) -> None:
    same_tokens_as_the_reference("torch", device, batch, seed, masked)


@pytest.mark.parametrize("device", DEVICES)
@quick_settings(12)
@given(batch=st.lists(rows, min_size=1, max_size=4), seed=st.integers(0, 2**30), masked=st.booleans())
def test_sampling_without_a_sort_draws_the_references_tokens(device: str, batch, seed: int, masked: bool) -> None:
    same_tokens_as_the_reference("triton", device, batch, seed, masked)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@quick_settings(5)
@given(batch=st.lists(rows, min_size=2, max_size=4), seed=st.integers(0, 2**30))
def test_a_row_draws_the_same_token_whatever_its_neighbours_ask(name: str, batch, seed: int) -> None:
    logits = 3 * torch.randn(len(batch), V, generator=torch.Generator().manual_seed(seed))
    together = choose(name)(logits, *sampling_of(batch, V))
    alone = [choose(name)(logits[n : n + 1], *sampling_of([row], V)).item() for n, row in enumerate(batch)]
    assert together.tolist() == alone


@pytest.mark.parametrize("device", DEVICES)
@quick_settings(20)
@given(batch=st.lists(rows, min_size=1, max_size=4), seed=st.integers(0, 2**30), masked=st.booleans())
def test_noised_logits_are_those_whose_largest_is_drawn(device: str, batch, seed: int, masked: bool) -> None:
    """In plain torch and in the kernel: the draw of a row without filters is the largest number, and that without this
    token the next one."""
    plain = [row._replace(params=replace(row.params, top_k=0, top_p=1, min_p=0, typical_p=1)) for row in batch]
    logits = 3 * torch.randn(len(batch), V, generator=torch.Generator().manual_seed(seed))
    if masked:
        logits[:, 1::3] = -torch.inf
    want = noised(logits, *sampling_of(plain, V))
    got = NOISED.choose(Platform.of(torch.device(device)), "triton")(logits.to(device), *sampling_of(plain, V, device))
    assert torch.allclose(got.cpu(), want, atol=2e-5, rtol=1e-5)
    for place, token_R in enumerate(want.topk(3).indices.T):
        assert token_R.tolist() == op.sample_reference(logits, *sampling_of(plain, V)).tolist(), place
        logits.scatter_(1, token_R[:, None], -torch.inf)


# ---- filters and penalties against transformers ---------------------------------------------------------------------


def kept_by_transformers(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    warpers = []
    if p.top_k > 0:
        warpers.append(transformers.TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        warpers.append(transformers.TopPLogitsWarper(p.top_p))
    if p.min_p > 0:
        warpers.append(transformers.MinPLogitsWarper(p.min_p))
    if p.typical_p < 1:
        warpers.append(transformers.TypicalLogitsWarper(p.typical_p))
    scores = logits[None] / p.temperature
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    return scores[0].isfinite()


@quick_settings(150)
@given(
    seed=st.integers(0, 2**30),
    top_k=st.integers(0, V + 5),
    top_p=st.floats(0.01, 1.0),
    min_p=st.just(0.0) | st.floats(0.001, 0.9),
    typical_p=st.just(1.0) | st.floats(0.01, 0.99),
    temperature=st.floats(0.2, 3.0),
)
def test_the_kept_tokens_are_those_transformers_keeps(seed, top_k, top_p, min_p, typical_p, temperature) -> None:
    p = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p, temperature=temperature)
    logits = 3 * torch.randn(V, generator=torch.Generator().manual_seed(seed))
    expected = kept_by_transformers(logits, p)
    warm = logits.double() / temperature
    kept = op._filter(warm, top_k, top_p, min_p)
    kept &= op._typical(warm.masked_fill(~kept, -torch.inf), typical_p)
    assert kept.tolist() == expected.tolist()
    tables, slots_R, _, _ = sampling_of([Row(p)], V)
    filtered = torch_ops._filter(logits[None] / temperature, tables, slots_R)
    assert torch_ops.typical(filtered, tables.typical_p_S[:1, None])[0].isfinite().tolist() == expected.tolist()


@quick_settings(80)
@given(
    seed=st.integers(0, 2**30),
    prompt=st.lists(tokens, min_size=1, max_size=10),
    output=st.lists(tokens, max_size=10),
    repetition=st.floats(0.3, 3.0),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
)
def test_penalties_are_transformers_and_the_formula(seed, prompt, output, repetition, presence, frequency) -> None:
    logits = 3 * torch.randn(1, V, generator=torch.Generator().manual_seed(seed))
    p = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    sampling = sampling_of([Row(p, tuple(prompt), tuple(output))], V)
    processor = transformers.RepetitionPenaltyLogitsProcessor(repetition)
    expected = processor(torch.tensor([prompt + output]), logits.clone())[0]
    for token in set(output):
        expected[token] -= presence + frequency * output.count(token)
    penalized = torch_ops._penalize(logits, sampling.tables, sampling.slots_R)[0]
    reference = logits[0].double()
    op._penalize(reference, sampling.tables, 0)
    assert torch.allclose(penalized, expected, atol=1e-5)
    assert torch.allclose(reference.float(), expected, atol=1e-5)


# ---- one feature at a time ------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0)
RISING = torch.arange(V, dtype=torch.float32)[None] / 10  # the likeliest token is V - 1


@pytest.fixture(params=IMPLEMENTATIONS)
def draw(request: pytest.FixtureRequest) -> Callable[..., int]:
    """One row's token from `RISING`."""

    def one(params: SamplingParams, *, logits: torch.Tensor = RISING, **row: object) -> int:
        return choose(request.param)(logits, *sampling_of([Row(params, **row)], V)).item()

    return one


def test_temperature_0_takes_the_likeliest_token(draw) -> None:
    assert draw(GREEDY) == V - 1


def test_stop_ids_are_forbidden_until_min_tokens_are_out(draw) -> None:
    params, stops = GREEDY.replace(min_tokens=2), frozenset([V - 1, V - 2])
    drawn = [draw(params, output=(3,) * n, stop_ids=stops) for n in range(4)]
    assert drawn == [V - 3, V - 3, V - 1, V - 1]
    assert draw(params, logits=-RISING, stop_ids=frozenset([0, 1])) == 2, "token 0 is one like others"


def test_logit_bias_adds_to_its_tokens(draw) -> None:
    assert draw(GREEDY.replace(logit_bias={4: 100.0})) == 4
    assert draw(GREEDY.replace(logit_bias={V - 1: -100.0})) == V - 2
    assert draw(GREEDY.replace(logit_bias={0: 4.85, 3: -1.0})) == V - 1
    assert draw(GREEDY.replace(logit_bias={0: 4.95})) == 0


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_bias_is_added_to_logits_of_any_dtype(name: str, dtype: torch.dtype) -> None:
    biased = sampling_of([Row(GREEDY.replace(logit_bias={4: 100.0, V - 1: -0.3}))], V)
    assert choose(name)(RISING.to(dtype), *biased).item() == 4


def test_a_masked_token_is_never_drawn(draw) -> None:
    masked = torch.full_like(RISING, -torch.inf)
    masked[0, [3, 7]] = RISING[0, [3, 7]]
    assert draw(GREEDY, logits=masked) == 7
    assert draw(GREEDY.replace(logit_bias={0: 100.0, 3: 5.0}), logits=masked) == 3
    assert {draw(SamplingParams(temperature=5), logits=masked, seed=seed) for seed in range(12)} == {3, 7}


def test_top_k_of_1_is_greedy_and_a_tie_goes_to_the_smaller_id() -> None:
    for name in IMPLEMENTATIONS:
        tied = torch.zeros(1, V)
        tied[0, [9, 30]] = 5
        for params in (GREEDY, SamplingParams(temperature=1, top_k=1)):
            assert choose(name)(tied, *sampling_of([Row(params)], V)).item() == 9


def test_an_unfiltered_row_keeps_its_whole_tail_beside_a_filtered_one() -> None:
    logits = torch.full((2, V), -9.0)
    logits[:, 0] = 20
    tables, slots_R, _, features = sampling_of([Row(SamplingParams()), Row(SamplingParams(top_p=0.5))], V)
    assert features & Feature.FILTER
    kept = torch_ops._filter(logits, tables, slots_R).isfinite().sum(1)
    assert kept.tolist() == [V, 1]


def test_ranks_and_logprobs_of_drawn_tokens() -> None:
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([0, 10, 20, 30])
    scores = score(logits, chosen, 5)
    for n, token in enumerate(chosen.tolist()):
        probabilities = logits[n].double().softmax(0)
        assert scores.logprob_R[n].exp().item() == pytest.approx(probabilities[token].item(), rel=1e-5)
        assert scores.rank_R[n].item() == 1 + (logits[n] > logits[n, token]).sum()
        assert scores.top_ids_RL[n].tolist() == logits[n].argsort(descending=True)[:5].tolist()
    assert score(logits, chosen, 0).top_ids_RL.shape == (4, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("count", "vocab"), [(1, 7), (3, 1025), pytest.param(8, 151_669, marks=pytest.mark.gpu)])
def test_logprobs_by_one_read_are_the_references(count: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    """Their error is that of a sum of vocab exponentials in float32, in pieces, and of the base-2 logarithm."""
    if device == "cpu" and vocab > 2000:
        pytest.skip("takes the interpreter minutes")
    generator = torch.Generator().manual_seed(vocab)
    wide = (3 * torch.randn(count, vocab + 3, generator=generator)).to(device, dtype)
    logits = wide[:, :vocab]  # rows need not be packed
    chosen = torch.randint(vocab, (count,), generator=generator).to(device)
    logits[0, logits[0].argmin()] = -torch.inf
    if vocab > 10:
        logits[-1, 5:12] = 30.0  # ties
    expected, got = score(logits, chosen, 4), triton_logprobs.score(logits, chosen, 4)
    assert got.top_ids_RL.sort().values.diff().min() > 0, "no token is reported twice"
    assert got.rank_R.tolist() == expected.rank_R.tolist()
    assert torch.allclose(got.logprob_R, expected.logprob_R, atol=1e-5)
    assert torch.allclose(got.top_logprobs_RL, expected.top_logprobs_RL, atol=1e-5)
    assert torch.equal(logits.gather(1, got.top_ids_RL), logits.gather(1, expected.top_ids_RL))
    assert torch.equal(triton_logprobs.score_batch_invariant(logits, chosen, 4).rank_R, expected.rank_R)
    assert triton_logprobs.score(logits, chosen, 0).top_ids_RL.shape == (count, 0)


def test_all_of_a_small_vocabulary_may_be_reported() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 2.0, 2.0, -torch.inf]])
    got = triton_logprobs.score(logits, torch.tensor([2]), 9)
    assert got.top_ids_RL.tolist() == [[2, 3, 0, 1, 4]]
    assert torch.allclose(got.top_logprobs_RL, logits.log_softmax(-1).gather(1, got.top_ids_RL))


# ---- without a sort: lists that overflow, brackets that miss, real sizes --------------------------------------------


def small_lists(capacity: int) -> gpu.Config:
    return gpu.Config(tile=16, warps=1, capacity=capacity, sample=64, reserve=8, many=64)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("vocab", "dtype", "capacity"), by_pairs([7, 130, 300], [torch.float32, torch.float16], [16, 64, 2048]), ids=str
)
def test_thresholds_are_exact_however_few_candidates_fit(vocab: int, dtype: torch.dtype, capacity: int) -> None:
    """float16 logits tie often; a capacity of 16 sends flat rows the slow way."""
    wanted = [
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=vocab // 2),
        SamplingParams(temperature=0.3, top_k=40, top_p=0.8, min_p=0.01),
        SamplingParams(temperature=0),
    ]
    for spread in (0.1, 4.0) if capacity < vocab else (1.0,):
        logits = (spread * torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))).to(dtype)
        sampling = sampling_of([Row(p, seed=n) for n, p in enumerate(wanted)], vocab)
        expected = op.sample_reference(logits, *sampling)
        assert gpu.sample(logits, *sampling, config=small_lists(capacity)).tolist() == expected.tolist()


def test_typical_tokens_are_found_however_a_row_is_cut_into_pieces() -> None:
    """float16 logits tie often."""
    wanted = [
        SamplingParams(typical_p=0.7),
        SamplingParams(typical_p=0.2, top_p=0.9),
        SamplingParams(typical_p=0.5, temperature=0.3, top_k=40, min_p=0.01),
        SamplingParams(top_k=9),
        SamplingParams(temperature=0),
    ]
    logits = (2 * torch.randn(5, 70, generator=torch.Generator().manual_seed(3))).half()
    sampling = sampling_of([Row(p, seed=n) for n, p in enumerate(wanted)], 70)
    expected = op.sample_reference(logits, *sampling)
    assert gpu.sample(logits, *sampling, config=small_lists(2048)).tolist() == expected.tolist()


@pytest.mark.dealt
@pytest.mark.parametrize(
    ("device", "count", "params"),
    [
        ("cpu", 160, SamplingParams()),
        pytest.param("cuda", 20_000, SamplingParams(), marks=pytest.mark.gpu),
        pytest.param("cuda", 20_000, SamplingParams(top_k=6, top_p=0.93), marks=pytest.mark.gpu),
    ],
)
def test_draws_without_a_sort_follow_the_distribution(device: str, count: int, params: SamplingParams) -> None:
    """Eight tokens, of which top-k leaves six and top-p fewer. Tokens 5 and 6 tie at the edge."""
    logits = torch.tensor([2.0, 1.5, 0.0, 1.0, -1.0, 0.5, 0.5, -2.0])
    tables, _, _, features = sampling_of([Row(params, seed=11)], 8, device)
    slots_R = torch.zeros(count, dtype=torch.int64, device=device)
    position_R = torch.arange(count, device=device)
    drawn = gpu.sample(logits.to(device).expand(count, 8), tables, slots_R, position_R, features).cpu()
    kept_V = op._filter(logits.double(), params.top_k, params.top_p, params.min_p)
    expected_V = logits.masked_fill(~kept_V, -torch.inf).softmax(0) * count
    count_V = torch.bincount(drawn, minlength=8)
    assert count_V[~kept_V].sum() == 0
    freedom = int(kept_V.sum()) - 1
    statistic = ((count_V - expected_V)[kept_V] ** 2 / expected_V[kept_V]).sum().item()
    assert (statistic - freedom) / (2 * freedom) ** 0.5 < 5


def test_min_p_keeps_what_is_exactly_as_likely_as_it_asks() -> None:
    logits_V = torch.tensor([1.0, 3.0, 3.0, 2.0])
    theirs_V = transformers.MinPLogitsWarper(1.0)(torch.zeros(1, 1, dtype=torch.long), logits_V[None])[0] > -torch.inf
    assert op._filter(logits_V, 0, 1.0, 1.0).tolist() == theirs_V.tolist() == [False, True, True, False]


EDGES = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1e-5),
    SamplingParams(temperature=1e-5, top_p=0.9),
    SamplingParams(temperature=100.0),
    SamplingParams(temperature=100.0, top_p=0.613, top_k=40),
    SamplingParams(top_k=1),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=7, min_p=1.0),
    SamplingParams(typical_p=0.3),
    SamplingParams(temperature=1e-5, typical_p=0.9),
    SamplingParams(temperature=100.0, typical_p=0.5, top_k=40, top_p=0.613),
]


@pytest.mark.few(6)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "dtype", "name"),
    by_pairs(["equal", "one", "two", "tied"], [torch.float32, torch.bfloat16], IMPLEMENTATIONS[1:]),
    ids=str,
)
def test_the_edges_of_parameters_and_logits(kind: str, dtype: torch.dtype, name: str, device: str) -> None:
    """All logits equal, all but one or two forbidden, or only five different ones."""
    logits = torch.full((len(EDGES), V), 21.5)
    if kind in ("one", "two"):
        logits = torch.full((len(EDGES), V), -torch.inf)
        logits[:, [33] if kind == "one" else [33, 12]] = -7.25
    elif kind == "tied":
        logits = torch.randint(-2, 3, logits.shape, generator=torch.Generator().manual_seed(9)).float()
    batch = [Row(p, seed=n) for n, p in enumerate(EDGES)]
    expected = op.sample_reference(logits, *sampling_of(batch, V))
    got = choose(name, device)(logits.to(device, dtype), *sampling_of(batch, V, device))
    assert got.tolist() == expected.tolist()


def test_padding_rows_may_hold_anything() -> None:
    """A captured graph's unused rows: whatever their logits are, an id or -1 comes out and others do not notice."""
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(2))
    sampling = sampling_of([Row(SamplingParams(top_k=5, top_p=0.9)), Row(SamplingParams()), Row(GREEDY)], V)
    expected = gpu.sample(logits, *sampling)
    for row in range(3):
        for rubbish in (torch.nan, torch.inf, -torch.inf):
            spoiled = logits.clone()
            spoiled[row] = rubbish
            drawn = gpu.sample(spoiled, *sampling)
            assert -1 <= drawn[row] < V
            others = [n for n in range(3) if n != row]
            assert drawn[others].tolist() == expected[others].tolist()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_row_without_numbers_gives_no_token_and_others_theirs(name: str) -> None:
    logits = RISING.repeat(4, 1)
    logits[[0, 2]] = torch.nan
    batch = [Row(GREEDY), Row(GREEDY.replace(logit_bias={3: 100.0})), Row(SamplingParams(top_p=0.9)), Row(GREEDY)]
    assert choose(name)(logits, *sampling_of(batch, V)).tolist() == [-1, 3, -1, V - 1]


def test_slots_that_nobody_filled_are_greedy_and_change_no_logit() -> None:
    """Those of temperature 1 draw from all tokens as they are, whatever was seen before."""
    tables = op.SamplingTables.empty(2, V, torch.device("cpu"))
    tables.temperature_S[1] = 1
    tables.prompt_seen_SV[:, ::2] = True
    tables.output_count_SV[:, ::3] = 7
    slots_R, position_R = torch.tensor([0, 1]).repeat(40), torch.arange(80)
    tokens = op.sample_reference(RISING.expand(80, V), tables, slots_R, position_R, Feature.NONE).view(40, 2)
    noise = gumbel(tables.seed_S[slots_R], position_R, V)[1::2]
    assert tokens[:, 0].tolist() == [V - 1] * 40
    assert tokens[:, 1].tolist() == (RISING + noise).argmax(1).tolist()
    assert len(tokens[:, 1].unique()) > 10


REAL = [
    ("flat", 1.0, SamplingParams(top_p=0.9)),
    ("wide", 3.0, SamplingParams(top_p=0.95)),
    ("peaked", 8.0, SamplingParams(top_p=0.9, temperature=0.7)),
    ("rank", 2.0, SamplingParams(top_k=50)),
    ("large rank", 1.0, SamplingParams(top_k=40_000)),
    ("both", 2.0, SamplingParams(top_k=40, top_p=0.9)),
    ("large both", 1.0, SamplingParams(top_k=20_000, top_p=0.8)),
    ("floor", 2.0, SamplingParams(min_p=0.05)),
    ("equal", 0.0, SamplingParams(top_p=0.9)),
    ("cold", 3.0, SamplingParams(temperature=1e-5)),
    ("hot", 3.0, SamplingParams(temperature=100, top_p=0.95)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [50_257, 128_256])
@pytest.mark.parametrize(("label", "spread", "params"), REAL, ids=lambda v: v if isinstance(v, str) else "")
def test_real_vocabularies_draw_the_references_tokens(label, spread, params, vocab: int, dtype: torch.dtype) -> None:
    """Against float64 on the same device. A draw may differ where two noised logits tie to float32's rounding."""
    logits = (spread * torch.randn(24, vocab, generator=torch.Generator().manual_seed(vocab))).to("cuda", dtype)
    sampling = sampling_of([Row(params, seed=n) for n in range(24)], vocab, "cuda")
    expected, got = op.sample_reference(logits, *sampling), gpu.sample(logits, *sampling)
    assert (got != expected).sum() <= 1, (label, got.tolist(), expected.tolist())


def packed(columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same columns side by side in one tensor."""
    rows = torch.stack([column.clone() for column in columns.values()], dim=1)
    return dict(zip(columns, rows.unbind(1), strict=True))


def test_tables_may_be_views_of_wider_rows() -> None:
    wanted = [SamplingParams(top_k=9, top_p=0.9), SamplingParams(min_p=0.02, presence_penalty=1.0, min_tokens=4)]
    batch = [Row(p, output=(3, 3), seed=n, stop_ids=frozenset({n})) for n, p in enumerate(wanted)]
    logits = 2 * torch.randn(2, V, generator=torch.Generator().manual_seed(4))
    tables, slots_R, position_R, features = sampling_of(batch, V)
    columns = {f.name: getattr(tables, f.name) for f in fields(tables)}
    floats = {name: c for name, c in columns.items() if c.dim() == 1 and c.is_floating_point()}
    integers = {name: c for name, c in columns.items() if c.dim() == 1 and not c.is_floating_point()}
    wide = {name: torch.cat([c, c], 1)[:, : c.shape[1]] for name, c in columns.items() if c.dim() == 2}
    views = op.SamplingTables(**packed(floats), **packed(integers), **wide)
    arguments = (slots_R, position_R, features)
    assert gpu.sample(logits, views, *arguments).tolist() == op.sample_reference(logits, tables, *arguments).tolist()

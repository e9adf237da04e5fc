"""Tokens of rows that verify drafts follow the distribution that the sampler draws from, whatever the drafts are.

A Markov chain stands for the model: the scores of a token depend on the one before it. The probability of every text
of three tokens is then known, and many requests that differ in their seeds alone count how often each comes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.core.plan.request import SamplingParams
from ridgeline.core.plan.step import Assign, Feature, features_of
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.sampling import op
from ridgeline.kernels.step.verify import DraftNodes, EmittedTokens
from ridgeline.parallel.axis import Alone
from ridgeline.worker.drawing import SAMPLING
from ridgeline.worker.slots import Slots
from ridgeline.worker.speculation.drafted import VerifiedDraws
from ridgeline.worker.speculation.drafts import Drafts
from ridgeline.worker.vocabulary import Vocabulary

V, LENGTH, REQUESTS = 8, 3, 2_000
PROMPT, OUTPUT = (1, 2, 2, 6), (3, 5)
LOGITS_VV = 1.3 * torch.randn(V, V, generator=torch.Generator().manual_seed(5))
CHAIN, TREE = (0, 1), (0, 0, 1, 2)  # the parents of the drafts, which are nodes from 1 on
SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "presence_penalty": {"presence_penalty": 0.9},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "logit_bias": {"logit_bias": {0: 1.5, 4: -2.0, 7: -100.0}},
    "min_tokens": {"min_tokens": 4},
    "together": {
        "temperature": 1.2, "top_k": 6, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.95, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.4, "logit_bias": {0: 1.0, 4: -1.0}, "min_tokens": 4,
    },
}  # fmt: skip
STOP = 6  # ends a request, unless min_tokens forbids it


class Drawn:
    """Requests that have drawn OUTPUT, and go on by steps that verify drafts. seed: the first one's."""

    def __init__(self, params: SamplingParams, parents: tuple[int, ...], seed: int = 0) -> None:
        cpu, index = torch.device("cpu"), len(PROMPT) + len(OUTPUT) - 1  # of the last token
        self.params, self.seed = params, seed
        self.slots = slots = Slots(REQUESTS, 1, 1, V, cpu)
        slots.apply(
            [
                Assign(
                    slot=0,
                    generation=1,
                    kv_len=index,
                    last_token=OUTPUT[-1],
                    blocks=((),),
                    params=params,
                    seed=0,
                    stop_ids=frozenset({STOP}) if params.min_tokens else frozenset(),
                    max_total_tokens=100,
                    prompt=PROMPT,
                    output=OUTPUT,
                )
            ]
        )
        few = {name: getattr(slots.sampling, name)[:, :8] for name in ("bias_ids_SB", "bias_SB")}
        slots.sampling = replace(slots.sampling, **few)
        tables = [getattr(slots.sampling, name) for name in vars(slots.sampling)]
        for table in (*tables, slots.kv_len_S, slots.last_token_S, slots.max_len_S, slots.stopped_S):
            table[1:REQUESTS] = table[0].clone()
        slots.sampling.seed_S[:REQUESTS] = torch.arange(seed, seed + REQUESTS)
        self.features = features_of(params, masked=False) & SAMPLING
        self.ops = Ops(Platform.of(cpu))
        self.parents, bits, depths = parents, [1], [0]
        for node, above in enumerate(parents, 1):
            bits.append(bits[above] | 1 << node)
            depths.append(1 + depths[above])
        self.depth_N, self.nodes, self.emits = torch.tensor(depths), len(bits), 1 + max(depths)
        self.tree_SN = torch.tensor(bits).repeat(REQUESTS + 1, 1) if parents != CHAIN else None
        self.drafts_SD = torch.full((REQUESTS + 1, len(parents)), -1, dtype=torch.int32)

    def step(self, drafts_RD: Tensor) -> Tensor:
        """Verify these drafts of every request, and return what it emits: [R, K]."""
        slots, slots_R = self.slots, torch.arange(REQUESTS)
        self.drafts_SD[:REQUESTS] = drafts_RD.int()
        drafts = Drafts.alike(REQUESTS, self.nodes, slots.device, self.emits)
        before_R = slots.kv_len_S[:REQUESTS].clone()
        node_RN = torch.cat((slots.last_token_S[:REQUESTS, None], drafts_RD), 1)
        scores: Any = SimpleNamespace(
            logits_RU=LOGITS_VV[node_RN].flatten(0, 1),
            index_P=(1 + before_R[:, None] + self.depth_N).flatten(),
        )
        own: Any = SimpleNamespace(
            _slots=slots, _drafts_SD=self.drafts_SD, vocabulary=Vocabulary(V, Alone(), self.ops), _ops=self.ops
        )
        token_P = VerifiedDraws._draw_behind(own, slots_R, scores, drafts, self.features)
        out_RK = torch.full((REQUESTS, self.emits), -1, dtype=torch.int32)
        finish_R, drafted_R = torch.zeros(2, REQUESTS, dtype=torch.int8)
        path_RK = None if self.tree_SN is None else torch.full_like(out_RK, -1)
        nodes = DraftNodes(drafts.places_RN, drafts.num_logits_R, self.drafts_SD, self.tree_SN)
        active_R = torch.ones(REQUESTS, dtype=torch.bool)
        advance = slots.advancing(slots_R, before_R + self.nodes, active_R, self.features)
        self.ops.step_verify(token_P, nodes, advance, EmittedTokens(out_RK, finish_R, drafted_R, path_RK))
        return out_RK

    def texts(self, drafts: str) -> tuple[Tensor, float]:
        """Return the first tokens of every request, [R, LENGTH], and how many a step brought of one, on the mean.

        drafts: "right": those that the plain sampler draws with the same seeds; "wrong": others than these, in all
            places; "blind": any, by chance.
        """
        told_RL = None if drafts == "blind" else plain(self)
        chance = torch.Generator().manual_seed(1)
        text_RL, count_R = torch.full((REQUESTS, LENGTH + self.emits), -1), torch.zeros(REQUESTS, dtype=torch.int64)
        steps = 0
        while int(count_R.min()) < LENGTH:
            if told_RL is None:
                drafts_RD = torch.randint(0, V, (REQUESTS, len(self.parents)), generator=chance)
            else:
                place_RD = count_R[:, None] + self.depth_N[1:] - 1
                drafts_RD = (told_RL.gather(1, place_RD) + (drafts == "wrong")) % V
            out_RK = self.step(drafts_RD).long()
            place_RK = (count_R[:, None] + torch.arange(self.emits)).clamp(max=text_RL.shape[1] - 1)
            text_RL.scatter_(1, place_RK, torch.where(out_RK >= 0, out_RK, text_RL.gather(1, place_RK)))
            count_R, steps = count_R + (out_RK >= 0).sum(1), steps + 1
        return text_RL[:, :LENGTH], count_R.double().mean().item() / steps


def plain(like: Drawn) -> Tensor:
    """Return the tokens that requests draw one at a time, and a few tokens more: [R, 2 * LENGTH]."""
    own = Drawn(like.params, CHAIN, like.seed)
    none_RD, steps = torch.full((REQUESTS, 2), -1), range(2 * LENGTH)
    return torch.cat([own.step(none_RD)[:, :1].long() for _ in steps], 1)


def probability_of_texts(params: SamplingParams) -> Tensor:
    """Return the exact probabilities of all texts, by the formulas in double precision: [V, V, V]."""
    tables = Drawn(params, CHAIN).slots.sampling
    count_V = tables.output_count_SV[0].clone()
    found_VVV = torch.zeros([V] * LENGTH, dtype=torch.float64)

    def following(text: tuple[int, ...]) -> Tensor:
        tables.output_count_SV[0] = count_V + torch.bincount(torch.tensor(text, dtype=torch.int64), minlength=V)
        logits_V = LOGITS_VV[(*OUTPUT, *text)[-1]].double()
        for token, bias in (params.logit_bias or {}).items():
            logits_V[token] += bias
        if len(OUTPUT) + len(text) < params.min_tokens:
            logits_V[STOP] = -torch.inf
        op._penalize(logits_V, tables, 0)
        logits_V /= params.temperature
        logits_V[~op._filter(logits_V, params.top_k, params.top_p, params.min_p)] = -torch.inf
        return logits_V.masked_fill(~op._typical(logits_V, params.typical_p), -torch.inf).softmax(0)

    for first, second in itertools.product(range(V), repeat=2):
        alone_V = following(())
        found_VVV[first, second] = alone_V[first] * following((first,))[second] * following((first, second))
    return found_VVV


def likelihood(count: Tensor, expected: Tensor) -> float:
    """Return the probability of counts at least as far from the expected ones, by chi-square. Cells of few counts are
    one cell."""
    few = expected < 5
    cells = torch.stack((torch.cat((count[~few], count[few].sum()[None])),
                         torch.cat((expected[~few], expected[few].sum()[None]))))  # fmt: skip
    cells = cells[:, cells[1] > 3]
    statistic, freedom = ((cells[0] - cells[1]) ** 2 / cells[1]).sum(), torch.tensor(len(cells[0]) - 1.0).double()
    return torch.special.gammaincc(freedom / 2, statistic / 2).item()


@pytest.mark.few(13)
@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_verified_tokens_follow_the_distribution_of_the_sampler(setting: str, parents: tuple[int, ...]) -> None:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 90, **SETTINGS[setting]})
    if parents is TREE and features_of(params, masked=False) & Feature.PENALTY:
        pytest.skip("rows with penalties verify no trees")
    expected_VVV = REQUESTS * probability_of_texts(params)
    for seed, drafts in enumerate(("right", "wrong", "blind")):
        text_RL, rate = Drawn(params, parents, (seed + len(parents)) << 20).texts(drafts)
        assert (text_RL >= 0).all()
        place_R = (text_RL * torch.tensor([V * V, V, 1])).sum(1)
        count_VVV = torch.bincount(place_R, minlength=V**LENGTH).view(V, V, V).double()
        assert count_VVV[expected_VVV == 0].sum() == 0, drafts
        assert likelihood(count_VVV.flatten(), expected_VVV.flatten()) > 1e-6, drafts
        for place in range(LENGTH):
            others = [each for each in range(LENGTH) if each != place]
            assert likelihood(count_VVV.sum(others), expected_VVV.sum(others)) > 1e-6, (drafts, place)
        assert {"right": rate > 2.5, "wrong": rate == 1, "blind": 1.02 < rate < 2}[drafts], (drafts, rate)

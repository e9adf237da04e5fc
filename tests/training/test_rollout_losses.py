"""The whole loss of a batch, packed, and its gradient are those of the papers' formulas in float64, written out answer
by answer: GRPO with its three ways to count, RLOO and PPO, with and without the divergence from a reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.training.advantages import ClipRange
from ridgeline.training.policy import ScoredTokens
from ridgeline.training.rollout_objective import LossConfig, RolloutObjective
from ridgeline.training.rollouts import Rollout, RolloutBatch

LENGTHS = (3, 5, 1, 4, 2, 6)  # tokens of answers, three to each of two prompts
REWARDS = (1.0, 0.25, 0.0, 0.5, 0.75, 1.0)
MOST, LOW, HIGH, WIDTH = 8, 0.2, 0.3, 4
DOUBLE = torch.float64


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


class TablePolicy:
    """A policy whose log-probabilities are a table's. An answer's first token is its row."""

    device, temperature = torch.device("cpu"), 1.0

    def __init__(self) -> None:
        self.theta_RL = nn.Parameter(-1 - 0.3 * numbers(0, len(LENGTHS), max(LENGTHS)).abs())
        self.reference_RL = -1 - 0.3 * numbers(1, len(LENGTHS), max(LENGTHS)).abs()
        self.x_RLM = numbers(2, len(LENGTHS), max(LENGTHS), WIDTH)
        self.refers = False

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> ScoredTokens:
        table_RL = self.reference_RL if self.refers else self.theta_RL
        rows = [(answer[0], len(answer)) for _, answer in sequences]
        logprob_N = torch.cat([table_RL[row, :length] for row, length in rows])
        x_NM = torch.cat([self.x_RLM[row, :length] for row, length in rows])
        return ScoredTokens(logprob_N, torch.zeros_like(logprob_N), x_NM.float(), logprob_N.detach())

    @contextmanager
    def reference(self) -> Iterator[None]:
        self.refers = True
        yield
        self.refers = False


@torch.no_grad()
def moved(policy: TablePolicy, value: nn.Linear | None) -> None:
    """The first update of a batch."""
    policy.theta_RL += 0.3 * numbers(3, *policy.theta_RL.shape)
    if value is not None:
        value.weight += 0.2 * numbers(4, *value.weight.shape).float()


def found(config: LossConfig, drawn_RL: Tensor, policy: TablePolicy, value: nn.Linear | None) -> Tensor:
    rollouts = [
        Rollout((row, *range(100, 99 + length)), tuple(drawn_RL[row, :length].tolist()), True)
        for row, length in enumerate(LENGTHS)
    ]
    batch = RolloutBatch(0, 0, (0, 1), (tuple(rollouts[:3]), tuple(rollouts[3:])), 0.0)
    engine = SimpleNamespace(version=0, config=SimpleNamespace(max_tokens=MOST, exact=True))
    prompts = [SimpleNamespace(tokens=(1, 2), record={}) for _ in range(2)]
    course: Any = SimpleNamespace(
        engine=engine, prompts=prompts, policy=policy, next=lambda step: batch, wait_seconds=0.0, push_seconds=0.0
    )
    rewards: Any = SimpleNamespace(of=lambda answers: list(REWARDS))
    learnt: Any = policy
    objective = RolloutObjective(config, course, rewards, learnt, value=value, text=str, pack_tokens=11)
    objective.of_step(0)
    moved(policy, value)
    packs = objective.of_step(1)
    assert len(packs) > 1
    return torch.stack([objective.sum(pack) for pack in packs]).sum() / sum(map(objective.weight, packs))


def surrogate(ratio: Tensor, gain: Tensor) -> Tensor:
    return -torch.minimum(ratio * gain, ratio.clamp(1 - LOW, 1 + HIGH) * gain)


def wanted(config: LossConfig, drawn_RL: Tensor, policy: TablePolicy, value: nn.Linear | None) -> Tensor:
    rows = [(policy.theta_RL[r, :n], drawn_RL[r, :n], policy.reference_RL[r, :n]) for r, n in enumerate(LENGTHS)]
    reward, total = torch.tensor(REWARDS, dtype=DOUBLE).view(2, 3), sum(LENGTHS)
    if config.kind == "grpo":
        gains = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()
        losses = []
        for gain, (new, old, reference) in zip(gains, rows, strict=True):
            apart = torch.exp(reference - new) - (reference - new) - 1
            losses.append(surrogate(torch.exp(new - old), gain) + config.beta * apart)
        if config.loss_type == "grpo":
            return torch.stack([each.mean() for each in losses]).mean()
        return torch.cat(losses).sum() / (total if config.loss_type == "bnpo" else len(LENGTHS) * MOST)
    apart = [config.beta * (old - reference) for _, old, reference in rows]
    if config.kind == "rloo":
        got = (reward.flatten() - torch.stack([each.sum() for each in apart])).view(2, 3)
        gains = (got - (got.sum(1, keepdim=True) - got) / 2).flatten()
        ratios = [torch.exp(new.sum() - old.sum()) for new, old, _ in rows]
        return torch.stack([surrogate(ratio, gain) for ratio, gain in zip(ratios, gains, strict=True)]).mean()
    assert value is not None
    first = nn.Linear(WIDTH, 1)
    with torch.no_grad():
        first.load_state_dict(value.state_dict())
        first.weight -= 0.2 * numbers(4, *value.weight.shape).float()
    gains, returns, before = [], [], []
    for row, each in enumerate(apart):
        got, n = -each, LENGTHS[row]
        got[-1] += REWARDS[row]
        v = first(policy.x_RLM[row, :n].float())[:, 0].detach().double()
        errors = got + config.gamma * torch.cat((v[1:], v.new_zeros(1))) - v
        powers = [(config.gamma * config.lam) ** k for k in range(n)]
        gain = torch.stack([sum(powers[k - t] * errors[k] for k in range(t, n)) for t in range(n)])
        gains.append(gain)
        returns.append(gain + v)
        before.append(v)
    joined = torch.cat(gains)
    white = ((joined - joined.mean()) / (joined.var() + 1e-8).sqrt()).split(LENGTHS)
    losses = []
    for row, (new, old, _) in enumerate(rows):
        now = value(policy.x_RLM[row, : LENGTHS[row]].float())[:, 0]
        clipped = before[row] + (now - before[row]).clamp(-config.value_clip, config.value_clip)
        worse = torch.maximum((now - returns[row]).square(), (clipped - returns[row]).square())
        losses.append(surrogate(torch.exp(new - old), white[row]) + config.value_coef * 0.5 * worse)
    return torch.cat(losses).sum() / total


@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("form", ["grpo grpo", "grpo bnpo", "grpo dr_grpo", "rloo", "ppo"])
def test_a_batch_has_the_loss_and_gradient_of_its_paper(form: str, beta: float) -> None:
    kind, _, loss_type = form.partition(" ")
    options: dict[str, Any] = {"loss_type": loss_type} if loss_type else {}
    clip, of_values = ClipRange(LOW, HIGH), {"gamma": 0.9, "lam": 0.8, "value_clip": 0.1}
    config = LossConfig(kind=kind, clip=clip, beta=beta, iterations=2, **of_values, **options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    policy, value = TablePolicy(), nn.Linear(WIDTH, 1) if kind == "ppo" else None
    with torch.no_grad():
        policy.theta_RL.copy_(policy.theta_RL.float())
    drawn_RL = policy.theta_RL.detach().clone()
    results = []
    for of in (found, wanted):  # the first moves the policy
        policy.theta_RL.grad = None
        loss = of(config, drawn_RL, policy, value)
        loss.backward()
        assert policy.theta_RL.grad is not None
        results.append((loss.detach().double(), policy.theta_RL.grad.clone()))
    (loss, gradient), (expected, exact) = results
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)  # advantages are float32
    torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-6)
    assert (exact != 0).sum() > 5

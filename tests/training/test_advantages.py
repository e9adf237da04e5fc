"""Advantages and losses are those of their papers' formulas, written out in float64, answer by answer."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from ridgeline.training.advantages import (
    ClipRange,
    clipped_losses,
    divergence,
    generalized,
    group_advantages,
    leave_one_out,
    summed,
    value_losses,
    whitened,
)

DOUBLE = torch.float64


def numbers(count: int, seed: int) -> list[float]:
    return torch.randn(count, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_are_compared_with_their_group(scale: str) -> None:
    groups = [numbers(4, seed) for seed in range(3)]
    found = group_advantages(torch.tensor(groups, dtype=DOUBLE), scale)  # type: ignore[arg-type]
    everything = statistics.stdev([each for group in groups for each in group])
    for group, row in zip(groups, found.tolist(), strict=True):
        spread = {"group": statistics.stdev(group) + 1e-4, "batch": everything + 1e-4, "none": 1.0}[scale]
        assert row == pytest.approx([(each - statistics.fmean(group)) / spread for each in group], rel=1e-12)


def test_a_reward_is_compared_with_the_others() -> None:
    group = numbers(5, 1)
    [found] = leave_one_out(torch.tensor([group], dtype=DOUBLE)).tolist()
    others = [statistics.fmean(group[:i] + group[i + 1 :]) for i in range(5)]
    assert found == pytest.approx([a - b for a, b in zip(group, others, strict=True)], rel=1e-12)


def test_generalized_advantages_are_sums_of_later_errors() -> None:
    """Equation 16 of the paper, as a sum and not as a recursion."""
    counts, gamma, lam = [3, 1, 4], 0.9, 0.8
    rewards, values = numbers(8, 2), numbers(8, 3)
    advantage, returned = generalized(
        torch.tensor(rewards, dtype=DOUBLE), torch.tensor(values, dtype=DOUBLE), counts, gamma=gamma, lam=lam
    )
    start, wanted = 0, []
    for count in counts:
        r, v = rewards[start : start + count], [*values[start : start + count], 0.0]
        errors = [r[t] + gamma * v[t + 1] - v[t] for t in range(count)]
        wanted += [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, count)) for t in range(count)]
        start += count
    assert advantage.tolist() == pytest.approx(wanted, rel=1e-10)
    assert returned.tolist() == pytest.approx([a + v for a, v in zip(wanted, values, strict=True)], rel=1e-10)
    white = whitened(advantage).tolist()
    spread = math.sqrt(statistics.variance(wanted) + 1e-8)
    assert white == pytest.approx([(each - statistics.fmean(wanted)) / spread for each in wanted], rel=1e-10)


def test_ratios_are_clipped_where_that_is_worse() -> None:
    logprob, old, advantage = (numbers(40, seed) for seed in (4, 5, 6))
    x = torch.tensor(logprob, dtype=DOUBLE, requires_grad=True)
    loss, cut = clipped_losses(
        x, torch.tensor(old, dtype=DOUBLE), torch.tensor(advantage, dtype=DOUBLE), ClipRange(0.2, 0.3)
    )
    loss.sum().backward()
    assert x.grad is not None
    for i, (new, before, gain) in enumerate(zip(logprob, old, advantage, strict=True)):
        ratio = math.exp(new - before)
        inside = min(max(ratio, 0.8), 1.3)
        assert loss[i].item() == pytest.approx(-min(ratio * gain, inside * gain), rel=1e-12)
        assert bool(cut[i]) == (inside * gain < ratio * gain)
        assert x.grad[i].item() == pytest.approx(0.0 if cut[i] else -ratio * gain, rel=1e-12)


def test_divergences_and_values() -> None:
    logprob, reference = numbers(6, 7), numbers(6, 8)
    found = divergence(torch.tensor(logprob, dtype=DOUBLE), torch.tensor(reference, dtype=DOUBLE)).tolist()
    wanted = [math.exp(b - a) - (b - a) - 1 for a, b in zip(logprob, reference, strict=True)]
    assert found == pytest.approx(wanted, rel=1e-12)
    value, old, returned = (torch.tensor(numbers(6, seed), dtype=DOUBLE) for seed in (9, 10, 11))
    for i, loss in enumerate(value_losses(value, old, returned, 0.2).tolist()):
        v, o, r = float(value[i]), float(old[i]), float(returned[i])
        assert loss == pytest.approx(0.5 * max((v - r) ** 2, (min(max(v, o - 0.2), o + 0.2) - r) ** 2), rel=1e-12)
    assert summed(torch.arange(6.0), [1, 3, 2]).tolist() == [0.0, 6.0, 9.0]

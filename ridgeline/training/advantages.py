"""Advantages of answers, and the losses of policies.

Legend:
    P  prompts
    G  answers of a prompt
    N  tokens of all answers, one answer behind the other
    R  answers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-4
Scale = Literal["group", "batch", "none"]


def group_advantages(reward_PG: Tensor, scale: Scale) -> Tensor:
    """Return rewards without the mean of their group, divided by a standard deviation (GRPO; Shao et al., arXiv
    2402.03300). scale: that of the group, that of all answers, or none (Dr. GRPO, Liu et al., arXiv 2503.20783)."""
    centred_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    if scale == "none":
        return centred_PG
    deviation = reward_PG.std(1, keepdim=True) if scale == "group" else reward_PG.std()
    return centred_PG / (deviation + EPSILON)


def leave_one_out(reward_PG: Tensor) -> Tensor:
    """Return each reward without the mean of the others of its group (RLOO; Ahmadian et al., arXiv 2402.14740)."""
    count = reward_PG.shape[1]
    return reward_PG - (reward_PG.sum(1, keepdim=True) - reward_PG) / (count - 1)


def generalized(
    reward_N: Tensor, value_N: Tensor, counts: Sequence[int], *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) of tokens (GAE; Schulman et al., arXiv 1506.02438). Each answer ends with its last
    token, behind which there is no value."""
    advantage_N = torch.empty_like(reward_N)
    start = 0
    for count in counts:
        rest = torch.zeros((), dtype=reward_N.dtype)
        for at in reversed(range(start, start + count)):
            behind = value_N[at + 1] if at + 1 < start + count else torch.zeros_like(rest)
            rest = reward_N[at] + gamma * behind - value_N[at] + gamma * lam * rest
            advantage_N[at] = rest
        start += count
    return advantage_N, advantage_N + value_N


def whitened(x_N: Tensor) -> Tensor:
    """Return numbers with mean 0 and variance 1."""
    return (x_N - x_N.mean()) * torch.rsqrt(x_N.var() + 1e-8)


class ClipRange(NamedTuple):
    """The range of a ratio, 1 - low … 1 + high, in which it has a gradient that makes it more extreme."""

    low: float
    high: float


def clipped_losses(logprob: Tensor, old: Tensor, advantage: Tensor, clip: ClipRange) -> tuple[Tensor, Tensor]:
    """Return the losses of tokens, or of whole answers, and which of them the clip decides (PPO; Schulman et al., arXiv
    1707.06347). All arguments have one shape."""
    ratio = torch.exp(logprob - old)
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high)
    free, cut = ratio * advantage, bounded * advantage
    return -torch.minimum(free, cut), (cut < free).detach()


def divergence(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """Return an estimate of each token's KL divergence from the reference that is never negative and has no bias
    (Schulman's k3)."""
    log_ratio_N = reference_N - logprob_N
    return torch.exp(log_ratio_N) - log_ratio_N - 1


def value_losses(value_N: Tensor, old_N: Tensor, return_N: Tensor, clip: float) -> Tensor:
    """Return half the squared errors of values that move at most `clip` from what they were."""
    near_N = old_N + (value_N - old_N).clamp(-clip, clip)
    return 0.5 * torch.maximum((value_N - return_N).square(), (near_N - return_N).square())


def summed(x_N: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the sum over each answer's tokens: [R]."""
    return torch.stack([part.sum() for part in x_N.split(list(counts))])

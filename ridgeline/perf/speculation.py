"""The gain of drafts: the time of a step that verifies some, beside the tokens that it brings.

A row with k drafts, each of which is right with probability a if those before it are, emits 1 + a + … + aᵏ tokens on
average (Leviathan et al., arXiv 2211.17192). The step takes c times as long as one without drafts. So drafts pay from
the share on at which that sum is c, and not at all if c is above k + 1.

A model that drafts lengthens the step by k of its own, each d of a step without drafts. So the speedup is

    (1 - a^(k + 1)) / ((1 - a) (c + k d))

which is the paper's theorem 3.8 where c is 1. Steps that only verify (`verifying`) have d = 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ridgeline.kernels.base.cost import CostModel, StepShape

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARES = (0.6, 0.7, 0.8)


class Verifying(NamedTuple):
    """Steps of `batch` rows that verify `drafts` each.

    cost: their time, relative to that of steps without drafts.
    break_even: the share of right drafts from which on they pay; None if they never do.
    speedups: by the shares of `SHARES`.
    """

    batch: int
    drafts: int
    cost: float
    break_even: float | None
    speedups: tuple[float, ...]


def tokens_of_a_row(share: float, drafts: int) -> float:
    """Return the number of tokens that a row emits on average."""
    return sum(share**place for place in range(drafts + 1))


def speedup(share: float, drafts: int, cost: float, draft: float = 0.0) -> float:
    """Return the factor by which tokens come faster.

    cost: the time of a step that verifies, relative to one that does not. draft: that of making one draft, relative to
    the same.
    """
    return tokens_of_a_row(share, drafts) / (cost + drafts * draft)


def break_even(cost: float, drafts: int) -> float | None:
    """Return the share of right drafts at which a row brings as many tokens as its step costs more; None if no share
    is enough."""
    if cost > drafts + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_of_a_row(middle, drafts) < cost else (low, middle)
    return high


def verifying(
    model: CostModel, context: int, drafts: Iterable[int], batches: Iterable[int] = BATCHES
) -> list[Verifying]:
    """Return cost and gain of verifying, by the limits of steps whose rows have `context` cached tokens."""
    counts, found = list(drafts), []
    for batch in batches:
        plain = _limit(model, batch, context, 0)
        for count in counts:
            cost = _limit(model, batch, context, count) / plain
            speedups = tuple(speedup(share, count, cost) for share in SHARES)
            found.append(Verifying(batch, count, cost, break_even(cost, count), speedups))
    return found


def _limit(model: CostModel, batch: int, context: int, drafts: int) -> float:
    tokens, cached = [1 + drafts] * batch, [context + drafts] * batch
    return model.step_limit(StepShape(tokens, cached, sum(tokens)))

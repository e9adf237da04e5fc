"""The law by which loss falls with parameters and tokens, fitted to measured runs.

Hoffmann et al. (arXiv 2203.15556, section 3.3) model the loss of a model of N parameters after D tokens as

    L(N, D) = E + A / N^alpha + B / D^beta

Given both exponents the loss is linear in E, A and B. So these follow by linear least squares, none below 0, and only
the exponents are searched, on a grid that is made finer around its best point. Errors are relative, so every run counts
the same.

Legend:
    R  runs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ridgeline.core.errors import InvalidConfig

FLOPS = 6.0  # of training, for each parameter and token
EXPONENTS = (0.05, 1.5)
GRID, ZOOMS = 30, 12


class Run(NamedTuple):
    """A trained model: its parameters, the tokens that it read, its loss in nats per token."""

    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class ScalingLaw:
    """The law's numbers. error: the largest relative error over the runs that it was fitted to."""

    floor: float
    a: float
    alpha: float
    b: float
    beta: float
    error: float = 0.0

    def loss(self, parameters: float, tokens: float) -> float:
        return float(self.floor + self.a / parameters**self.alpha + self.b / tokens**self.beta)

    def best(self, flops: float) -> tuple[float, float]:
        """Return the (parameters, tokens) of the least loss for so many FLOPs of training. Raise InvalidConfig if the
        law says that one of both gains nothing."""
        if not (self.a > 0 and self.b > 0):
            idle = "parameters" if not self.a > 0 else "tokens"
            raise InvalidConfig(f"these runs show no gain by {idle}, so no split of FLOPs is best; train for longer.")
        both, budget = self.alpha + self.beta, flops / FLOPS
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / both)
        return ratio * budget ** (self.beta / both), budget ** (self.alpha / both) / ratio


def fit(runs: Sequence[Run]) -> ScalingLaw:
    """Return the law with the least squared relative error. Raise InvalidConfig for runs that cannot decide it."""
    sizes, lengths = ({run[index] for run in runs} for index in (0, 1))
    if len(runs) < 6 or len(sizes) < 3 or len(lengths) < 3:
        raise InvalidConfig(
            f"a scaling law has five numbers, so it needs six runs with three sizes and three lengths; got {len(runs)} "
            f"runs of {len(sizes)} sizes and {len(lengths)} lengths."
        )
    if bad := [run for run in runs if not all(0 < value < float("inf") for value in run)]:
        raise InvalidConfig(f"parameters, tokens and loss of a run must be numbers above 0, got {tuple(bad[0])}.")
    number_R, token_R, loss_R = np.array(runs, dtype=np.float64).T
    scale = number_R.min(), token_R.min()  # so that all columns are of one size

    def solved(alpha: float, beta: float) -> tuple[float, np.ndarray]:
        columns_R3 = np.stack(
            [np.ones_like(loss_R), (number_R / scale[0]) ** -alpha, (token_R / scale[1]) ** -beta], axis=1
        )
        return _least(columns_R3 / loss_R[:, None])

    _, alpha, beta, (floor, a, b) = _searched(solved)
    law = ScalingLaw(float(floor), float(a * scale[0] ** alpha), alpha, float(b * scale[1] ** beta), beta)
    return ScalingLaw(law.floor, law.a, alpha, law.b, beta, max(errors(law, runs)))


def errors(law: ScalingLaw, runs: Iterable[Run]) -> list[float]:
    """Return the relative error of each run's loss by the law."""
    return [abs(law.loss(run.parameters, run.tokens) / run.loss - 1) for run in runs]


def _searched(solved: Callable[[float, float], tuple[float, np.ndarray]]) -> tuple[float, float, float, np.ndarray]:
    """Return (the squared error, alpha, beta, E and scaled A and B) of the best exponents."""

    (low, high), best = EXPONENTS, (np.inf, 0.0, 0.0, np.zeros(3))
    spans = [np.geomspace(low, high, GRID)] * 2
    width = (high / low) ** (1 / (GRID - 1))
    for _ in range(ZOOMS):
        for alpha in spans[0]:
            for beta in spans[1]:
                error, numbers = solved(alpha, beta)
                if error < best[0]:
                    best = (error, float(alpha), float(beta), numbers)
        spans = [np.clip(np.geomspace(each / width, each * width, 9), low, high) for each in best[1:3]]
        width **= 0.5
    return best


def _least(columns_R3: np.ndarray) -> tuple[float, np.ndarray]:
    """Return (the squared error, the numbers, none below 0) by which columns add up to ones."""
    best, found = np.inf, np.zeros(3)
    for count in (3, 2, 1):
        for chosen in combinations(range(3), count):
            part = columns_R3[:, chosen]
            numbers = np.linalg.lstsq(part, np.ones(len(part)), rcond=None)[0]
            error = float(np.square(part @ numbers - 1).sum())
            if (numbers >= 0).all() and error < best:
                best, found = error, np.zeros(3)
                found[list(chosen)] = numbers
        if np.isfinite(best):  # with fewer columns the error is no smaller
            break
    return best, found

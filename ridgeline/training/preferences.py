"""Learning from preferences: better answers become likelier than worse ones. What DPO and KTO compare with, the
reference, is the model as training found it.

* DPO (Rafailov et al., arXiv 2305.18290) has pairs: -log σ(β (r of the better - r of the worse)), where r is the
  logarithm of what the model gives an answer over what the reference gives it.
* ORPO (Hong et al., arXiv 2403.07691) has pairs and no reference: the better answer's nats per token, minus β times the
  log σ of the difference of both answers' log odds.
* KTO (Ethayarajh et al., arXiv 2402.01306) has answers that are good or bad: w (1 - σ(±β (r - z))), where z is the mean
  of r over answers to other prompts, at least 0.

Legend:
    D  items of a pack
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.training.conversations import AnswerPair, JudgedAnswer, examples_of
from ridgeline.training.tuned import PackRunner

Loss = Literal["dpo", "orpo", "kto"]
REFERRED: tuple[Loss, ...] = ("dpo", "kto")  # compare with the model as it was


class Referred(NamedTuple):
    """An item, and the reference's log-probabilities of its answers, in order."""

    item: Any
    reference: tuple[float, ...]


def dpo_losses(chosen_D: Tensor, rejected_D: Tensor, margins_D: Tensor, beta: float) -> Tensor:
    """Return the loss of each pair: [D].

    chosen_D, rejected_D: the model's log-probabilities of the answers. margins_D: the reference's, chosen minus
    rejected.
    """
    return -F.logsigmoid(beta * (chosen_D - rejected_D - margins_D))


def orpo_losses(chosen_D: Tensor, rejected_D: Tensor, beta: float) -> Tensor:
    """Return the loss of each pair: [D]. chosen_D, rejected_D: mean log-probabilities of the answers' tokens."""
    odds_D = chosen_D - rejected_D - (_log_of_rest(chosen_D) - _log_of_rest(rejected_D))
    return -chosen_D - beta * F.logsigmoid(odds_D)


def _log_of_rest(log_D: Tensor) -> Tensor:
    """Return log(1 - exp(x)), which is exact near 0 too."""
    return torch.log(-torch.expm1(log_D))


def kto_losses(
    ratios_D: Tensor, good_D: Tensor, elsewhere: Tensor, beta: float, weights: tuple[float, float]
) -> Tensor:
    """Return the loss of each answer: [D].

    ratios_D: the model's log-probabilities minus the reference's. good_D: bool. elsewhere: the mean of such ratios of
    answers to other prompts, without a gradient; below 0 it counts as 0. weights: of good answers, and of bad ones.
    """
    sign_D = torch.where(good_D, 1.0, -1.0).to(ratios_D.dtype)
    weight_D = torch.where(good_D, weights[0], weights[1]).to(ratios_D.dtype)
    return weight_D * (1 - torch.sigmoid(sign_D * beta * (ratios_D - elsewhere.clamp(min=0))))


@torch.no_grad()
def with_reference(runs: PackRunner, items: Sequence[AnswerPair | JudgedAnswer]) -> list[Referred]:
    """Return the items with what the model says of their answers now, before it is trained."""
    return [Referred(item, tuple(runs.logprobs(examples_of(item)).tolist())) for item in items]


def without_reference(items: Sequence[AnswerPair]) -> list[Referred]:
    """Return items that are compared with no reference."""
    return [Referred(item, ()) for item in items]


class Preferences:
    """The losses of items. weights: of good answers and of bad ones, for KTO."""

    def __init__(
        self,
        runs: PackRunner,
        items: Sequence[Referred],
        beta: float,
        loss: Loss = "dpo",
        weights: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.runs, self.items, self.beta, self.loss, self.weights = runs, items, beta, loss, weights

    def weight(self, pack: Sequence[int]) -> int:
        return len(pack)

    def tokens(self, pack: Sequence[int]) -> int:
        return sum(len(one.tokens) for index in pack for one in examples_of(self.items[index].item))

    def sum(self, pack: Sequence[int]) -> Tensor:
        items = [self.items[index] for index in pack]
        each = [examples_of(item) for item, _ in items]
        if self.loss == "kto":
            return self._judged(items).sum()
        chosen_D, rejected_D = self.runs.logprobs([one for both in zip(*each, strict=True) for one in both]).chunk(2)
        if self.loss == "orpo":
            counts_2D = torch.tensor([[sum(one.counted) for one in side] for side in zip(*each, strict=True)])
            chosen_D, rejected_D = torch.stack((chosen_D, rejected_D)) / counts_2D.to(chosen_D)
            return orpo_losses(chosen_D, rejected_D, self.beta).sum()
        margins_D = chosen_D.new_tensor([chosen - rejected for _, (chosen, rejected) in items])
        return dpo_losses(chosen_D, rejected_D, margins_D, self.beta).sum()

    def _judged(self, items: Sequence[Referred]) -> Tensor:
        answers, others = zip(*(examples_of(item) for item, _ in items), strict=True)
        with torch.no_grad():
            others_D = self.runs.logprobs(others)
        log_D = self.runs.logprobs(answers)
        own_D, their_D = log_D.new_tensor([reference for _, reference in items]).T
        good_D = torch.tensor([item.good for item, _ in items], device=log_D.device)
        return kto_losses(log_D - own_D, good_D, (others_D - their_D).mean(), self.beta, self.weights)

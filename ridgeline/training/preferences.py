"""Direct preference optimization (Rafailov et al., arXiv 2305.18290): better answers become likelier than worse ones,
beside a reference, which is the model as training found it.

Legend:
    D  pairs of a pack
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.training.conversations import AnswerPair, pair_tokens
from ridgeline.training.tuned import PackRunner


class Referred(NamedTuple):
    """A pair, and the reference's log-probability of the better answer minus that of the worse one."""

    pair: AnswerPair
    margin: float


def dpo_losses(chosen_D: Tensor, rejected_D: Tensor, margins_D: Tensor, beta: float) -> Tensor:
    """Return the loss of each pair: [D].

    chosen_D, rejected_D: the model's log-probabilities of the answers. margins_D: the reference's, chosen minus
    rejected.
    """
    return -F.logsigmoid(beta * (chosen_D - rejected_D - margins_D))


@torch.no_grad()
def with_reference(runs: PackRunner, pairs: Sequence[AnswerPair]) -> list[Referred]:
    """Return the pairs with what the model says of them now, before it is trained."""
    found = []
    for pair in pairs:
        chosen, rejected = runs.logprobs(pair)
        found.append(Referred(pair, float(chosen - rejected)))
    return found


class Preferences:
    """The losses of pairs."""

    def __init__(self, runs: PackRunner, pairs: Sequence[Referred], beta: float) -> None:
        self.runs, self.pairs, self.beta = runs, pairs, beta

    def weight(self, pack: Sequence[int]) -> int:
        return len(pack)

    def tokens(self, pack: Sequence[int]) -> int:
        return sum(pair_tokens(self.pairs[index].pair) for index in pack)

    def sum(self, pack: Sequence[int]) -> Tensor:
        pairs = [self.pairs[index] for index in pack]
        both = [pair.chosen for pair, _ in pairs] + [pair.rejected for pair, _ in pairs]
        chosen_D, rejected_D = self.runs.logprobs(both).split(len(pairs))
        margins_D = torch.tensor([margin for _, margin in pairs], dtype=chosen_D.dtype, device=chosen_D.device)
        return dpo_losses(chosen_D, rejected_D, margins_D, self.beta).sum()

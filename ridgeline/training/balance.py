"""Balancing of experts during training, and figures about how evenly tokens are spread over them.

Without balancing, a router that happens to prefer some experts trains these alone, so that it prefers them more. There
are two remedies. An auxiliary loss is smallest where all experts are equally likely and equally busy (Fedus et al.,
arXiv 2101.03961). Or a correction of each expert's score, for the choice alone, rises while the expert has too few
tokens and falls while it has too many (Wang et al., arXiv 2408.15664). The second has no gradients of its own.

Legend:
    L  layers with experts
    E  experts
    T  tokens
    M  model width
    K  experts of a token
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.experts import RoutingSpec
from ridgeline.kernels.gemm.route import op
from ridgeline.kernels.gemm.route.op import Router, Routes
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.experts import Experts

STARVED = 0.1  # of the mean load: an expert with less is as good as lost


@dataclass(frozen=True, kw_only=True)
class Balance:
    """The method by which experts are kept equally busy.

    method: "none", "loss" (the auxiliary loss), or "correction" (needs a router with one).
    weight: factor of the auxiliary loss, which is 1 for each layer whose experts are balanced.
    rate: what a step adds to or takes from an expert's correction.
    """

    method: Literal["none", "loss", "correction"] = "none"
    weight: float = 0.01
    rate: float = 0.002


NO_BALANCE = Balance()


class Balancer:
    """The balancing of one decoder while it is trained. It takes the place of the decoder's op `route`, so that it sees
    all scores and choices. Raise InvalidConfig if corrections are to be moved that the model does not have.

    counts_LE: how many tokens each expert got since they were last read.
    """

    def __init__(self, decoder: Decoder, balance: Balance) -> None:
        self.balance = balance
        self.layers = experts_of(decoder)
        if balance.method == "correction" and any(layer.correction is None for layer in self.layers):
            raise InvalidConfig("balancing by correction needs a router that has a correction; use balancing by loss.")
        self._losses: list[Tensor] = []
        self._counts: list[Tensor] = []
        if self.layers:
            self.counts_LE = torch.stack([torch.zeros_like(layer.tally_E) for layer in self.layers])
            setattr(decoder.ops, "route", self._route)  # noqa: B010  a plain assignment would replace an Op by type

    def loss(self) -> Tensor | float:
        """Return the auxiliary loss of the last forward pass, summed over layers, times its weight."""
        if self.balance.method != "loss" or not self._losses:
            return 0.0
        return self.balance.weight * torch.stack(self._losses).sum()

    @torch.no_grad()
    def step(self) -> None:
        """Move the corrections by the last forward pass's counts, and forget that pass."""
        if self._counts:
            count_LE = torch.stack(self._counts)
            self.counts_LE += count_LE
            if self.balance.method == "correction":
                error_LE = count_LE.mean(1, keepdim=True, dtype=torch.float32) - count_LE
                for layer, error_E in zip(self.layers, error_LE, strict=True):
                    assert layer.correction is not None
                    layer.correction.add_(error_E.sign(), alpha=self.balance.rate)
        self._losses, self._counts = [], []

    def read(self) -> Tensor:
        """Return `counts_LE`, and count from 0 again."""
        counts_LE, self.counts_LE = self.counts_LE, torch.zeros_like(self.counts_LE)
        return counts_LE

    def _route(
        self,
        x_TM: Tensor,
        residual_TM: Tensor | None,
        norm_weight_M: Tensor | None,
        eps: float,
        router: Router,
        live_T: Tensor | None,
        tally_E: Tensor | None,
    ) -> tuple[Tensor, Tensor, Routes]:
        """Route as the op's reference does, in float32 also under autocast, and keep what balancing needs."""
        with torch.autocast(x_TM.device.type, enabled=False):
            n_TM, s_TM, routes = op.route(x_TM, residual_TM, norm_weight_M, eps, router, live_T, tally_E)
            self._counts.append(routes.start_E1.diff())
            if self.balance.method == "loss":
                self._losses.append(auxiliary_loss(op.logits(n_TM, router), self._counts[-1], router.how))
        return n_TM, s_TM, routes


def auxiliary_loss(logits_TE: Tensor, count_E: Tensor, how: RoutingSpec) -> Tensor:
    """Return E · Σ share of the tokens · mean probability, over experts. It is 1 where both are the same for all
    experts, and E / K at most. Gradients reach the probabilities alone. Sigmoid scores count by their share of a
    token's sum."""
    score_TE = logits_TE.sigmoid() if how.score == "sigmoid" else logits_TE.softmax(-1)
    probability_E = (score_TE / score_TE.sum(-1, keepdim=True)).mean(0)
    return how.experts * (count_E / count_E.sum() * probability_E).sum()


def experts_of(decoder: Decoder) -> list[Experts]:
    """Return the layers' mixtures, in order."""
    return [module for module in decoder.modules() if isinstance(module, Experts)]


def load_figures(counts_LE: Tensor) -> dict[str, float]:
    """Return measures of how evenly tokens are spread over experts.

    load_entropy: bits, the mean over layers; log2 E is even.
    max_over_mean: the busiest expert's tokens over the mean, the mean over layers.
    starved: experts with less than a tenth of the mean, in all layers together.
    """
    share_LE = counts_LE.double() / counts_LE.sum(1, keepdim=True)
    entropy_L = -torch.special.xlogy(share_LE, share_LE).sum(1) / torch.log(torch.tensor(2.0))
    relative_LE = share_LE * share_LE.shape[1]
    return {
        "load_entropy": entropy_L.mean().item(),
        "max_over_mean": relative_LE.amax(1).mean().item(),
        "starved": int((relative_LE < STARVED).sum()),
    }

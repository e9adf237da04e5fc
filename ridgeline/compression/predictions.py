"""Predictions of a model in float32 and plain torch, window by window over the whole vocabulary, and the cost of a
change of the model.

What engines round besides what is to be measured (a dtype of 16 bits, a kernel's sums) is left out, and a divergence is
that of the whole distributions. `ridgeline eval compare` measures through the engine, and has a lower bound of it.

Legend:
    T  tokens of a window
    V  vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal, DenseStates


@torch.no_grad()
def logprobs(decoder: Decoder, tokens_T1: Tensor, state: DenseCausal | None = None) -> Tensor:
    """Return the log-probabilities of what follows each token of a window but the last, float32 [T, V]."""
    length, dtype, device = len(tokens_T1) - 1, decoder.embed.weight.dtype, tokens_T1.device
    states = state or DenseStates(decoder.spec, 1, length, dtype, device)
    hidden = decoder(tokens_T1[:-1], torch.arange(length, device=device), states)
    return decoder.logits(hidden).float().log_softmax(1)


def divergence(before_TV: Tensor, after_TV: Tensor) -> Tensor:
    """Return KL(before ‖ after) of each token over the whole vocabulary, in nats: [T]. What was impossible before costs
    nothing."""
    return (before_TV.exp() * (before_TV - after_TV)).nan_to_num(0.0, posinf=torch.inf).sum(1)


@dataclass(frozen=True)
class TokenCosts:
    """The cost of each token scored, beside a baseline.

    nats_T: negative log-likelihood of the text's token. kl_T: KL(baseline ‖ this) over the whole vocabulary, in nats.
    same_T: both hold the same token likeliest.
    """

    nats_T: Tensor
    kl_T: Tensor
    same_T: Tensor

    @classmethod
    def between(cls, baseline_TV: Tensor, found_TV: Tensor, tokens_T1: Tensor) -> TokenCosts:
        nats_T = -found_TV.gather(1, tokens_T1[1:, None])[:, 0]
        return cls(nats_T, divergence(baseline_TV, found_TV), baseline_TV.argmax(1) == found_TV.argmax(1))

    @classmethod
    def joined(cls, parts: Sequence[TokenCosts]) -> TokenCosts:
        return cls(*(torch.cat(tensors) for tensors in zip(*(vars(part).values() for part in parts), strict=True)))

    @property
    def perplexity(self) -> float:
        nats = float(self.nats_T.double().mean())
        return math.exp(nats) if nats < 709 else math.inf

    @property
    def kl_mean(self) -> float:
        return float(self.kl_T.double().mean())

    @property
    def kl_p99(self) -> float:
        return float(self.kl_T.quantile(0.99)) if len(self.kl_T) < 1 << 24 else math.nan

    @property
    def equal_greedy(self) -> float:
        return float(self.same_T.double().mean())

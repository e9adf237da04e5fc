"""The cost of rounding in a model's predictions, in memory: perplexity and divergence on given tokens.

`ridgeline eval compare` measures the same through the engine; here nothing is written or loaded in between.

Legend:
    B  sequences
    S  tokens per sequence
    T  tokens
    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from ridgeline.compression.walk import Run
from ridgeline.layers.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A model beside the one that it was made from.

    perplexity: of each token after the first of its sequence.
    kl: the mean of KL(before ‖ after) over all tokens, over the whole vocabulary, in nats.
    equal_greedy: the share of tokens after which both hold the same one likeliest.
    """

    perplexity: float
    kl: float
    equal_greedy: float


@torch.no_grad()
def logprobs(decoder: Decoder, tokens_BS: Tensor) -> list[Tensor]:
    """Return the log-probabilities of every next token, in pieces: float32 [T, V]. A token takes 4 V bytes."""
    run = Run(decoder, tokens_BS)
    for index in range(len(decoder.layers)):
        run.advance(index)
    return [logits_TV.float().log_softmax(-1) for logits_TV in run.logits()]


def quality(before: Sequence[Tensor], after: Sequence[Tensor], tokens_BS: Tensor) -> Quality:
    """Return the quality of a model whose log-probabilities are `after`."""
    tokens = tokens_BS.numel()
    texts = tokens_BS.split([len(q_TV) // tokens_BS.shape[1] for q_TV in after])
    nats = -sum(float(_of_text(q_TV, some_BS).sum()) for q_TV, some_BS in zip(after, texts, strict=True))
    pairs = list(zip(before, after, strict=True))
    equal = sum(int((p_TV.argmax(-1) == q_TV.argmax(-1)).sum()) for p_TV, q_TV in pairs)
    scored = tokens - len(tokens_BS)
    return Quality(perplexity=exp(nats / scored), kl=divergence(before, after), equal_greedy=equal / tokens)


def divergence(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the mean of KL(before ‖ after) over tokens, in nats."""
    total = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(before, after, strict=True))
    return total / sum(len(p_TV) for p_TV in before)


def _of_text(q_TV: Tensor, tokens_BS: Tensor) -> Tensor:
    """Return the log-probabilities of the text's own tokens."""
    q_BSV = q_TV.unflatten(0, tokens_BS.shape)[:, :-1]
    return q_BSV.gather(-1, tokens_BS[:, 1:, None].to(q_TV.device))

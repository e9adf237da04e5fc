"""Heads and models that learn to draft, as one kind of thing: each scores the next tokens behind positions, in passes.

Position i stands for what is known when the target has run token i and drawn token i + 1. Pass j scores the token
i + 2 + j, given the tokens before it as they are in the text. So one run over a text serves training and the count of
right drafts: a draft counts only where all before it were right, and there the text is what the head would have read.

Legend:
    B  sequences
    S  tokens per sequence
    P  positions behind which all passes have a token to guess
    C  positions that are scored
    K  passes
    M  model width
    L  likeliest tokens of the target's distribution
    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal
from ridgeline.training.block_heads import BlockHead
from ridgeline.training.heads import EagleHead, MedusaHeads
from ridgeline.training.target import Trace, traced


class Learner(Protocol):
    """A head or a model that learns to draft."""

    @property
    def module(self) -> nn.Module:
        """The part with parameters."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers that it reads."""

    @property
    def most(self) -> int | None:
        """The number of its passes, if it has only so many."""

    @property
    def parts(self) -> Sequence[tuple[nn.Module, float]]:
        """The modules of it, each with its share of the learning rate."""

    def scores(self, trace: Trace, starts_C: Tensor, passes: int) -> Iterator[Tensor]:
        """Yield each pass's scores behind the positions `starts_C`: [B, C, V]."""


class Eagle:
    """A head of EAGLE-3 beside its target."""

    most: int | None = None

    def __init__(self, head: EagleHead, target: Decoder) -> None:
        self.module, self.target, self.taps = head, target, head.shape.taps
        self.parts: Sequence[tuple[nn.Module, float]] = ((head, 1.0),)

    def scores(self, trace: Trace, starts_C: Tensor, passes: int) -> Iterator[Tensor]:
        """Yield each pass's scores behind the positions `starts_C`: [B, C, V]."""
        pairs = positions(trace, passes)
        embedded_BSM = self.target.embedded(trace.tokens_BS.flatten(), places(trace.tokens_BS))
        embedded_BSM = embedded_BSM.unflatten(0, trace.tokens_BS.shape)

        def embed(offset: int) -> Tensor:
            return embedded_BSM[:, offset : offset + pairs]

        for x_BCM in self.module(trace.features_BSX, embed, starts_C, pairs, passes):
            yield scored(self.target, self.module.norm(x_BCM))


class Block:
    """A head of DFlash beside its target. A block has as many masks as there are passes."""

    def __init__(self, head: BlockHead, target: Decoder) -> None:
        self.module, self.target, self.taps = head, target, head.shape.taps
        self.parts: Sequence[tuple[nn.Module, float]] = ((head, 1.0),)
        self.most: int | None = head.shape.block - 1

    def scores(self, trace: Trace, starts_C: Tensor, passes: int) -> Iterator[Tensor]:
        """Yield the scores at each mask of the blocks behind the positions `starts_C`: [B, C, V]."""
        anchor_BC = trace.tokens_BS[:, starts_C + 1]
        embedded_BSM = self.target.embedded(trace.tokens_BS.flatten(), places(trace.tokens_BS))
        anchor_BCM = embedded_BSM.unflatten(0, trace.tokens_BS.shape)[:, starts_C + 1]
        features_BPX = trace.features_BSX[:, : positions(trace, passes)]
        masked_BC = anchor_BC == self.module.shape.mask
        for x_BCM in self.module(features_BPX, anchor_BCM, masked_BC, starts_C, passes).unbind(2):
            yield scored(self.target, x_BCM)


class Medusa:
    """Heads of Medusa beside their target."""

    taps: tuple[int, ...] = ()

    def __init__(self, heads: MedusaHeads, target: Decoder) -> None:
        self.module, self.target = heads, target
        self.parts: Sequence[tuple[nn.Module, float]] = ((heads, 1.0),)
        self.most: int | None = len(heads)

    def scores(self, trace: Trace, starts_C: Tensor, passes: int) -> Iterator[Tensor]:
        """Yield each head's scores behind the positions `starts_C`: [B, C, V]."""
        x_BCM = trace.normed_BSM[:, starts_C]
        for head in list(self.module)[:passes]:
            assert isinstance(head, nn.ModuleList)
            yield scored(self.target, head[0](x_BCM))


class DraftModel:
    """A smaller model. Its passes are its scores of the text's next tokens."""

    taps: tuple[int, ...] = ()
    most: int | None = None

    def __init__(self, decoder: Decoder) -> None:
        self.module = decoder
        self.parts: Sequence[tuple[nn.Module, float]] = ((decoder, 1.0),)

    def scores(self, trace: Trace, starts_C: Tensor, passes: int) -> Iterator[Tensor]:
        """Yield each pass's scores behind the positions `starts_C`: [B, C, V]."""
        tokens_BS = trace.tokens_BS
        hidden = self.module(tokens_BS.flatten(), places(tokens_BS), DenseCausal(len(tokens_BS)))
        first_B = torch.arange(len(tokens_BS), device=starts_C.device) * tokens_BS.shape[1]
        for index in range(passes):
            chosen_BC = first_B[:, None] + starts_C + 1 + index
            yield self.module.logits(hidden.at(chosen_BC.flatten())).unflatten(0, chosen_BC.shape)


def positions(trace: Trace, passes: int) -> int:
    """Return the number of positions from the first on behind which all passes have a token to guess."""
    return trace.tokens_BS.shape[1] - passes - 1


def losses(learner: Learner, trace: Trace, starts_C: Tensor, passes: int) -> Tensor:
    """Return each pass's mean Kullback-Leibler divergence from the target's distribution, of which the trace holds the
    likeliest tokens, in nats per token: float32 [K]."""
    found = []
    for index, logits_BCV in enumerate(learner.scores(trace, starts_C, passes)):
        given_BCV, place_C = logits_BCV.float(), starts_C + 1 + index
        wanted_BCL = trace.probability_BSL[:, place_C]
        given_BCL = given_BCV.gather(-1, trace.likely_BSL[:, place_C]) - given_BCV.logsumexp(-1, keepdim=True)
        found.append((wanted_BCL * (wanted_BCL.clamp(min=1e-9).log() - given_BCL)).sum(-1).mean())
    return torch.stack(found)


@torch.inference_mode()
def right(learner: Learner, target: Decoder, tokens_BS: Tensor, passes: int) -> Tensor:
    """Return True for each place where the likeliest token of the pass is the text's: bool [B, P, K]."""
    trace = traced(target, tokens_BS, learner.taps)
    starts_C = torch.arange(positions(trace, passes), device=tokens_BS.device)
    return torch.stack(
        [
            logits_BCV.argmax(-1) == tokens_BS[:, starts_C + 2 + index]
            for index, logits_BCV in enumerate(learner.scores(trace, starts_C, passes))
        ],
        -1,
    )


def scored(target: Decoder, x_BCM: Tensor) -> Tensor:
    """Return the scores of all tokens by the target's output matrix: [B, C, V]."""
    return target.scored(x_BCM.flatten(0, 1)).unflatten(0, x_BCM.shape[:2])


def places(tokens_BS: Tensor) -> Tensor:
    """Return the positions of all tokens, from 0 in each sequence."""
    return torch.arange(tokens_BS.shape[1], device=tokens_BS.device).repeat(len(tokens_BS))

"""The loss of packed examples, which fine-tuning minimizes, on the engine's own decoder.

Legend:
    T  tokens of all examples of a pack
    N  tokens that count in the loss
    D  examples of a pack
    M  model width
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import ABSENT, ModelSpec, lender_of
from ridgeline.layers.decoder import Decoder, Hidden
from ridgeline.layers.dense import packed_states, recurs
from ridgeline.quantization.multiplied import MultipliedWeight
from ridgeline.training.conversations import Example
from ridgeline.training.cross_entropy import cross_entropy_sum
from ridgeline.training.lora import LearntWeight

LOSS_CHUNK = 2048  # positions whose logits exist at once
WIDE_CHUNK = 8192  # … where the output layer learns on a GPU: for each part its gradient is added up once


class Objective(Protocol):
    """A loss that is a sum over the examples of a pack, divided by the weight of a whole step."""

    def weight(self, pack: Sequence[int]) -> int:
        """Return the weight of a pack: its counted tokens, or its pairs."""

    def tokens(self, pack: Sequence[int]) -> int:
        """Return the number of tokens that a pack runs."""

    def sum(self, pack: Sequence[int]) -> Tensor:
        """Return the sum of the losses of a pack, differentiable."""


def check_tunable(spec: ModelSpec, *, scores: bool = True) -> None:
    """Raise InvalidConfig for a model that is not fine-tuned here. scores: it is to score tokens."""
    odd = next((layer for layer in spec.layers if layer.mixer is ABSENT and layer.feed_forward is ABSENT), None)
    borrows = any(lender_of(layer.mixer) is not None for layer in spec.layers)
    indexed = any(getattr(layer.mixer, "indexer", None) is not None for layer in spec.layers)
    pools = spec.pooling is not None and (scores or spec.sees_behind)
    if pools or (scores and not spec.scores) or spec.encoder is not None or odd or borrows or indexed:
        raise InvalidConfig(
            "models that pool, have an encoder, an indexer or layers with the keys of others are not fine-tuned here."
        )


def recompute(decoder: Decoder) -> None:
    """Let every layer keep its input alone, and run again in the backward pass (Chen et al., arXiv 1604.06174).
    Raise InvalidConfig for recurrent layers, whose second run need not keep the same tensors."""
    if recurs(decoder.spec):
        raise InvalidConfig(
            "layers with a recurrent state do not run again in the backward pass; leave out --recompute."
        )
    for layer in dict.fromkeys(decoder.layers):  # some models run one layer at several places
        again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = again


def loss_chunk(device: torch.device, *, full: bool) -> int:
    """Return the positions whose logits exist at once. full: all weights learn."""
    return WIDE_CHUNK if full and device.type == "cuda" else LOSS_CHUNK


class PackRunner:
    """A decoder that runs examples one behind the other, none of which sees another."""

    def __init__(self, decoder: Decoder, *, autocast: torch.dtype | None, chunk: int) -> None:
        self.decoder, self.autocast, self.chunk = decoder, autocast, chunk
        self.device = next(decoder.parameters()).device

    def normed(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor, list[int]]:
        """Return the output of the final norm in front of every counted token [N, M], these tokens [N], and how many of
        them each example has."""
        tokens = [np.fromiter(each.tokens, np.int64, len(each.tokens)) for each in examples]
        counted = [np.fromiter(each.counted, np.bool_, len(each.counted)) for each in examples]
        at_N = np.concatenate([each[1:] for each in counted]).nonzero()[0]
        targets_N = np.concatenate([each[1:] for each in tokens])[at_N]
        lengths = [len(each) - 1 for each in tokens]  # the last token is a target alone
        inputs = np.concatenate([each[:-1] for each in tokens]), _positions(lengths)
        tokens_T, positions_T, at, targets = self._sent(*inputs, at_N, targets_N)
        normed_NM = self.decoder.normed(self._run(tokens_T, positions_T, lengths).at(at))
        return normed_NM, targets, [int(each.sum()) for each in counted]

    def hidden(self, texts: Sequence[Sequence[int]]) -> Hidden:
        """Return the layers' output for texts one behind the other."""
        lengths = [len(each) for each in texts]
        tokens_T = np.fromiter(chain.from_iterable(texts), np.int64, sum(lengths))
        sent_T, positions_T = self._sent(tokens_T, _positions(lengths))
        return self._run(sent_T, positions_T, lengths)

    def _run(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int]) -> Hidden:
        states: Any = packed_states(self.decoder.spec, lengths, self.decoder.dtype, self.device)
        found: Hidden = self.decoder(tokens_T, positions_T, states)
        return found

    def _sent(self, *numbers: np.ndarray) -> tuple[Tensor, ...]:
        """Return int64 numbers on the device. They go there in one copy, for which the host does not wait."""
        joined = torch.from_numpy(np.concatenate(numbers))
        if self.device.type == "cuda":
            joined = joined.pin_memory().to(self.device, non_blocking=True)
        return joined.split([len(each) for each in numbers])

    def context(self) -> torch.autocast:
        """Return the context in which products run."""
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    def nats(self, examples: Sequence[Example]) -> Tensor:
        """Return the sum of the negative log-likelihoods of all counted tokens."""
        with self.context():
            x_NM, targets_N, _ = self.normed(examples)
            decoder, head = self.decoder, self._head()
            return cross_entropy_sum(x_NM, targets_N, decoder.scored, head, self.chunk, decoder.scoring_matrix)

    def logprobs(self, examples: Sequence[Example]) -> Tensor:
        """Return the log-probability of the counted tokens of each example: [D], float32 or wider. Logits are made a
        part of the tokens at a time, and again in the backward pass."""
        with self.context():
            x_NM, targets_N, counts = self.normed(examples)
            parts = zip(x_NM.split(self.chunk), targets_N.split(self.chunk), strict=True)
            found_N = torch.cat([checkpoint(self._of_targets, *part, use_reentrant=False) for part in parts])
        return torch.stack([each.sum() for each in found_N.split(counts)])

    def _of_targets(self, x_CM: Tensor, targets_C: Tensor) -> Tensor:
        logits_CV = self.decoder.scored(x_CM)
        logits_CV = logits_CV.float() if logits_CV.itemsize < 4 else logits_CV
        return logits_CV.log_softmax(-1).gather(1, targets_C[:, None])[:, 0]

    def _head(self) -> list[nn.Parameter]:
        own = [each for each in self.decoder.unembed.parameters() if each.requires_grad]
        form = self.decoder.unembed.matrix
        form = form.inner if isinstance(form, MultipliedWeight) else form
        thin = form.thin.values() if isinstance(form, LearntWeight) else ()
        return [*own, *(parameter for each in thin for parameter in each.parameters())]


def _positions(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([np.arange(length) for length in lengths])


class NextTokens:
    """The nats of all counted tokens."""

    def __init__(self, runs: PackRunner, examples: Sequence[Example]) -> None:
        self.runs, self.examples = runs, examples
        self._counted = [sum(each.counted) for each in examples]

    def weight(self, pack: Sequence[int]) -> int:
        return sum(self._counted[index] for index in pack)

    def tokens(self, pack: Sequence[int]) -> int:
        return sum(len(self.examples[index].tokens) for index in pack)

    def sum(self, pack: Sequence[int]) -> Tensor:
        return self.runs.nats([self.examples[index] for index in pack])

"""A model in float32 and plain torch, read window by window over its whole vocabulary.

What engines round besides what is to be measured (a dtype of 16 bits, a kernel's sums) is left out, and a divergence is
that of the whole distributions, where `compare` has a lower bound.

Legend:
    T  tokens of a window
    V  vocabulary
    W  windows
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.bench.quality.documents import TextFile
from ridgeline.bench.quality.likelihood import prefix_token
from ridgeline.core.errors import InvalidConfig
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import DenseCausal
from ridgeline.models.config import ModelConfig
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.training.objective import training_decoder
from ridgeline.weights.loader import load_weights, read_model_config


@dataclass(frozen=True)
class DenseModel:
    """A model's folder, what it says, and its tokenizer."""

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    device: torch.device

    @classmethod
    def of(cls, folder: Path, device: torch.device) -> DenseModel:
        return cls(folder, read_model_config(folder), Tokenizer.from_folder(folder), device)

    @property
    def prefix(self) -> int:
        """The token before a text."""
        return prefix_token(self.config, self.tokenizer)

    def decoder(self) -> Decoder:
        """Return the decoder in float32, newly loaded. Raise ModelLoadError."""
        decoder = training_decoder(self.config.spec, torch.float32, self.device)
        load_weights(decoder, self.folder, self.config.weights)
        return decoder.requires_grad_(False)

    def windows(self, files: Sequence[TextFile], context: int | None, most: int) -> Tensor:
        """Return windows of `context` + 1 tokens, of which all but the last are inputs: int64 [W, context + 1].

        Documents follow each other behind the prefix token. Raise InvalidConfig for a context that the model has not,
        or if there is not one window.
        """
        longest = self.config.spec.max_position_embeddings
        context = min(1024, longest) if context is None else context
        if not 2 <= context <= longest:
            raise InvalidConfig(f"the context is {context} tokens; this model's allows 2 to {longest}.")
        ids: list[int] = []
        for document in (document for file in files for document in file.documents):
            ids += [self.prefix, *self.tokenizer.encode(document, add_special_tokens=False)]
            if len(ids) > most * context:
                break
        count = min(most, (len(ids) - 1) // context)
        if count < 1:
            raise InvalidConfig(f"the texts have {len(ids)} tokens, and a window takes {context + 1}; name more.")
        rows = [ids[start : start + context + 1] for start in range(0, count * context, context)]
        return torch.tensor(rows, device=self.device)


@torch.inference_mode()
def logprobs(decoder: Decoder, tokens_T1: Tensor, state: DenseCausal | None = None) -> Tensor:
    """Return the log-probabilities of what follows each token of a window but the last, float32 [T, V]."""
    positions_T = torch.arange(len(tokens_T1) - 1, device=tokens_T1.device)
    hidden = decoder(tokens_T1[:-1], positions_T, state or DenseCausal(1))
    return decoder.logits(hidden).float().log_softmax(1)


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
        kl_T = (baseline_TV.exp() * (baseline_TV - found_TV)).nan_to_num(0.0, posinf=torch.inf).sum(1)
        return cls(nats_T, kl_T, baseline_TV.argmax(1) == found_TV.argmax(1))

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

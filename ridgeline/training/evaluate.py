"""Bits per byte of text that a model has not seen, which compare between tokenizers and with compressors.

Every document is read from its start behind the separator, in windows that overlap. A token is scored once, in the
first window that reaches it, with at least `window - stride` tokens before it wherever the document has them. The sum
of -log2 p over all tokens is divided by the bytes of the text. The end of a document is not scored.

Legend:
    B  windows, which are sequences here
    S  tokens of the longest window
    N  positions, B * S
    M  model width
    V  vocabulary
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from ridgeline.layers.decoder import Decoder
from ridgeline.layers.dense import dense_states
from ridgeline.text.windows import windows as cut
from ridgeline.training.tokenizer import SEPARATOR_ID, encode_documents


@dataclass(frozen=True)
class Information:
    """The information in `num_bytes` bytes of text, written as `num_tokens` tokens."""

    bits: float
    num_bytes: int
    num_tokens: int

    @property
    def bits_per_byte(self) -> float:
        return self.bits / self.num_bytes


@dataclass(frozen=True)
class ScoredWindow:
    """The inputs and targets (the tokens one later) of a window. An earlier one scored the targets before `first`."""

    inputs: np.ndarray
    targets: np.ndarray
    first: int


def bits_per_byte(
    decoder: Decoder, tokenizer: Tokenizer, texts: Sequence[str], *, window: int, stride: int, batch_size: int = 16
) -> Information:
    """Score `texts` with the decoder in its own dtype, with log-probabilities in float32 and their sum in float64.

    Raise ValueError if the tokenizer does not give a text back exactly, because bits of other bytes would be counted.
    """
    documents = []
    for text, ids in zip(texts, encode_documents(tokenizer, texts), strict=True):
        if tokenizer.decode(ids.tolist(), skip_special_tokens=False) != text:
            raise ValueError("the tokenizer does not reproduce a text; its bits per byte would mean nothing.")
        documents.append(ids)
    pending = sorted((w for ids in documents for w in windows(ids, window, stride)), key=lambda w: len(w.inputs))
    device = next(decoder.parameters()).device
    nats = sum(_nats(decoder, pending[i : i + batch_size], device) for i in range(0, len(pending), batch_size))
    num_bytes = sum(len(text.encode()) for text in texts)
    return Information(nats / float(np.log(2)), num_bytes, sum(map(len, documents)))


def windows(ids: np.ndarray, window: int, stride: int) -> Iterator[ScoredWindow]:
    """Cut one document into windows of at most `window` inputs. Together they score each of `ids` exactly once."""
    tokens = np.concatenate(([SEPARATOR_ID], ids)).astype(np.int64)
    for start, scored, end in cut(len(tokens), window + 1, stride):  # a window's last token is a target only
        yield ScoredWindow(tokens[start : end - 1], tokens[start + 1 : end], scored - start - 1)


@torch.inference_mode()
def _nats(decoder: Decoder, batch: Sequence[ScoredWindow], device: torch.device) -> float:
    """Return the sum over what the windows score. Padding comes after a window's tokens, so causality hides it from
    them."""
    length = max(len(w.inputs) for w in batch)
    inputs_BS = torch.zeros(len(batch), length, dtype=torch.int64)
    targets_BS = torch.full((len(batch), length), -100, dtype=torch.int64)
    for row, w in enumerate(batch):
        inputs_BS[row, : len(w.inputs)] = torch.from_numpy(w.inputs)
        targets_BS[row, w.first : len(w.targets)] = torch.from_numpy(w.targets[w.first :])
    positions_N = torch.arange(length, device=device).repeat(len(batch))
    state = dense_states(decoder.spec, len(batch), length, decoder.embed.weight.dtype, device)
    ends_B = torch.tensor([len(w.inputs) for w in batch], device=device)
    state.live_T = positions_N < ends_B.repeat_interleave(length)  # so that experts do not count padding
    hidden_NM = decoder(inputs_BS.flatten().to(device), positions_N, state)
    targets_N = targets_BS.flatten().to(device)
    return float(_cross_entropy(decoder.logits(hidden_NM), targets_N))


def _cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    losses_N = F.cross_entropy(logits_NV.float(), targets_N, ignore_index=-100, reduction="none")
    return losses_N.double().sum()


def xz_bits_per_byte(texts: Iterable[str]) -> float:
    """Return the bits per byte of the texts as one stream through `xz -9e`, a general compressor."""
    content = "".join(texts).encode()
    return 8 * len(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)) / len(content)

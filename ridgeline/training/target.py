"""The frozen model for which heads are trained: what they read of it, and text that it writes itself.

Legend:
    T  tokens of all sequences, B * S
    B  sequences
    S  tokens per sequence
    L  tokens that the cache has room for; likeliest tokens of a trace
    H  query heads
    G  key/value heads
    D  head width
    M  model width
    X  features of a token: M for each layer that is tapped; elsewhere the columns of a fused projection
    V  vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import AttentionSpec, ModelSpec
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.layers.decoder import Decoder, Taps
from ridgeline.layers.dense import DenseCausal
from ridgeline.layers.heads import Heads
from ridgeline.training.objective import training_decoder
from ridgeline.weights.loader import load_weights, read_model_config

LIKELY = 32  # tokens of the target's distribution that training keeps; the others together are far less than its error


def read_target(folder: Path, device: torch.device) -> Decoder:
    """Return the model of a folder in float32 with plain torch ops, none of whose parameters are trained. Raise
    ModelLoadError, and InvalidConfig for a model with layers that heads cannot follow."""
    config = read_model_config(folder)
    if not config.spec.scores or not all(_plain(config.spec)):
        raise InvalidConfig(
            f"{folder} has layers without attention, with windows, slopes, sinks or capped scores; heads are trained "
            "for models of plain attention alone."
        )
    decoder = training_decoder(config.spec, torch.float32, device)
    load_weights(decoder, folder, config.weights)
    decoder.requires_grad_(False)
    return decoder


def _plain(spec: ModelSpec) -> list[bool]:
    mixers = [layer.mixer for layer in spec.layers]
    return [
        isinstance(mixer, AttentionSpec) and not (mixer.window or mixer.softcap or mixer.alibi or mixer.sinks)
        for mixer in mixers
    ]


@dataclass(frozen=True)
class Trace:
    """The target's reading of sequences: the outputs of the tapped layers side by side, what its final norm returns,
    the tokens that it deems likeliest as the next ones, and their probabilities."""

    tokens_BS: Tensor
    features_BSX: Tensor
    normed_BSM: Tensor
    likely_BSL: Tensor
    probability_BSL: Tensor

    def rows(self, index: Tensor | slice) -> Trace:
        """Return the trace of some sequences."""
        return Trace(*(getattr(self, each.name)[index] for each in fields(self)))

    def upto(self, length: int) -> Trace:
        """Return the trace of the first tokens of every sequence."""
        return Trace(*(getattr(self, each.name)[:, :length] for each in fields(self)))

    def stored(self) -> Trace:
        """Return the trace in as few bytes as training needs."""
        return Trace(
            self.tokens_BS.to(torch.int16),
            self.features_BSX.bfloat16(),
            self.normed_BSM.bfloat16(),
            self.likely_BSL.to(torch.int16),
            self.probability_BSL.bfloat16(),
        )

    def restored(self) -> Trace:
        """Return the trace as it was before it was stored, but for rounding."""
        return Trace(
            self.tokens_BS.long() & 0xFFFF,
            self.features_BSX.float(),
            self.normed_BSM.float(),
            self.likely_BSL.long() & 0xFFFF,
            self.probability_BSL.float(),
        )


@torch.no_grad()
def traced(decoder: Decoder, tokens_BS: Tensor, taps: Sequence[int] = (), *, bf16: bool = False) -> Trace:
    """Run the target over sequences from their beginning. With `bf16` its products are rounded, as in training."""
    batch, length = tokens_BS.shape
    positions_T = torch.arange(length, device=tokens_BS.device).repeat(batch)
    found = Taps(taps, [])
    with torch.autocast(tokens_BS.device.type, torch.bfloat16, enabled=bf16):
        hidden = decoder(tokens_BS.flatten(), positions_T, DenseCausal(batch), taps=found)
        normed_TM = decoder.normed(hidden).float()
        logits_TV = decoder.scored(normed_TM).float()
    likely = logits_TV.topk(min(LIKELY, logits_TV.shape[1]))
    probability_TL = (likely.values - logits_TV.logsumexp(-1, keepdim=True)).exp()
    features_TX = torch.cat(found.found, -1).float() if taps else normed_TM[:, :0]
    parts = (features_TX, normed_TM, likely.indices, probability_TL)
    return Trace(tokens_BS, *(part.unflatten(0, (batch, length)) for part in parts))


class CachedLayer:
    """The keys and values of one layer, to which each call adds those of the next tokens of every sequence."""

    def __init__(self, batch: int, length: int) -> None:
        self._batch, self._length, self._used = batch, length, 0
        self._memory: tuple[Tensor, Tensor] | None = None

    def attend(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, buffer: Rounded | None = None) -> Tensor:
        """Attend as `layers.attention.Attends` does, to the tokens of earlier calls too."""
        spec = heads.spec
        q_BHSD, k_BGSD, v_BGSD = (
            x.unflatten(0, (self._batch, -1)).transpose(1, 2) for x in heads.split(qkv_TX, positions_T)
        )
        if self._memory is None:
            shape = (self._batch, spec.num_kv_heads, self._length)
            self._memory = k_BGSD.new_empty(*shape, k_BGSD.shape[-1]), v_BGSD.new_empty(*shape, v_BGSD.shape[-1])
        start, end = self._used, self._used + q_BHSD.shape[2]
        for memory_BGLD, new_BGSD in zip(self._memory, (k_BGSD, v_BGSD), strict=True):
            memory_BGLD[:, :, start:end] = new_BGSD
        self._used = end
        k_BGLD, v_BGLD = (memory_BGLD[:, :, :end] for memory_BGLD in self._memory)
        out_BHSD = F.scaled_dot_product_attention(
            q_BHSD,
            k_BGLD,
            v_BGLD,
            is_causal=start == 0,  # else there is one query, which sees all
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )
        return out_BHSD.transpose(1, 2).flatten(0, 1).flatten(1)


class Cache:
    """The caches of all layers, which a decoder takes as its states: first for whole prompts, then for one token of
    each sequence a call."""

    live_T: Tensor | None = None

    def __init__(self, layers: int, batch: int, length: int) -> None:
        self._layers = [CachedLayer(batch, length) for _ in range(layers)]

    def __getitem__(self, layer: int) -> CachedLayer:
        return self._layers[layer]


@torch.inference_mode()
def continued(
    decoder: Decoder, prompts_BS: Tensor, count: int, *, temperature: float = 0.0, seed: int = 0, bf16: bool = False
) -> Tensor:
    """Return the prompts with `count` tokens more, which the target drew; at temperature 0 the likeliest ones."""
    batch, length = prompts_BS.shape
    generator = torch.Generator(prompts_BS.device).manual_seed(seed)
    cache = Cache(len(decoder.layers), batch, length + count)
    known, tokens_BS, begin = [prompts_BS], prompts_BS, 0
    with torch.autocast(prompts_BS.device.type, torch.bfloat16, enabled=bf16):
        for _ in range(count):
            end = begin + tokens_BS.shape[1]
            positions_T = torch.arange(begin, end, device=tokens_BS.device).repeat(batch)
            hidden = decoder(tokens_BS.flatten(), positions_T, cache)
            last_T = torch.arange(1, batch + 1, device=tokens_BS.device) * (end - begin) - 1
            logits_BV = decoder.logits(hidden.at(last_T)).float()
            begin = end
            if temperature:
                drawn_BS = torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)
            else:
                drawn_BS = logits_BV.argmax(-1, keepdim=True)
            tokens_BS = drawn_BS
            known.append(tokens_BS)
    return torch.cat(known, 1)

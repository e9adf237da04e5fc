"""The common parts of models whose decoder attends to the output of an encoder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import (
    ABSENT,
    AttentionSpec,
    CrossAttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
)
from ridgeline.core.specs.pooling import PoolingSpec
from ridgeline.models.config import Config, token_ids

Layers = tuple[LayerSpec, ...]


def decoder_layers(attentions: Iterable[AttentionSpec], across: AttentionSpec, mlp: MLPSpec, like: LayerSpec) -> Layers:
    """Return a decoder's layers. Each of the checkpoint's is two of ours: self-attention, then attention to the
    encoder's output with the feed-forward. like: a layer with their norms."""
    second = replace(like, mixer=CrossAttentionSpec(attention=across), feed_forward=mlp)
    return tuple(layer for own in attentions for layer in (replace(like, mixer=own, feed_forward=ABSENT), second))


def encoder_of(spec: ModelSpec, layers: Layers, final_norm: NormSpec) -> ModelSpec:
    """Return the encoder beside a decoder without one, which has the same tables."""
    return ModelSpec(
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        layers=layers,
        final_norm=final_norm,
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=True,
        learned_positions=spec.learned_positions,
        position_offset=spec.position_offset,
        embedding_multiplier=spec.embedding_multiplier,
        embed_norm=spec.embed_norm,
        pooling=PoolingSpec(kind="mean", task="embed", width=spec.hidden_size),
    )


def started(spec: ModelSpec, config: Config, generation: Config) -> ModelSpec:
    """Return a model with an encoder with the tokens that its outputs follow: the decoder's start, and the one that is
    forced behind it, if there is one."""
    if spec.encoder is None:
        return spec

    def first(name: str) -> tuple[int, ...]:
        return token_ids(generation, name)[:1] or token_ids(config, name)[:1]

    start = first("decoder_start_token_id") or first("bos_token_id")
    if not start:
        raise ModelLoadError(
            "config.json has no decoder_start_token_id; a model with an encoder cannot begin without it."
        )
    found = (*start, *first("forced_bos_token_id"))
    if max(found) >= spec.vocab_size:
        raise ModelLoadError(f"outputs begin with token id {max(found)}, and the vocabulary has {spec.vocab_size}.")
    return replace(spec, decoder_start=found)

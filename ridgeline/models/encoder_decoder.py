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
    OutputRules,
)
from ridgeline.core.specs.pooling import PoolingSpec
from ridgeline.models.config import Config, token_ids, wrong

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
        sines=spec.sines,
        embedding_multiplier=spec.embedding_multiplier,
        embed_norm=spec.embed_norm,
        pooling=PoolingSpec(kind="mean", task="embed", width=spec.hidden_size),
    )


def started(spec: ModelSpec, config: Config, generation: Config) -> ModelSpec:
    """Return a model with an encoder with the tokens that its outputs follow: the decoder's start, and the one that is
    forced behind it, if there is one. Outputs get the rules of generation_config.json, or else of config.json."""
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
    last = token_ids(generation, "forced_eos_token_id") or token_ids(config, "forced_eos_token_id")
    bad = _bad_words(generation) or _bad_words(config)
    highest = max((*found, *last, *(token for word in bad for token in word)))
    if highest >= spec.vocab_size:
        raise ModelLoadError(
            f"outputs begin, end or do without token {highest}, and the vocabulary has {spec.vocab_size}."
        )
    return replace(spec, decoder_start=found, output_rules=OutputRules(bad, last))


def _bad_words(config: Config) -> tuple[tuple[int, ...], ...]:
    words = config.raw("bad_words_ids")
    if words is not None and not (isinstance(words, list) and all(isinstance(word, list) for word in words)):
        raise wrong("bad_words_ids", words, "a list of lists of token ids")
    each = [[token_ids(Config({"bad_words_ids": i}), "bad_words_ids") for i in word] for word in words or ()]
    if not all(word and all(len(ids) == 1 for ids in word) for word in each):
        raise wrong("bad_words_ids", words, "a list of lists of token ids")
    return tuple(tuple(ids[0] for ids in word) for word in each)

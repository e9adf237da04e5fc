"""Whisper: An encoder of sounds, and a decoder that writes what is said, in the language or in English."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ridgeline.core.specs.model import LayerSpec, ModelSpec, NormSpec, Source, WeightMap
from ridgeline.core.specs.pooling import PoolingSpec
from ridgeline.core.specs.stem import TAPS, SoundStem
from ridgeline.models.bart import layer_weights, side_attention, side_mlp
from ridgeline.models.config import Config, wrong
from ridgeline.models.encoder_decoder import decoder_layers
from ridgeline.models.names import named

DEFAULTS = {
    "vocab_size": 51865,
    "num_mel_bins": 80,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "activation_function": "gelu",
    "d_model": 384,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "tie_word_embeddings": True,
}
NORM = NormSpec(kind="layer", eps=1e-5)  # torch's own
MOST_BANDS = 256


class Whisper:
    name: ClassVar[str] = "WhisperForConditionalGeneration"

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        width, bands = values.integer("d_model"), values.integer("num_mel_bins")
        if bands > MOST_BANDS:
            raise wrong("num_mel_bins", bands, f"at most {MOST_BANDS}")
        if values.boolean("scale_embedding"):
            raise wrong("scale_embedding", True, "false, as in every Whisper")
        if values.raw("activation_function") != "gelu":
            raise wrong("activation_function", values.raw("activation_function"), "gelu, as in every Whisper")
        attention = side_attention(values, "decoder")
        like = LayerSpec(mixer=attention, feed_forward=side_mlp(values, "decoder"), norm=NORM)
        count, positions = values.integer("decoder_layers"), values.integer("max_target_positions")
        own = replace(side_attention(values, "encoder"), bidirectional=True)
        layer = replace(like, mixer=own, feed_forward=side_mlp(values, "encoder"))
        stem = SoundStem(bands=bands, positions=values.integer("max_source_positions"))
        encoder = ModelSpec(
            architecture=cls.name,
            vocab_size=values.integer("vocab_size"),
            hidden_size=width,
            layers=(layer,) * values.integer("encoder_layers"),
            final_norm=NORM,
            max_position_embeddings=stem.positions,
            tie_word_embeddings=True,
            stem=stem,
            pooling=PoolingSpec(kind="mean", task="embed", width=width),
        )
        return ModelSpec(
            architecture=cls.name,
            vocab_size=values.integer("vocab_size"),
            hidden_size=width,
            layers=decoder_layers([attention] * count, attention, side_mlp(values, "decoder"), like),
            final_norm=NORM,
            max_position_embeddings=positions,
            tie_word_embeddings=values.boolean("tie_word_embeddings"),
            learned_positions=positions,
            encoder=encoder,
            unused=("proj_out.",) if values.boolean("tie_word_embeddings") else (),
        )

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        assert spec.encoder is not None
        found: WeightMap = {"embed.weight": (Source(name="model.decoder.embed_tokens.weight"),)}
        if not spec.tie_word_embeddings:
            found["unembed.weight"] = (Source(name="proj_out.weight"),)
        found |= named("", "model.decoder", {"position_embed": "embed_positions"})
        found |= named("", "model.decoder", {"final_norm": "layer_norm"}, bias=True)
        found |= layer_weights(spec, "norm")
        found |= named("encoder", "model.encoder", {"final_norm": "layer_norm"}, bias=True)
        for conv in ("conv1", "conv2"):
            stored = f"model.encoder.{conv}"
            found[f"encoder.stem.{conv}.weight"] = (Source(name=f"{stored}.weight", kernel=(TAPS,)),)
            found[f"encoder.stem.{conv}.bias"] = (Source(name=f"{stored}.bias"),)
        found["encoder.stem.positions"] = (Source(name="model.encoder.embed_positions.weight"),)
        return {name: tuple(biasless(each, spec.hidden_size) for each in sources) for name, sources in found.items()}


def biasless(source: Source, width: int) -> Source:
    """Return the source with zeros in place of a bias of keys, which no checkpoint has: scores would not change."""
    return replace(source, zeros=width) if source.name.endswith("k_proj.bias") else source

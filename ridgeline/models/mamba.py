"""Mamba and Falcon-Mamba: selective state spaces in every layer, without attention and without feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.mamba import MambaSpec
from ridgeline.core.specs.model import ABSENT, LayerSpec, ModelSpec, NormSpec, Source, WeightMap
from ridgeline.models.config import Config
from ridgeline.models.names import mamba
from ridgeline.models.selective import CONTEXT, conv_length, dt_rank, expanded, need_silu

DEFAULTS = {
    "vocab_size": 50280,
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "hidden_act": "silu",
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "layer_norm_epsilon": 1e-5,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
}


class Mamba:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _spec("MambaForCausalLM", Config(config, DEFAULTS))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = backbone(spec)
        for index, layer in enumerate(spec.layers):
            assert isinstance(layer.mixer, MambaSpec)
            found |= mamba(f"layers.{index}.mixer", f"backbone.layers.{index}.mixer", layer.mixer)
        return found


class FalconMamba:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, {**DEFAULTS, "mixer_rms_eps": 1e-6})
        return _spec("FalconMambaForCausalLM", values, NormSpec(eps=values.number("mixer_rms_eps")))

    weights = staticmethod(Mamba.weights)


def _spec(architecture: str, config: Config, inside: NormSpec | None = None) -> ModelSpec:
    need_silu(config, "hidden_act")
    mixer = MambaSpec(
        channels=config.integer("intermediate_size") if "intermediate_size" in config else expanded(config, "expand"),
        state_width=config.integer("state_size"),
        rank=dt_rank(config, "time_step_rank"),
        length=conv_length(config, "conv_kernel"),
        bias=config.boolean("use_bias"),
        conv_bias=config.boolean("use_conv_bias"),
        norm=inside,
        norm_weights=False,
    )
    norm = NormSpec(eps=config.number("layer_norm_epsilon"))
    return of_one_mixer(architecture, config, LayerSpec(mixer=mixer, feed_forward=ABSENT, norm=norm))


def of_one_mixer(architecture: str, config: Config, layer: LayerSpec) -> ModelSpec:
    """Return a model all of whose layers are this one."""
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        layers=(layer,) * config.integer("num_hidden_layers"),
        final_norm=layer.norm,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=config.boolean("tie_word_embeddings"),
    )


def backbone(spec: ModelSpec) -> WeightMap:
    """Return the weight map of what lies outside of the parts of layers, where a layer has one part and one norm."""
    found: WeightMap = {
        "embed.weight": (Source(name="backbone.embeddings.weight"),),
        "final_norm.weight": (Source(name="backbone.norm_f.weight"),),
    }
    if not spec.tie_word_embeddings:
        found["unembed.weight"] = (Source(name="lm_head.weight"),)
    for index, layer in enumerate(spec.layers):
        part = "feed_forward" if layer.mixer is ABSENT else "mixer"
        found[f"layers.{index}.{part}_norm.weight"] = (Source(name=f"backbone.layers.{index}.norm.weight"),)
    return found

"""Llama 4 (text): Llama with experts in every layer or every other one, and no positions in every fourth layer.

The other layers attend within chunks of `attention_chunk_size` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import Growth, LayerSpec, MLPSpec, ModelSpec, NormSpec, Source, WeightMap
from ridgeline.models.config import Config, wrong
from ridgeline.models.experts import routing, with_experts
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Names, decoder_weights, llama_like
from ridgeline.models.wrapped import TOWERS, text_config, text_weights

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
}
LAYER_TYPES = ("chunked_attention", "full_attention")
NAMES = Names(
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj", interleaved=True
)
_TOWERS = (*TOWERS, "vision_model.")


class Llama4:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _spec("Llama4ForCausalLM", config)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = decoder_weights(spec, NAMES)
        for index, layer in enumerate(spec.layers):
            if isinstance(layer.feed_forward, ExpertsSpec):
                found |= _experts(f"layers.{index}.feed_forward", f"model.layers.{index}.feed_forward")
        return found


class Llama4Multimodal:
    """The text model of a checkpoint that also has a tower for images."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return replace(_spec("Llama4ForConditionalGeneration", text_config(config)), unused=_TOWERS)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        return text_weights(Llama4.weights(spec), whole=True)


def _spec(architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    values = Config(config, DEFAULTS)
    count = values.integer("num_hidden_layers")
    dense = llama_like(
        architecture,
        values.changed(intermediate_size=values.integer("intermediate_size_mlp")),
        attention_bias=values.boolean("attention_bias"),
    )
    rotates = _flags(values, count)
    layers = tuple(_layer(layer, values, has) for layer, has in zip(dense.layers, rotates, strict=True))
    spec = with_experts(replace(dense, layers=layers), dict.fromkeys(_sparse(values, count), _mixture(values)))
    types = values.layer_types(count, LAYER_TYPES) or [LAYER_TYPES[0] if has else LAYER_TYPES[1] for has in rotates]
    if LAYER_TYPES[0] not in types or "attention_chunk_size" not in values:
        return spec
    chunk = values.integer("attention_chunk_size")
    if chunk >= spec.max_position_embeddings:  # of which there is one
        return spec
    inside = (
        replace(layer, mixer=replace(layer.attention, chunk=chunk)) if kind == LAYER_TYPES[0] else layer
        for layer, kind in zip(spec.layers, types, strict=True)
    )
    return replace(spec, layers=tuple(inside))


def _layer(layer: LayerSpec, config: Config, rotates: bool) -> LayerSpec:
    """Return the layer with or without positions."""
    if rotates:
        # The norm comes behind the rotation, which changes no length: without weights that is the same
        norm = NormSpec(eps=config.number("rms_norm_eps"), weightless=True)
        qk_norm = norm if config.boolean("use_qk_norm") else None
        return replace(layer, mixer=replace(layer.attention, qk_norm=qk_norm))
    growth = None
    if config.raw("attn_temperature_tuning"):  # some files have a number
        growth = Growth(config.number("attn_scale"), config.integer("floor_scale"), 1)
    return replace(layer, mixer=replace(layer.attention, rope=None, growth=growth))


def _flags(config: Config, count: int) -> list[bool]:
    """Return which layers rotate."""
    flags, every = config.raw("no_rope_layers"), config.integer("no_rope_layer_interval")
    if not flags:
        return [(layer + 1) % every != 0 for layer in range(count)]
    if not isinstance(flags, list) or len(flags) != count or any(flag not in (0, 1) for flag in flags):
        raise wrong("no_rope_layers", flags, f"{count} entries, each 0 or 1")
    return [bool(flag) for flag in flags]


def _sparse(config: Config, count: int) -> list[int]:
    """Return the layers that have experts."""
    layers, step = config.raw("moe_layers"), config.integer("interleave_moe_layer_step")
    if layers is None:
        return list(range(step - 1, count, step))
    if not isinstance(layers, list) or any(type(layer) is not int or not 0 <= layer < count for layer in layers):
        raise wrong("moe_layers", layers, f"a list of layers from 0 to {count - 1}")
    return layers


def _mixture(config: Config) -> ExpertsSpec:
    how = routing(config, score="sigmoid")
    if how.top_k != 1:
        raise wrong("num_experts_per_tok", how.top_k, "1, as in every model of this family")
    activation, size = config.activation("hidden_act"), config.integer("intermediate_size")
    shared = MLPSpec(intermediate_size=size, activation=activation)
    return ExpertsSpec(routing=how, intermediate_size=size, activation=activation, shared=shared, weighs_inputs=True)


def _experts(ours: str, theirs: str) -> WeightMap:
    def stacked(name: str) -> tuple[Source]:
        return (Source(name=f"{theirs}.experts.{name}", stacked=True, transpose=True),)

    shared = f"{theirs}.shared_expert"
    return {
        f"{ours}.router": (Source(name=f"{theirs}.router.weight"),),
        f"{ours}.gate_up.weight": stacked("gate_up_proj"),
        f"{ours}.down.weight": stacked("down_proj"),
        f"{ours}.shared.gate_up.weight": tuple(Source(name=f"{shared}.{part}_proj.weight") for part in ("gate", "up")),
        f"{ours}.shared.down.weight": (Source(name=f"{shared}.down_proj.weight"),),
    }

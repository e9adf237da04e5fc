"""Bamba: Mamba-2 in most layers, attention that rotates half of each head in the others, Llama's feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.mamba import Mamba2Spec
from ridgeline.core.specs.model import LayerSpec, ModelSpec, WeightMap
from ridgeline.models.config import Config, wrong
from ridgeline.models.llama import llama_like
from ridgeline.models.names import mamba2, named, outer
from ridgeline.models.selective import expanded, mamba2_of, need_silu

DEFAULTS = {
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 262144,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}


class Bamba:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        need_silu(values, "hidden_act")
        bias = values.boolean("attention_bias")
        dense = llama_like("BambaForCausalLM", values, attention_bias=bias, mlp_bias=values.boolean("mlp_bias"))
        attends = _attention_layers(values)
        return with_mamba2(dense, values, [index not in attends for index in range(len(dense.layers))])

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = outer(spec, "final_layernorm")
        for index, layer in enumerate(spec.layers):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            found |= named(ours, theirs, {"mixer_norm": "input_layernorm", "feed_forward_norm": "pre_ff_layernorm"})
            found |= mixer_weights(ours, theirs, layer)
            modules = {"gate_up": "gate_proj up_proj", "down": "down_proj"}
            found |= named(f"{ours}.feed_forward", f"{theirs}.feed_forward", modules, bias=layer.mlp.bias)
        return found


def with_mamba2(dense: ModelSpec, config: Config, selects: list[bool]) -> ModelSpec:
    """Return the model with Mamba-2 in place of attention in the layers that `selects` names."""
    mixer = mamba2_of(
        config,
        dense.final_norm,
        inner=expanded(config, "mamba_expand"),
        bias=config.boolean("mamba_proj_bias"),
        limits=config.bounds("time_step_limit"),
    )
    layers = (
        replace(layer, mixer=mixer) if chosen else layer for layer, chosen in zip(dense.layers, selects, strict=True)
    )
    return replace(dense, layers=tuple(layers))


def mixer_weights(ours: str, theirs: str, layer: LayerSpec) -> WeightMap:
    """Return the weight map of a layer's mixer, which is attention or Mamba-2."""
    mixer = layer.mixer
    if isinstance(mixer, Mamba2Spec):
        found = mamba2(f"{ours}.mixer", f"{theirs}.mamba", mixer)
        return found | named(f"{ours}.mixer", f"{theirs}.mamba", {"mamba_in": "in_proj"}, bias=mixer.bias)
    found = named(
        f"{ours}.mixer", f"{theirs}.self_attn", {"qkv": "q_proj k_proj v_proj"}, bias=layer.attention.qkv_bias
    )
    return found | named(f"{ours}.mixer", f"{theirs}.self_attn", {"out": "o_proj"}, bias=layer.attention.out_bias)


def _attention_layers(config: Config) -> list[int]:
    """Return the numbers of the layers with attention; there may be none."""
    found = config.raw("attn_layer_indices")
    found = [] if found is None else found
    count = config.integer("num_hidden_layers")
    good = isinstance(found, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in found)
    if not good or any(not 0 <= number < count for number in found):
        raise wrong("attn_layer_indices", found, f"a list of numbers of layers, from 0 to {count - 1}")
    return list(found)

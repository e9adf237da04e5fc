"""Jamba: Mamba with norms inside, attention without positions in some layers, experts in every other one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.mamba import MambaSpec
from ridgeline.core.specs.model import (
    AttentionSpec,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    WeightMap,
)
from ridgeline.models.config import Config, head_width, wrong
from ridgeline.models.experts import ExpertNames, layer_experts, routing, with_experts
from ridgeline.models.names import mamba, named, outer
from ridgeline.models.selective import conv_length, dt_rank, expanded, need_silu

DEFAULTS = {
    "vocab_size": 65536,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
NAMES = ExpertNames(router="feed_forward.router", expert="feed_forward.experts.{}")


class Jamba:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        need_silu(values, "hidden_act")
        count, norm = values.integer("num_hidden_layers"), NormSpec(eps=values.number("rms_norm_eps"))
        attention, selective = _attention(values), _mamba(values, norm)
        attends = _every(values, "attn_layer_period", "attn_layer_offset")
        mixers: list[MixerSpec] = [attention if layer in attends else selective for layer in range(count)]
        mlp = MLPSpec(intermediate_size=values.integer("intermediate_size"))
        dense = ModelSpec(
            architecture="JambaForCausalLM",
            vocab_size=values.integer("vocab_size"),
            hidden_size=values.integer("hidden_size"),
            layers=tuple(LayerSpec(mixer=mixer, feed_forward=mlp, norm=norm) for mixer in mixers),
            final_norm=norm,
            max_position_embeddings=values.integer("max_position_embeddings"),
            tie_word_embeddings=values.boolean("tie_word_embeddings"),
        )
        if values.integer("num_experts") == 1:
            return dense
        experts = ExpertsSpec(routing=routing(values), intermediate_size=mlp.intermediate_size)
        return with_experts(dense, dict.fromkeys(_every(values, "expert_layer_period", "expert_layer_offset"), experts))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = outer(spec, "final_layernorm")
        for index, layer in enumerate(spec.layers):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            found |= named(ours, theirs, {"mixer_norm": "input_layernorm", "feed_forward_norm": "pre_ff_layernorm"})
            if isinstance(layer.mixer, MambaSpec):
                found |= mamba(f"{ours}.mixer", f"{theirs}.mamba", layer.mixer)
            else:
                modules = {"qkv": "q_proj k_proj v_proj", "out": "o_proj"}
                found |= named(f"{ours}.mixer", f"{theirs}.self_attn", modules)
            if isinstance(layer.feed_forward, ExpertsSpec):
                found |= layer_experts(f"{ours}.feed_forward", theirs, layer.feed_forward, NAMES)
            else:
                modules = {"gate_up": "gate_proj up_proj", "down": "down_proj"}
                found |= named(f"{ours}.feed_forward", f"{theirs}.feed_forward", modules)
        return found


def _every(config: Config, period: str, offset: str) -> list[int]:
    """Return the numbers of the layers that leave `offset` when they are divided by `period`."""
    step, rest = config.integer(period), config.integer(offset, at_least=0)
    if rest >= step:
        raise wrong(offset, rest, f"below the {step} of {period}")
    return list(range(rest, config.integer("num_hidden_layers"), step))


def _attention(config: Config) -> AttentionSpec:
    heads, head_dim = config.integer("num_attention_heads"), head_width(config, "hidden_size", "num_attention_heads")
    kv_heads = config.integer("num_key_value_heads")
    if heads % kv_heads:
        raise wrong("num_key_value_heads", kv_heads, f"a divisor of the {heads} of num_attention_heads")
    return AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5)


def _mamba(config: Config, norm: NormSpec) -> MambaSpec:
    return MambaSpec(
        channels=expanded(config, "mamba_expand"),
        state_width=config.integer("mamba_d_state"),
        rank=dt_rank(config, "mamba_dt_rank"),
        length=conv_length(config, "mamba_d_conv"),
        bias=config.boolean("mamba_proj_bias"),
        conv_bias=config.boolean("mamba_conv_bias"),
        norm=norm,
    )

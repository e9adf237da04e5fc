"""Gated linear attention and RetNet: linear attention whose state decays, as `ridgeline train pretrain` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.linear import LinearAttentionSpec
from ridgeline.core.specs.model import LayerSpec, MLPSpec, ModelSpec, NormSpec, RopeSpec, WeightMap
from ridgeline.models.config import Config, head_width, wrong
from ridgeline.models.names import named, outer

DEFAULTS = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "gate_low_rank_dim": 16, "gate_logit_normalizer": 16}
MOST_HEADS = 19  # the decay of a twentieth head would be 1 in float32's eyes


class GatedLinearAttention:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        rank, divisor = values.integer("gate_low_rank_dim"), values.number("gate_logit_normalizer")
        return _spec("GatedLinearAttentionForCausalLM", values, rank, divisor, None)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        return _weights(spec)


class RetNet:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, {**DEFAULTS, "rope_theta": 10000.0})
        width = _key_width(values)
        if width % 2:
            raise wrong("key_dim", width, "even, since pairs rotate")
        if (heads := values.integer("num_attention_heads")) > MOST_HEADS:
            raise wrong(
                "num_attention_heads", heads, f"at most {MOST_HEADS}, since each head's decay is half the last's"
            )
        rope = RopeSpec(theta=values.number("rope_theta"), rotary_dim=width)
        return _spec("RetNetForCausalLM", values, 0, 1.0, rope)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        return _weights(spec)


def _spec(architecture: str, config: Config, rank: int, divisor: float, rope: RopeSpec | None) -> ModelSpec:
    norm, width = NormSpec(eps=config.number("rms_norm_eps")), config.integer("hidden_size")
    if (activation := config.activation("hidden_act")) != "silu":
        raise wrong("hidden_act", activation, "silu, which the mixers' gates have too")
    mixer = LinearAttentionSpec(
        heads=config.integer("num_attention_heads"),
        key_dim=_key_width(config),
        value_dim=config.integer("value_dim")
        if "value_dim" in config
        else head_width(config, "hidden_size", "num_attention_heads"),
        norm=norm,
        rank=rank,
        divisor=divisor,
        rope=rope,
    )
    mlp = MLPSpec(intermediate_size=config.integer("intermediate_size"))
    layer = LayerSpec(mixer=mixer, feed_forward=mlp, norm=norm)
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=width,
        layers=(layer,) * config.integer("num_hidden_layers"),
        final_norm=norm,
        max_position_embeddings=config.integer("max_position_embeddings"),
        tie_word_embeddings=config.boolean("tie_word_embeddings"),
    )


def _key_width(config: Config) -> int:
    """Return the width of a key head: by default half of a value head's, as in the paper."""
    if "key_dim" in config:
        return config.integer("key_dim")
    return max(1, head_width(config, "hidden_size", "num_attention_heads") // 2)


def _weights(spec: ModelSpec) -> WeightMap:
    found = outer(spec, "norm")
    for index, layer in enumerate(spec.layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        found |= named(ours, theirs, {"mixer_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"})
        assert isinstance(layer.mixer, LinearAttentionSpec)
        projections = "q_proj k_proj v_proj g_proj"
        if layer.mixer.rank:
            projections += " gk_proj.0"
            found |= named(f"{ours}.mixer", f"{theirs}.attn", {"decay": "gk_proj.1"}, bias=True)
        modules = {"linear_in": projections, "norm": "g_norm", "out": "o_proj"}
        found |= named(f"{ours}.mixer", f"{theirs}.attn", modules)
        modules = {"gate_up": "gate_proj up_proj", "down": "down_proj"}
        found |= named(f"{ours}.feed_forward", f"{theirs}.mlp", modules)
    return found

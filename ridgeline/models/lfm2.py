"""LFM2: short gated convolutions, and attention with norms on queries and keys in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor
from typing import Any

from ridgeline.core.specs.conv import ShortConvSpec
from ridgeline.core.specs.model import (
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    MixerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    WeightMap,
)
from ridgeline.models.config import MAX_INTEGER, Config, head_width, wrong
from ridgeline.models.names import named, outer
from ridgeline.models.rope import context, rope
from ridgeline.models.selective import conv_length

DEFAULTS = {
    "vocab_size": 65536,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
}
DENSE_DEFAULTS = {
    **DEFAULTS,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
LAYER_TYPES = ("full_attention", "conv")


class Lfm2:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DENSE_DEFAULTS)
        mlp = MLPSpec(intermediate_size=_intermediate_size(values))
        types = values.layer_types(values.integer("num_hidden_layers"), LAYER_TYPES) or _by_index(values)
        return lfm2_like("Lfm2ForCausalLM", values, types, [mlp] * len(types))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        """Return the weight map, without feed-forwards of other kinds."""
        found = outer(spec, "embedding_norm")
        for index, layer in enumerate(spec.layers):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            found |= named(ours, theirs, {"mixer_norm": "operator_norm", "feed_forward_norm": "ffn_norm"})
            if isinstance(layer.mixer, ShortConvSpec):
                modules = {"conv_in": "in_proj", "conv": "conv", "out": "out_proj"}
                found |= named(f"{ours}.mixer", f"{theirs}.conv", modules, bias=layer.mixer.bias)
            else:
                modules = {"qkv": "q_proj k_proj v_proj", "out": "out_proj", "q_norm": "q_layernorm"}
                found |= named(f"{ours}.mixer", f"{theirs}.self_attn", {**modules, "k_norm": "k_layernorm"})
            if isinstance(layer.feed_forward, MLPSpec):
                modules = {"gate_up": "w1 w3", "down": "w2"}
                found |= named(f"{ours}.feed_forward", f"{theirs}.feed_forward", modules)
        return found


def lfm2_like(architecture: str, config: Config, types: list[str], feed_forwards: list[FeedForwardSpec]) -> ModelSpec:
    """Return a spec with a mixer of one of LAYER_TYPES and a feed-forward for each layer."""
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads, head_dim = config.integer("num_key_value_heads"), head_width(config, "hidden_size", "num_attention_heads")
    if heads % kv_heads:
        raise wrong("num_key_value_heads", kv_heads, f"a divisor of the {heads} of num_attention_heads")
    norm = NormSpec(eps=config.number("norm_eps"))
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qk_norm=norm,
        rope=rope(config, head_dim),
    )
    conv = ShortConvSpec(channels=width, length=conv_length(config, "conv_L_cache"), bias=config.boolean("conv_bias"))
    mixers: dict[str, MixerSpec] = {"full_attention": attention, "conv": conv}
    tied = "tie_embedding" if "tie_embedding" in config else "tie_word_embeddings"
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=width,
        layers=tuple(
            LayerSpec(mixer=mixers[kind], feed_forward=feed_forward, norm=norm)
            for kind, feed_forward in zip(types, feed_forwards, strict=True)
        ),
        final_norm=norm,
        max_position_embeddings=context(config),
        tie_word_embeddings=config.boolean(tied),
    )


def _by_index(config: Config) -> list[str]:
    """Return the layers' types as older configs have them, by the numbers of layers with attention (all if none are
    given)."""
    count, attends = config.integer("num_hidden_layers"), config.raw("full_attn_idxs")
    if attends is None:
        return ["full_attention"] * count
    if not isinstance(attends, list) or not all(isinstance(index, int) for index in attends):
        raise wrong("full_attn_idxs", attends, "a list of the numbers of layers")
    return ["full_attention" if index in attends else "conv" for index in range(count)]


def _intermediate_size(config: Config) -> int:
    """Return two thirds of the config's number, times a factor, filled up to whole blocks, if it is to be adjusted."""
    size = config.integer("block_ff_dim" if "block_ff_dim" in config else "intermediate_size")
    if not config.boolean("block_auto_adjust_ff_dim"):
        return size
    size = floor(2 * size / 3)
    if "block_ffn_dim_multiplier" not in config:
        return size
    factor, multiple = config.number("block_ffn_dim_multiplier"), config.integer("block_multiple_of")
    adjusted = -(-floor(factor * size) // multiple) * multiple
    if not 0 < adjusted <= MAX_INTEGER:
        raise wrong("block_ffn_dim_multiplier", factor, f"such that {size} times it is from 1 to {MAX_INTEGER}")
    return adjusted

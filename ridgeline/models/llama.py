"""Llama 2 and 3.x: RMS norms, rotary grouped-query attention, gated feed-forward. Its many descendants share this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, Source, WeightMap
from ridgeline.models.config import Config
from ridgeline.models.rope import context, rope

NORMS = {  # by the place of a layer's norms
    "before": {"mixer_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"},
    "after": {"mixer_post_norm": "post_attention_layernorm", "feed_forward_post_norm": "post_feedforward_layernorm"},
    "both": {
        "mixer_norm": "input_layernorm",
        "mixer_post_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_post_norm": "post_feedforward_layernorm",
    },
}

DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048}


class Llama:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        return llama_like(
            "LlamaForCausalLM",
            values,
            attention_bias=values.boolean("attention_bias"),
            mlp_bias=values.boolean("mlp_bias"),
        )

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        """Return the weight map, with biases and query/key norms if the spec has them, but without mixers and
        feed-forwards of other kinds."""
        names: WeightMap = {
            "embed.weight": (Source(name="model.embed_tokens.weight"),),
            "final_norm.weight": (Source(name="model.norm.weight"),),
        }
        if not spec.tie_word_embeddings:
            names["unembed.weight"] = (Source(name="lm_head.weight"),)
        for index, layer in enumerate(spec.layers):
            names |= _layer_weights(index, layer)
        return names


def llama_like(
    architecture: str,
    config: Config,
    *,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: Sequence[int | None] | None = None,
) -> ModelSpec:
    """Return a spec with RMS norms, rotary grouped-query attention and gated feed-forward.

    `windows` has one entry per layer; None is full attention.
    """
    num_layers, num_heads = config.integer("num_hidden_layers"), config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads") if "num_key_value_heads" in config else num_heads
    head_dim = config.integer("head_dim") if "head_dim" in config else config.integer("hidden_size") // num_heads
    if not head_dim:
        raise ModelLoadError(
            f"config.json has hidden_size {config.integer('hidden_size')}, too little for {num_heads} attention heads."
        )
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"config.json has {num_heads} attention heads and {num_kv_heads} key/value heads; "
            "the first must be a multiple of the second."
        )
    if config.raw("is_causal") is False:
        raise ModelLoadError(
            "config.json sets is_causal to False, and decoders of this family see no later tokens here."
        )
    norm = NormSpec(kind="rms", eps=config.number("rms_norm_eps"))
    mlp = MLPSpec(
        intermediate_size=config.integer("intermediate_size"),
        activation=config.activation("hidden_act"),
        bias=mlp_bias,
    )

    def layer(window: int | None) -> LayerSpec:
        mixer = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            qk_norm=norm if qk_norm else None,
            rope=rope(config, head_dim, "full_attention" if window is None else "sliding_attention"),
            window=window,
        )
        return LayerSpec(mixer=mixer, feed_forward=mlp, norm=norm)

    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        layers=tuple(layer(window) for window in windows or [None] * num_layers),
        final_norm=norm,
        max_position_embeddings=context(config),
        tie_word_embeddings=config.boolean("tie_word_embeddings"),
    )


def _layer_weights(index: int, layer: LayerSpec) -> WeightMap:
    ours, theirs = f"layers.{index}", f"model.layers.{index}"
    names: WeightMap = {
        f"{ours}.{norm}.weight": (Source(name=f"{theirs}.{name}.weight"),) for norm, name in NORMS[layer.norms].items()
    }

    def fused(name: str, parts: str, bias: bool) -> None:
        for kind in ("weight", "bias") if bias else ("weight",):
            names[f"{ours}.{name}.{kind}"] = tuple(Source(name=f"{theirs}.{part}.{kind}") for part in parts.split())

    if isinstance(layer.mixer, AttentionSpec):
        if layer.mixer.qk_norm is not None:
            fused("mixer.q_norm", "self_attn.q_norm", False)
            fused("mixer.k_norm", "self_attn.k_norm", False)
        parts = "q_proj k_proj" if layer.mixer.values_are_keys else "q_proj k_proj v_proj"
        fused("mixer.qkv", " ".join(f"self_attn.{part}" for part in parts.split()), layer.mixer.qkv_bias)
        fused("mixer.out", "self_attn.o_proj", layer.mixer.out_bias)
    if isinstance(layer.feed_forward, MLPSpec):
        fused("feed_forward.gate_up", "mlp.gate_proj mlp.up_proj", layer.mlp.bias)
        fused("feed_forward.down", "mlp.down_proj", layer.mlp.bias)
    return names

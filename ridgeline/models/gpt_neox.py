"""GPT-NeoX and Pythia: attention and feed-forward side by side, LayerNorm, biases, a quarter of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, Source, WeightMap
from ridgeline.models.config import Config, head_width
from ridgeline.models.rope import context, rope

DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "use_parallel_residual": True,
    "attention_bias": True,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000.0,
}

_PARTS = {
    "mixer_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "mixer.qkv": "attention.query_key_value",
    "mixer.out": "attention.dense",
    "feed_forward.up": "mlp.dense_h_to_4h",
    "feed_forward.down": "mlp.dense_4h_to_h",
}


class GPTNeoX:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        rotation = {"rope_theta": values.raw("rotary_emb_base"), "partial_rotary_factor": values.raw("rotary_pct")}
        values = Config(config, {**DEFAULTS, **rotation})
        width, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
        head_dim = head_width(values, "hidden_size", "num_attention_heads")
        norm = NormSpec(kind="layer", eps=values.number("layer_norm_eps"))
        bias = values.boolean("attention_bias")
        layer = LayerSpec(
            mixer=AttentionSpec(
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                qkv_bias=bias,
                out_bias=bias,
                rope=rope(values, head_dim),
            ),
            feed_forward=MLPSpec(
                intermediate_size=values.integer("intermediate_size"),
                activation=values.activation("hidden_act"),
                gated=False,
                bias=True,
            ),
            norm=norm,
            parallel=values.boolean("use_parallel_residual"),
        )
        return ModelSpec(
            architecture="GPTNeoXForCausalLM",
            vocab_size=values.integer("vocab_size"),
            hidden_size=width,
            layers=(layer,) * values.integer("num_hidden_layers"),
            final_norm=norm,
            max_position_embeddings=context(values),
            tie_word_embeddings=values.boolean("tie_word_embeddings"),
        )

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        names: WeightMap = {"embed.weight": (Source(name="gpt_neox.embed_in.weight"),)}
        if not spec.tie_word_embeddings:
            names["unembed.weight"] = (Source(name="embed_out.weight"),)
        return names | block_weights(spec, "gpt_neox.layers", _PARTS, {"final_norm": "gpt_neox.final_layer_norm"})


def block_weights(spec: ModelSpec, blocks: str, parts: Mapping[str, str], others: Mapping[str, str]) -> WeightMap:
    """Return the weight map of parts of every layer, and of `others`, by our names and with their biases. q, k and v
    are stored head by head."""
    names: WeightMap = {}

    def add(ours: str, theirs: str, bias: bool, heads: int | None = None) -> None:
        for kind in ("weight", "bias") if bias else ("weight",):
            names[f"{ours}.{kind}"] = (Source(name=f"{theirs}.{kind}", heads=heads),)

    for ours, theirs in others.items():
        add(ours, theirs, True)
    for index, layer in enumerate(spec.layers):
        for ours, theirs in parts.items():
            bias = {"mixer.qkv": layer.attention.qkv_bias, "mixer.out": layer.attention.out_bias}.get(ours, True)
            heads = layer.attention.num_heads if ours == "mixer.qkv" else None
            add(f"layers.{index}.{ours}", f"{blocks}.{index}.{theirs}", bias, heads)
    return names

"""GPT-2: learned positions, LayerNorm and biases everywhere; linear weights are stored [in, out]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, Source, WeightMap
from ridgeline.models.config import Config, head_width

DEFAULTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_positions": 1024,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}

_NORMS = {"mixer_norm": "ln_1", "feed_forward_norm": "ln_2"}
_LINEARS = {
    "mixer.qkv": "attn.c_attn",
    "mixer.out": "attn.c_proj",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}


class GPT2:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        values.refuse("add_cross_attention", "only decoders without an encoder run")
        width, positions = values.integer("n_embd"), values.integer("n_positions")
        norm = NormSpec(kind="layer", eps=values.number("layer_norm_epsilon"))
        mlp = MLPSpec(
            intermediate_size=values.integer("n_inner") if "n_inner" in values else 4 * width,
            activation=values.activation("activation_function"),
            gated=False,
            bias=True,
        )
        return ModelSpec(
            architecture="GPT2LMHeadModel",
            vocab_size=values.integer("vocab_size"),
            hidden_size=width,
            layers=tuple(
                LayerSpec(mixer=_attention(values, layer), feed_forward=mlp, norm=norm)
                for layer in range(values.integer("n_layer"))
            ),
            final_norm=norm,
            max_position_embeddings=positions,
            tie_word_embeddings=values.boolean("tie_word_embeddings"),
            learned_positions=positions,
        )

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        names: WeightMap = {
            "embed.weight": (Source(name="transformer.wte.weight"),),
            "position_embed.weight": (Source(name="transformer.wpe.weight"),),
        }
        if not spec.tie_word_embeddings:
            names["unembed.weight"] = (Source(name="lm_head.weight"),)
        norms = {"final_norm": "ln_f"}
        linears: dict[str, str] = {}
        for layer in range(len(spec.layers)):
            norms |= {f"layers.{layer}.{ours}": f"h.{layer}.{theirs}" for ours, theirs in _NORMS.items()}
            linears |= {f"layers.{layer}.{ours}": f"h.{layer}.{theirs}" for ours, theirs in _LINEARS.items()}
        for ours, theirs in (norms | linears).items():
            names[f"{ours}.weight"] = (Source(name=f"transformer.{theirs}.weight", transpose=ours in linears),)
            names[f"{ours}.bias"] = (Source(name=f"transformer.{theirs}.bias"),)
        return names


def _attention(config: Config, layer: int) -> AttentionSpec:
    heads, head_dim = config.integer("n_head"), head_width(config, "n_embd", "n_head")
    scale = head_dim**-0.5 if config.boolean("scale_attn_weights") else 1.0
    if config.boolean("scale_attn_by_inverse_layer_idx"):
        scale /= layer + 1
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=scale,
        qkv_bias=True,
        out_bias=True,
    )

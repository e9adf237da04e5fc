"""BLOOM: no positions but ALiBi's, LayerNorm (of the embeddings too) and biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec, Source, WeightMap
from ridgeline.models.config import Config, head_width
from ridgeline.models.gpt_neox import block_weights

DEFAULTS = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "seq_length": 2048}

_PARTS = {
    "mixer_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "mixer.qkv": "self_attention.query_key_value",
    "mixer.out": "self_attention.dense",
    "feed_forward.up": "mlp.dense_h_to_4h",
    "feed_forward.down": "mlp.dense_4h_to_h",
}
_OTHERS = {"final_norm": "transformer.ln_f", "embed_norm": "transformer.word_embeddings_layernorm"}


class Bloom:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        values.refuse("apply_residual_connection_post_layernorm", "the residual is taken before the norm")
        width_name = "hidden_size" if "hidden_size" in values else "n_embed"
        heads_name = "n_head" if "n_head" in values else "num_attention_heads"
        head_dim = head_width(values, width_name, heads_name)
        width, heads = values.integer(width_name), values.integer(heads_name)
        norm = NormSpec(kind="layer", eps=values.number("layer_norm_epsilon"))
        layer = LayerSpec(
            mixer=AttentionSpec(
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                qkv_bias=True,
                out_bias=True,
                alibi=True,
            ),
            feed_forward=MLPSpec(intermediate_size=4 * width, activation="gelu_tanh", gated=False, bias=True),
            norm=norm,
        )
        return ModelSpec(
            architecture="BloomForCausalLM",
            vocab_size=values.integer("vocab_size"),
            hidden_size=width,
            layers=(layer,) * values.integer("n_layer" if "n_layer" in values else "num_hidden_layers"),
            final_norm=norm,
            max_position_embeddings=values.integer("seq_length"),
            tie_word_embeddings=values.boolean("tie_word_embeddings"),
            embed_norm=norm,
        )

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        names: WeightMap = {"embed.weight": (Source(name="transformer.word_embeddings.weight"),)}
        if not spec.tie_word_embeddings:
            names["unembed.weight"] = (Source(name="lm_head.weight"),)
        return names | block_weights(spec, "transformer.h", _PARTS, _OTHERS)

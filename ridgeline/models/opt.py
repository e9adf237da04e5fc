"""OPT: learned positions, LayerNorm and biases everywhere, and rectified feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import ModelSpec, NormSpec, Source, WeightMap
from ridgeline.models.config import Config, wrong
from ridgeline.models.llama import Names, changed, decoder_weights, llama_like

DEFAULTS = {
    "activation_function": "relu",
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}
SPELLINGS = {"hidden_act": "activation_function", "intermediate_size": "ffn_dim"}
OFFSET = 2  # rows of the table of positions that no token gets
EPS = 1e-5  # torch's own
NAMES = Names(
    embed="model.decoder.embed_tokens",
    final_norm="model.decoder.final_layer_norm",
    layers="model.decoder.layers",
    norms={"mixer_norm": "self_attn_layer_norm", "feed_forward_norm": "final_layer_norm"},
    out="self_attn.out_proj",
    up="fc1",
    down="fc2",
)


class OPT:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config({**DEFAULTS, **config}, spellings=SPELLINGS)
        for name in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
            if not values.boolean(name):
                raise wrong(name, False, "true; norms before each part, with weights, are what runs here")
        values.refuse("_remove_final_layer_norm", "there is a norm behind the last layer here")
        width, positions = values.integer("hidden_size"), values.integer("max_position_embeddings")
        if values.raw("word_embed_proj_dim") not in (None, width):
            raise wrong("word_embed_proj_dim", values.raw("word_embed_proj_dim"), f"hidden_size, {width}")
        values = values.changed(num_key_value_heads=values.integer("num_attention_heads"))  # which no model groups
        bias, norm = values.boolean("enable_bias"), NormSpec(kind="layer", eps=EPS)
        spec = llama_like("OPTForCausalLM", values, attention_bias=bias, mlp_bias=bias, norm=norm, gated=False)
        return replace(changed(spec, {"rope": None}), learned_positions=positions + OFFSET, position_offset=OFFSET)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        positions = (Source(name="model.decoder.embed_positions.weight"),)
        return decoder_weights(spec, NAMES) | {"position_embed.weight": positions}

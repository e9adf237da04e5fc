"""Falcon: LayerNorm, attention and feed-forward side by side, and few heads of keys and values, all in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import ModelSpec, NormSpec, WeightMap
from ridgeline.models.config import Config
from ridgeline.models.llama import Names, changed, decoder_weights, llama_like

DEFAULTS = {
    "activation": "gelu",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "multi_query": True,
    "parallel_attn": True,
    "tie_word_embeddings": True,
}
SPELLINGS = {
    "hidden_act": "activation",
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "num_kv_heads",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
}
TWO_NORMS = {"mixer_norm": "ln_attn", "feed_forward_norm": "ln_mlp"}
NAMES = Names(
    embed="transformer.word_embeddings",
    final_norm="transformer.ln_f",
    layers="transformer.h",
    qkv=("self_attention.query_key_value",),
    out="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


class Falcon:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        if "n_head_kv" in config:  # as the first configs have it
            config = {"num_kv_heads": config["n_head_kv"], "new_decoder_architecture": True, **config}
        values = Config({**DEFAULTS, **config}, spellings=SPELLINGS)
        values.refuse("alibi", "the models with rotary positions run")
        width, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
        new, inner = values.boolean("new_decoder_architecture"), 4 * width
        kv_heads = values.integer("num_key_value_heads") if "num_key_value_heads" in values else heads
        if not new:
            kv_heads = 1 if values.boolean("multi_query") else heads
        values = values.changed(
            num_key_value_heads=kv_heads,
            intermediate_size=values.integer("intermediate_size") if "intermediate_size" in values else inner,
        )
        bias, norm = values.boolean("bias"), NormSpec(kind="layer", eps=values.number("layer_norm_epsilon"))
        spec = llama_like("FalconForCausalLM", values, attention_bias=bias, mlp_bias=bias, norm=norm, gated=False)
        parallel = new or values.boolean("parallel_attn")
        one = parallel and not (new and values.raw("num_ln_in_parallel_attn") != 1)
        return changed(spec, parallel=parallel, one_norm=one)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        layer = spec.layers[0]
        two = layer.parallel and not layer.one_norm
        heads, kv_heads = layer.attention.num_heads, layer.attention.num_kv_heads
        shares = (heads // kv_heads, 1, 1)  # a head of keys is stored behind its queries, and its values behind that
        found = decoder_weights(spec, replace(NAMES, norms=TWO_NORMS if two else None))
        for name, sources in found.items():
            if ".qkv." in name:
                found[name] = tuple(replace(each, heads=kv_heads, shares=shares) for each in sources)
        return found

"""ERNIE 4.5: Llama whose queries and keys rotate in neighbouring pairs, with or without mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ridgeline.core.specs.model import ModelSpec, WeightMap
from ridgeline.models.config import Config
from ridgeline.models.experts import ExpertNames, expert_weights, mixture, routing, with_experts
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Names, decoder_weights, llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
DENSE_DEFAULTS = {**DEFAULTS, "num_key_value_heads": 2, "head_dim": 128}
MIXTURE_DEFAULTS = {
    **DEFAULTS,
    "num_key_value_heads": 4,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 1536,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
}
SPELLINGS = {
    "num_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_k",
    "n_shared_experts": "moe_num_shared_experts",
}
NAMES = Names(interleaved=True)
EXPERT_NAMES = ExpertNames(
    shared="mlp.shared_experts", correction="mlp.moe_statics.e_score_correction_bias", correction_row=True
)


class Ernie:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DENSE_DEFAULTS)
        bias = values.boolean("use_bias")
        return llama_like("Ernie4_5ForCausalLM", values, attention_bias=bias, mlp_bias=bias)

    weights = staticmethod(partial(decoder_weights, names=NAMES))


class ErnieMoe:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config({**MIXTURE_DEFAULTS, **config}, spellings=SPELLINGS)
        values.refuse("use_bias", "no mixture of this family has biases")
        dense = llama_like("Ernie4_5_MoeForCausalLM", values)
        experts = mixture(values, routing(values, renormalize=True, correction=True))
        return with_experts(dense, dict.fromkeys(_layers(values), experts))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        return expert_weights(spec, EXPERT_NAMES, NAMES)


def _layers(config: Config) -> list[int]:
    """Return the layers that have experts: of those from the start to the end, every `moe_layer_interval`-th one."""
    count, end = config.integer("num_hidden_layers"), config.raw("moe_layer_end_index")
    start = config.integer("moe_layer_start_index", at_least=0)
    last = count - 1 if end in (None, -1) else config.integer("moe_layer_end_index", at_least=0)
    step = config.integer("moe_layer_interval")
    return [layer for layer in range(start, min(last + 1, count)) if (layer + 1) % step == 0]

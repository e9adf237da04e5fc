"""OLMoE: Llama with norms on all queries and all keys together, and mixtures of experts as feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.experts import expert_weights, routing, with_experts
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}


class Olmoe:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        values.refuse("clip_qkv", "queries, keys and values are not clipped")
        bias = values.boolean("attention_bias")
        dense = llama_like("OlmoeForCausalLM", values, attention_bias=bias, qk_norm=True)
        layers = (replace(layer, mixer=replace(layer.attention, qk_norm_whole=True)) for layer in dense.layers)
        experts = ExpertsSpec(
            routing=routing(values, renormalize=values.boolean("norm_topk_prob")),
            intermediate_size=values.integer("intermediate_size"),
            activation=values.activation("hidden_act"),
        )
        dense = replace(dense, layers=tuple(layers))
        return with_experts(dense, dict.fromkeys(range(len(dense.layers)), experts))

    weights = staticmethod(expert_weights)

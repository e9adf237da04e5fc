"""Qwen3-MoE: Qwen3 whose feed-forwards are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.experts import expert_weights, routing, sparse_layers, with_experts
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
}


class Qwen3Moe:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        windowed = values.boolean("use_sliding_window") and "sliding_window" in values
        window = values.integer("sliding_window") if windowed else None
        dense = llama_like(
            "Qwen3MoeForCausalLM",
            values,
            attention_bias=values.boolean("attention_bias"),
            qk_norm=True,
            windows=[window] * values.integer("num_hidden_layers"),
        )
        experts = ExpertsSpec(
            routing=routing(values, renormalize=values.boolean("norm_topk_prob")),
            intermediate_size=values.integer("moe_intermediate_size"),
            activation=values.activation("hidden_act"),
        )
        return with_experts(dense, dict.fromkeys(sparse_layers(values), experts))

    weights = staticmethod(expert_weights)

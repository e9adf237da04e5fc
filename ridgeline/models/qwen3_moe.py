"""Qwen3-MoE: Qwen3 whose feed-forwards are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.expert_spec import ExpertsSpec, RoutingSpec
from ridgeline.core.model_spec import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.experts import expert_weights, num_experts, with_experts
from ridgeline.models.llama import llama_like
from ridgeline.models.qwen3 import DEFAULTS as QWEN3_DEFAULTS
from ridgeline.models.qwen3 import windows

DEFAULTS = {**QWEN3_DEFAULTS, "num_experts_per_tok": 8, "decoder_sparse_step": 1}


class Qwen3Moe:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        dense = llama_like(
            "Qwen3MoeForCausalLM",
            values,
            attention_bias=values.boolean("attention_bias"),
            qk_norm=True,
            windows=windows(values),
        )
        experts = ExpertsSpec(
            routing=RoutingSpec(
                experts=num_experts(values),
                top_k=values.integer("num_experts_per_tok"),
                renormalize=values.boolean("norm_topk_prob"),
            ),
            intermediate_size=values.integer("moe_intermediate_size"),
            activation=values.activation("hidden_act"),
        )
        return with_experts(dense, dict.fromkeys(range(len(dense.layers)), experts))

    weights = staticmethod(expert_weights)

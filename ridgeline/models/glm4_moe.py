"""GLM-4.5: Llama with a part of each head rotated, whose later layers have mixtures of experts and a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.experts import (
    ExpertNames,
    corrected_routing,
    drafting_layers,
    expert_weights,
    later_layers,
    mixture,
    with_experts,
)
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}

NAMES = ExpertNames(shared="mlp.shared_experts")


class Glm4Moe:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        dense = llama_like("Glm4MoeForCausalLM", values, qk_norm=values.boolean("use_qk_norm"))
        bias = values.boolean("attention_bias")
        layers = (replace(layer, mixer=replace(layer.attention, qkv_bias=bias)) for layer in dense.layers)
        experts = mixture(values, corrected_routing(values))
        dense = replace(dense, layers=tuple(layers), unused=drafting_layers(values, "num_nextn_predict_layers"))
        return with_experts(dense, dict.fromkeys(later_layers(values), experts))

    weights = staticmethod(partial(expert_weights, names=NAMES))

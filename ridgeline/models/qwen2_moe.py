"""Qwen2-MoE: Qwen2 whose feed-forwards are mixtures of experts beside a shared one, which has a gate of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import MLPSpec, ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.experts import expert_weights, routing, sparse_layers, with_experts
from ridgeline.models.llama import llama_like
from ridgeline.models.qwen2 import DEFAULTS as QWEN2_DEFAULTS
from ridgeline.models.qwen3 import windows

DEFAULTS = {
    **QWEN2_DEFAULTS,
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}


class Qwen2Moe:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        dense = llama_like("Qwen2MoeForCausalLM", values, windows=windows(_with_layer_types(config, values)))
        bias, activation = values.boolean("qkv_bias"), values.activation("hidden_act")
        layers = (replace(layer, mixer=replace(layer.attention, qkv_bias=bias)) for layer in dense.layers)
        experts = ExpertsSpec(
            routing=routing(values, renormalize=values.boolean("norm_topk_prob")),
            intermediate_size=values.integer("moe_intermediate_size"),
            activation=activation,
            shared=MLPSpec(intermediate_size=values.integer("shared_expert_intermediate_size"), activation=activation),
            shared_gate=True,
        )
        return with_experts(replace(dense, layers=tuple(layers)), dict.fromkeys(sparse_layers(values), experts))

    weights = staticmethod(expert_weights)


def _with_layer_types(config: Mapping[str, Any], values: Config) -> Config:
    """Return the config with the layers that have windows, if it leaves them out: every other one of the first
    `max_window_layers`, as transformers has it for this family alone."""
    if "layer_types" in values or not values.boolean("use_sliding_window"):
        return values
    first, count = values.integer("max_window_layers", at_least=0), values.integer("num_hidden_layers")
    types = ["full_attention" if layer % 2 or layer >= first else "sliding_attention" for layer in range(count)]
    return Config({**config, "layer_types": types}, DEFAULTS)

"""LFM2 MoE: LFM2 whose later layers have mixtures of experts, chosen with corrected scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import MLPSpec, ModelSpec, WeightMap
from ridgeline.models.config import Config
from ridgeline.models.experts import ExpertNames, layer_experts, routing, with_experts
from ridgeline.models.lfm2 import DEFAULTS as LFM2_DEFAULTS
from ridgeline.models.lfm2 import LAYER_TYPES, Lfm2, lfm2_like

DEFAULTS = {
    **LFM2_DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
}

NAMES = ExpertNames(
    router="feed_forward.gate",
    expert="feed_forward.experts.{}",
    gate_up=("w1", "w3"),
    down="w2",
    correction="feed_forward.expert_bias",
)


class Lfm2Moe:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        count = values.integer("num_hidden_layers")
        types = values.layer_types(count, LAYER_TYPES)
        if types is None:
            raise ModelLoadError("config.json has no layer_types; the model cannot be built without it.")
        mlp = MLPSpec(intermediate_size=values.integer("intermediate_size"))
        dense = lfm2_like("Lfm2MoeForCausalLM", values, types, [mlp] * count)
        how = routing(
            values,
            score="sigmoid",
            renormalize=values.boolean("norm_topk_prob"),
            correction=values.boolean("use_expert_bias"),
        )
        experts = ExpertsSpec(
            routing=replace(how, scale=values.number("routed_scaling_factor")),
            intermediate_size=values.integer("moe_intermediate_size"),
        )
        first = values.integer("num_dense_layers", at_least=0)
        return with_experts(dense, dict.fromkeys(range(first, count), experts))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = Lfm2.weights(spec)
        for index, layer in enumerate(spec.layers):
            if isinstance(layer.feed_forward, ExpertsSpec):
                found |= layer_experts(
                    f"layers.{index}.feed_forward", f"model.layers.{index}", layer.feed_forward, NAMES
                )
        return found

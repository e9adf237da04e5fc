"""DeepSeek-V2 and V3 (with R1, Kimi K2 and Moonlight): latent attention, and many small experts beside shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.experts import RoutingSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.experts import corrected_routing, drafting_layers, later_layers, mixture, routing, with_experts
from ridgeline.models.latent import DEFAULTS, latent_like, latent_weights

V2_DEFAULTS = {
    **DEFAULTS,
    "q_lora_rank": 1536,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "topk_method": "greedy",
    "moe_intermediate_size": 1407,
}
V3_DEFAULTS = {
    **DEFAULTS,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "moe_intermediate_size": 2048,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
}
TYPES = ("dense", "sparse")


class DeepseekV2:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, V2_DEFAULTS)
        dense = latent_like("DeepseekV2ForCausalLM", values, mlp_bias=values.boolean("mlp_bias"))
        if values.raw("n_routed_experts") is None:
            return dense
        if values.boolean("mlp_bias"):
            raise wrong("mlp_bias", True, "false in a mixture of experts, whose matrices have no biases here")
        return with_experts(dense, dict.fromkeys(later_layers(values), mixture(values, _v2_routing(values))))

    weights = staticmethod(latent_weights)


class DeepseekV3:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, V3_DEFAULTS)
        return v3_like("DeepseekV3ForCausalLM", values)

    weights = staticmethod(latent_weights)


def v3_like(architecture: str, config: Config) -> ModelSpec:
    """Return a spec of latent attention and of experts that are chosen by corrected scores."""
    dense = latent_like(architecture, config, interleaved=config.boolean("rope_interleave"))
    drafting = drafting_layers(config, "num_nextn_predict_layers")
    behind = f"model.layers.{config.integer('num_hidden_layers')}."  # files may hold one that the config does not count
    dense = replace(dense, unused=drafting or (behind,))
    return with_experts(dense, dict.fromkeys(later_layers(config), mixture(config, corrected_routing(config))))


def _v2_routing(config: Config) -> RoutingSpec:
    method = config.raw("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise wrong("topk_method", method, "greedy or group_limited_greedy")
    if (score := config.raw("scoring_func")) not in (None, "softmax"):
        raise wrong("scoring_func", score, "softmax")
    if config.boolean("norm_topk_prob"):
        raise wrong("norm_topk_prob", True, "false, as in every model of this family")
    how = routing(config, group_score="max")
    return how if method != "greedy" else replace(how, groups=1, top_groups=1)


def first_sparse(config: Mapping[str, Any]) -> dict[str, int]:
    """Return `mlp_layer_types` in DeepSeek's words. Raise ModelLoadError if these cannot express it."""
    types, layers = config.get("mlp_layer_types"), config.get("num_hidden_layers")
    if types is None:
        return {}
    if not isinstance(types, list) or len(types) != layers:
        raise wrong("mlp_layer_types", types, f"a list with an entry for each of the {layers} layers")
    dense = types.count("dense")
    if types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
        raise wrong("mlp_layer_types", types, "dense for the first layers and sparse for all others")
    return {"first_k_dense_replace": dense}

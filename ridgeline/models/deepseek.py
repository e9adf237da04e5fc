"""DeepSeek-MoE (the first): Llama whose later layers have mixtures of small experts beside shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.experts import ExpertNames, expert_weights, later_layers, routing, shared_experts, with_experts
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import llama_like

DEFAULTS = {**LLAMA_DEFAULTS, "first_k_dense_replace": 0, "moe_layer_freq": 1, "scoring_func": "softmax"}

NAMES = ExpertNames(shared="mlp.shared_experts")


class Deepseek:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        dense = llama_like("DeepseekForCausalLM", values, attention_bias=values.boolean("attention_bias"))
        if (score := values.raw("scoring_func")) != "softmax":
            raise wrong("scoring_func", score, "softmax")
        if "n_routed_experts" not in values:
            return dense
        many = values.integer("num_experts_per_tok") > 1  # the weight of a single expert is left as it is
        experts = ExpertsSpec(
            routing=routing(values, renormalize=many and values.boolean("norm_topk_prob")),
            intermediate_size=values.integer("moe_intermediate_size"),
            activation=values.activation("hidden_act"),
            shared=shared_experts(values),
        )
        return with_experts(dense, dict.fromkeys(later_layers(values), experts))

    weights = staticmethod(partial(expert_weights, names=NAMES))

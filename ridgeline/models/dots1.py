"""dots.llm1: Llama with norms on queries and keys, whose later layers have mixtures of experts beside shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.experts import (
    ExpertNames,
    corrected_routing,
    expert_weights,
    later_layers,
    mixture,
    with_experts,
)
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import llama_like
from ridgeline.models.windows import later_windows

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "max_window_layers": 62,
    "sliding_window": 4096,
}


class Dots1:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        bias = values.boolean("attention_bias")
        dense = llama_like("Dots1ForCausalLM", values, attention_bias=bias, qk_norm=True, windows=later_windows(values))
        experts = mixture(values, corrected_routing(values))
        return with_experts(dense, dict.fromkeys(later_layers(values), experts))

    weights = staticmethod(partial(expert_weights, names=ExpertNames(shared="mlp.shared_experts")))

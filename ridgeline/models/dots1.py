"""dots.llm1: Llama with norms on queries and keys, whose later layers have mixtures of experts beside shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.experts import (
    ExpertNames,
    expert_weights,
    later_layers,
    routing,
    shared_experts,
    with_experts,
)
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import llama_like

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
        dense = llama_like("Dots1ForCausalLM", values, attention_bias=bias, qk_norm=True, windows=_windows(values))
        experts = ExpertsSpec(
            routing=routing(
                values,
                score="sigmoid",
                renormalize=values.boolean("norm_topk_prob"),
                correction=True,
                group_score="top2",
            ),
            intermediate_size=values.integer("moe_intermediate_size"),
            activation=values.activation("hidden_act"),
            shared=shared_experts(values),
        )
        return with_experts(dense, dict.fromkeys(later_layers(values), experts))

    weights = staticmethod(partial(expert_weights, names=ExpertNames(shared="mlp.shared_experts")))


def _windows(config: Config) -> list[int | None]:
    """Return each layer's window: as `layer_types` says, or on the layers from `max_window_layers` on."""
    count = config.integer("num_hidden_layers")
    window = config.integer("sliding_window") if "sliding_window" in config else None
    types = config.layer_types(count)
    if types is None:
        first = config.integer("max_window_layers", at_least=0)
        return [window if layer >= first else None for layer in range(count)]
    return [window if kind == "sliding_attention" else None for kind in types]

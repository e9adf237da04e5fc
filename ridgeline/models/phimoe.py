"""Phi-3.5-MoE: Mixtral with LayerNorm and biases, whose two experts are weighed one after the other (SparseMixer)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec, NormSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.experts import expert_weights, routing, with_experts
from ridgeline.models.llama import llama_like
from ridgeline.models.mixtral import DEFAULTS as MIXTRAL_DEFAULTS
from ridgeline.models.mixtral import NAMES

DEFAULTS = {**MIXTRAL_DEFAULTS, "num_local_experts": 16, "router_jitter_noise": 0.01}


class Phimoe:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        window = _window(values)
        dense = llama_like(
            "PhiMoEForCausalLM",
            values,
            attention_bias=values.boolean("attention_bias"),
            windows=[window] * values.integer("num_hidden_layers"),
            norm=NormSpec(kind="layer", eps=values.number("rms_norm_eps")),
        )
        how = routing(values)
        if how.top_k != 2:
            raise wrong("num_experts_per_tok", how.top_k, "2, for which SparseMixer is defined")
        experts = ExpertsSpec(
            routing=replace(how, score="sparsemixer", nearness=2 * values.number("router_jitter_noise")),
            intermediate_size=values.integer("intermediate_size"),
            activation=values.activation("hidden_act"),
        )
        dense = replace(dense, unembed_bias=values.boolean("lm_head_bias"))
        return with_experts(dense, dict.fromkeys(range(len(dense.layers)), experts))

    weights = staticmethod(partial(expert_weights, names=NAMES))


def _window(config: Config) -> int | None:
    """Return the window, if it is shorter than the context: the published one is as long."""
    if "sliding_window" not in config:
        return None
    window = config.integer("sliding_window")
    return window if window < config.integer("max_position_embeddings") else None

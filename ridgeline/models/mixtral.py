"""Mixtral: Mistral whose feed-forwards are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.experts import ExpertNames, expert_weights, routing, with_experts
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}",
    gate_up=("w1", "w3"),
    down="w2",
    correction="block_sparse_moe.e_score_correction_bias",
)


class Mixtral:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        window = values.integer("sliding_window") if "sliding_window" in values else None
        dense = llama_like("MixtralForCausalLM", values, windows=[window] * values.integer("num_hidden_layers"))
        experts = ExpertsSpec(
            routing=routing(values, renormalize=True),
            intermediate_size=values.integer("intermediate_size"),
            activation=values.activation("hidden_act"),
        )
        return with_experts(dense, dict.fromkeys(range(len(dense.layers)), experts))

    weights = staticmethod(partial(expert_weights, names=NAMES))

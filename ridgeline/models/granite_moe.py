"""Granite 3.x MoE: Granite whose feed-forwards are mixtures of experts, in newer models beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import MLPSpec, ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.experts import ExpertNames, expert_weights, routing, with_experts
from ridgeline.models.granite import DEFAULTS as GRANITE_DEFAULTS
from ridgeline.models.granite import granite_like

DEFAULTS = {**GRANITE_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}

NAMES = ExpertNames(
    router="block_sparse_moe.router.layer",
    expert="block_sparse_moe",
    gate_up=("input_linear",),
    down="output_linear",
    shared="shared_mlp",
)


class GraniteMoe:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _spec("GraniteMoeForCausalLM", Config(config, DEFAULTS), shared=None)

    weights = staticmethod(partial(expert_weights, names=NAMES))


class GraniteMoeShared:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, {**DEFAULTS, "shared_intermediate_size": 0})
        size, activation = values.integer("shared_intermediate_size", at_least=0), values.activation("hidden_act")
        shared = MLPSpec(intermediate_size=size, activation=activation) if size else None
        return _spec("GraniteMoeSharedForCausalLM", values, shared)

    weights = staticmethod(partial(expert_weights, names=NAMES))


def _spec(architecture: str, config: Config, shared: MLPSpec | None) -> ModelSpec:
    dense = granite_like(architecture, config)
    experts = ExpertsSpec(
        routing=routing(config, renormalize=True),  # the softmax of the chosen experts' products alone
        intermediate_size=config.integer("intermediate_size"),
        activation=config.activation("hidden_act"),
        shared=shared,
    )
    return with_experts(dense, dict.fromkeys(range(len(dense.layers)), experts))

"""Mistral 4 and Large 3: latent attention whose queries grow with positions, and experts beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import LayerSpec, ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.experts import later_layers, mixture, routing, with_experts
from ridgeline.models.latent import DEFAULTS as LATENT_DEFAULTS
from ridgeline.models.latent import latent_like, latent_weights
from ridgeline.models.rope import growth

DEFAULTS = {
    **LATENT_DEFAULTS,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "max_position_embeddings": 1_048_576,
    "rope_interleave": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


class Mistral4:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        # The share of a head that rotates is that of its two parts, which latent attention says already
        parameters = {
            name: value for name, value in values.section("rope_parameters").entries.items() if "partial" not in name
        }
        values = values.changed(rope_parameters=parameters)
        dense = latent_like("Mistral4ForCausalLM", values, interleaved=values.boolean("rope_interleave"))
        grows = growth(values)

        def layer(old: LayerSpec) -> LayerSpec:
            return replace(old, mixer=replace(old.mixer, growth=grows))  # type: ignore[type-var]

        dense = replace(
            dense,
            layers=tuple(map(layer, dense.layers)),
            max_position_embeddings=values.integer("max_position_embeddings"),
        )
        how = routing(values, renormalize=values.boolean("norm_topk_prob"), group_score="top2")
        return with_experts(dense, dict.fromkeys(later_layers(values), mixture(values, how)))

    weights = staticmethod(latent_weights)

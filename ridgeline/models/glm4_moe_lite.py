"""GLM-4.7-Flash: latent attention, and mixtures of experts in all layers but the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.deepseek_mla import first_sparse, v3_like
from ridgeline.models.latent import DEFAULTS, latent_weights

GLM_DEFAULTS = {
    **DEFAULTS,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
    "moe_intermediate_size": 1536,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "max_position_embeddings": 202752,
}


class Glm4MoeLite:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config({**config, **first_sparse(config)}, GLM_DEFAULTS)
        return v3_like("Glm4MoeLiteForCausalLM", values)

    weights = staticmethod(latent_weights)

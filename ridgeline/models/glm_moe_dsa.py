"""GLM-5: GLM-4.7-Flash with a sparse indexer, for contexts so short that it selects every token.

A layer attends to the `index_topk` tokens that its indexer scores highest. Up to that many tokens are all of them, so
the indexer decides nothing; longer contexts are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.deepseek_mla import v3_like
from ridgeline.models.glm4_moe_lite import GLM_DEFAULTS, first_sparse
from ridgeline.models.latent import latent_weights

DEFAULTS = {
    **GLM_DEFAULTS,
    "q_lora_rank": 2048,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 2048,
    "index_topk": 2048,
}


class GlmMoeDsa:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config({**config, **first_sparse(config)}, DEFAULTS)
        spec = v3_like("GlmMoeDsaForCausalLM", values)
        selected = values.integer("index_topk")
        indexers = tuple(f"model.layers.{layer}.self_attn.indexer." for layer in range(len(spec.layers)))
        spec = replace(spec, unused=(*spec.unused, *indexers))
        if selected >= spec.max_position_embeddings:
            return spec
        why = f"its sparse indexer would select {selected} tokens (index_topk), and only attention to all tokens runs"
        return replace(spec, max_position_embeddings=selected, context_limit=why)

    weights = staticmethod(latent_weights)

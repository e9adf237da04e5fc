"""GLM-5: GLM-4.7-Flash with an indexer, which chooses the tokens that are attended to. Layers may share a choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.deepseek_mla import first_sparse, v3_like
from ridgeline.models.deepseek_v32 import INDEXER_DEFAULTS
from ridgeline.models.glm4_moe_lite import GLM_DEFAULTS
from ridgeline.models.latent import latent_weights, with_indexer

DEFAULTS = {
    **GLM_DEFAULTS,
    **INDEXER_DEFAULTS,
    "q_lora_rank": 2048,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 2048,
    "index_n_heads": 32,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}
LETTERS = {"F": "full", "S": "shared"}


class GlmMoeDsa:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config({**config, **first_sparse(config)}, DEFAULTS)
        spec = v3_like("GlmMoeDsaForCausalLM", values)
        return with_indexer(spec, values, interleaved=True, shared=_shared(values, len(spec.layers)))

    weights = staticmethod(latent_weights)


def _shared(config: Config, layers: int) -> set[int]:
    """Return the layers that take an earlier layer's choice. The config has a list of them, or a pattern of letters, or
    says how often a layer chooses, and from which on."""
    types = config.raw("indexer_types")
    if types is None and (pattern := config.raw("index_topk_pattern")) is not None:
        types = [LETTERS.get(each, each) for each in pattern] if isinstance(pattern, str) else pattern
    if types is None:
        often, first = config.integer("index_topk_freq"), config.integer("index_skip_topk_offset", at_least=0)
        return {layer for layer in range(layers) if max(layer - first + 1, 0) % often}
    known = isinstance(types, list) and len(types) == layers and all(each in LETTERS.values() for each in types)
    if not known or types[0] != "full":
        raise wrong("indexer_types", types, f"full or shared for each of the {layers} layers, and full for the first")
    return {layer for layer, kind in enumerate(types) if kind == "shared"}

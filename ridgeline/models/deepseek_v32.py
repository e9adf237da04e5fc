"""DeepSeek-V3.2: DeepSeek-V3 with an indexer, which chooses the tokens that are attended to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.deepseek_mla import V3_DEFAULTS, first_sparse, v3_like
from ridgeline.models.latent import latent_weights, with_indexer

INDEXER_DEFAULTS = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}


class DeepseekV32:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config({**config, **first_sparse(config)}, {**V3_DEFAULTS, **INDEXER_DEFAULTS})
        return with_indexer(v3_like("DeepseekV32ForCausalLM", values), values, interleaved=False)

    weights = staticmethod(latent_weights)

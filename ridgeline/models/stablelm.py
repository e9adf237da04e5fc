"""StableLM: Llama with LayerNorm, and a quarter of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import ModelSpec, NormSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, changed, llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25,
}


class StableLm:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        values.refuse("qk_layernorm", "queries and keys have no LayerNorm of each head here")
        norm = NormSpec(kind="layer", eps=values.number("layer_norm_eps"))
        parallel = values.boolean("use_parallel_residual")
        return changed(
            llama_like("StableLmForCausalLM", values, norm=norm),
            {"qkv_bias": values.boolean("use_qkv_bias")},
            parallel=parallel,
            one_norm=parallel,
        )

    weights = staticmethod(Llama.weights)

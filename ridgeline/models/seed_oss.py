"""Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, changed, llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
}


class SeedOss:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        spec = llama_like("SeedOssForCausalLM", values, mlp_bias=values.boolean("mlp_bias"))
        biases = {"qkv_bias": values.boolean("attention_bias"), "out_bias": values.boolean("attention_out_bias")}
        return changed(spec, biases)

    weights = staticmethod(Llama.weights)

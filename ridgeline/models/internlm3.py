"""InternLM3: Llama with biases where its config says so, those of queries, keys and values apart from the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, changed, llama_like

DEFAULTS = {**LLAMA_DEFAULTS, "max_position_embeddings": 32768}


class InternLM3:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        bias = values.boolean("bias")
        spec = llama_like("InternLM3ForCausalLM", values, mlp_bias=bias)
        return changed(spec, {"qkv_bias": values.boolean("qkv_bias"), "out_bias": bias})

    weights = staticmethod(Llama.weights)

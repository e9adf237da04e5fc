"""Mistral: Llama with a sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


class Mistral:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        values.refuse("layer_types", "MistralForCausalLM has one sliding_window for all layers")
        window = values.integer("sliding_window") if "sliding_window" in values else None
        return llama_like("MistralForCausalLM", values, windows=[window] * values.integer("num_hidden_layers"))

    weights = staticmethod(Llama.weights)

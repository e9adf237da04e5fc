"""Qwen2 and 2.5: Llama with biases on queries, keys and values, and a sliding window on some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, llama_like
from ridgeline.models.qwen3 import windows

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


class Qwen2:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        spec = llama_like("Qwen2ForCausalLM", values, windows=windows(values))
        layers = (replace(layer, mixer=replace(layer.attention, qkv_bias=True)) for layer in spec.layers)
        return replace(spec, layers=tuple(layers))

    weights = staticmethod(Llama.weights)

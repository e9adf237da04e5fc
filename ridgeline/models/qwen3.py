"""Qwen3 (dense): Llama with norms on queries and keys, and a sliding window on some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, llama_like
from ridgeline.models.windows import later_windows

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "head_dim": 128,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


class Qwen3:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        return llama_like(
            "Qwen3ForCausalLM",
            values,
            attention_bias=values.boolean("attention_bias"),
            qk_norm=True,
            windows=windows(values),
        )

    weights = staticmethod(Llama.weights)


def windows(config: Config) -> list[int | None]:
    """Return `layer_types` if the checkpoint has it, else the window on every layer from `max_window_layers` on."""
    num_layers = config.integer("num_hidden_layers")
    if not config.boolean("use_sliding_window"):
        if "sliding_attention" in (config.layer_types(num_layers) or ()):
            config.refuse("layer_types", "it has sliding_attention but use_sliding_window is false")
        return [None] * num_layers
    return later_windows(config)

"""SmolLM3: Llama whose every fourth layer has no rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, llama_like
from ridgeline.models.windows import listed_windows

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2_000_000.0,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}


class SmolLM3:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        rotated = _rotated(values)
        spec = llama_like(
            "SmolLM3ForCausalLM",
            values,
            attention_bias=values.boolean("attention_bias"),
            mlp_bias=values.boolean("mlp_bias"),
            windows=_windows(values, rotated),
        )
        layers = (
            layer if turns else replace(layer, mixer=replace(layer.attention, rope=None))
            for layer, turns in zip(spec.layers, rotated, strict=True)
        )
        return replace(spec, layers=tuple(layers))

    weights = staticmethod(Llama.weights)


def _rotated(config: Config) -> list[bool]:
    """Return one flag per layer. In spite of its name, the checkpoint's `no_rope_layers` has 1 where a layer is
    rotated."""
    num_layers = config.integer("num_hidden_layers")
    if "no_rope_layers" not in config:
        interval = config.integer("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    flags = config.raw("no_rope_layers")
    if not isinstance(flags, list) or len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise wrong("no_rope_layers", flags, f"{num_layers} entries, each 0 or 1")
    return [bool(flag) for flag in flags]


def _windows(config: Config, rotated: list[bool]) -> list[int | None]:
    """Return each layer's window. Unless `layer_types` says otherwise, a window is on the layers without rotation."""
    types = config.layer_types(len(rotated))
    if not config.boolean("use_sliding_window") or "sliding_window" not in config:
        if "sliding_attention" in (types or ()):
            config.refuse("layer_types", "it has sliding_attention but no sliding window is in use")
        return [None] * len(rotated)
    window = config.integer("sliding_window")
    if types is None:
        return [None if turns else window for turns in rotated]
    return listed_windows(types, window)

"""Command R and A (Cohere 1 and 2): LayerNorm without biases, and attention and feed-forward side by side. Neighbouring
pairs rotate.

The second one has a window on three of four layers, and no positions on the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ridgeline.core.specs.model import ModelSpec, NormSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Names, changed, decoder_weights, llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
DEFAULTS_1 = {**DEFAULTS, "rope_theta": 500_000.0}
DEFAULTS_2 = {**DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4}
NAMES = Names(interleaved=True)


class Cohere:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS_1)
        values.refuse("use_qk_norm", "queries and keys have no LayerNorm of each head here")
        return _cohere("CohereForCausalLM", values, [None] * values.integer("num_hidden_layers"))

    weights = staticmethod(partial(decoder_weights, names=NAMES))


class Cohere2:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS_2)
        spec = _cohere("Cohere2ForCausalLM", values, pattern_windows(values))
        return unrotated_without_window(spec)

    weights = staticmethod(partial(decoder_weights, names=NAMES))


def pattern_windows(config: Config) -> list[int | None]:
    """Return each layer's window: as `layer_types` says, or on all but every `sliding_window_pattern`-th layer."""
    count = config.integer("num_hidden_layers")
    window = config.integer("sliding_window") if "sliding_window" in config else None
    types = config.layer_types(count)
    if types is None:
        every = config.integer("sliding_window_pattern")
        return [window if (layer + 1) % every else None for layer in range(count)]
    return [window if kind == "sliding_attention" else None for kind in types]


def unrotated_without_window(spec: ModelSpec) -> ModelSpec:
    """Return the model with no rotation on layers that see everything."""
    layers = (
        layer if layer.attention.window is not None else replace(layer, mixer=replace(layer.attention, rope=None))
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def _cohere(architecture: str, config: Config, windows: list[int | None]) -> ModelSpec:
    norm = NormSpec(kind="layer", eps=config.number("layer_norm_eps"), biasless=True)
    bias = config.boolean("attention_bias")
    spec = llama_like(architecture, config, attention_bias=bias, windows=windows, norm=norm)
    return replace(changed(spec, parallel=True, one_norm=True), logits_multiplier=config.number("logit_scale"))

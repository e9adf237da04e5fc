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
from ridgeline.models.windows import pattern_windows, unrotated_without_window

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


def _cohere(architecture: str, config: Config, windows: list[int | None]) -> ModelSpec:
    norm = NormSpec(kind="layer", eps=config.number("layer_norm_eps"), biasless=True)
    bias = config.boolean("attention_bias")
    spec = llama_like(architecture, config, attention_bias=bias, windows=windows, norm=norm)
    return replace(changed(spec, parallel=True, one_norm=True), logits_multiplier=config.number("logit_scale"))

"""OLMo-2: Llama with norms after each part instead of before, and on all queries and all keys together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, llama_like

DEFAULTS = {**LLAMA_DEFAULTS, "rms_norm_eps": 1e-5}


class Olmo2:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        spec = llama_like("Olmo2ForCausalLM", values, attention_bias=values.boolean("attention_bias"), qk_norm=True)
        layers = (
            replace(layer, mixer=replace(layer.attention, qk_norm_whole=True), norms="after") for layer in spec.layers
        )
        return replace(spec, layers=tuple(layers))

    weights = staticmethod(Llama.weights)

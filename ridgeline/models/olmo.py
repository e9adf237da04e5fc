"""OLMo (the first): Llama with LayerNorm that has no weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import ModelSpec, NormSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, llama_like

EPS = 1e-5  # no config has it


class Olmo:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, LLAMA_DEFAULTS)
        values.refuse("clip_qkv", "queries, keys and values are not clipped")
        bias, norm = values.boolean("attention_bias"), NormSpec(kind="layer", eps=EPS, weightless=True)
        return llama_like("OlmoForCausalLM", values, attention_bias=bias, norm=norm)

    weights = staticmethod(Llama.weights)

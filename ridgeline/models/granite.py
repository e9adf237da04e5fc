"""Granite 3.x: Llama with multipliers on embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


class Granite:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        return granite_like("GraniteForCausalLM", values, mlp_bias=values.boolean("mlp_bias"))

    weights = staticmethod(Llama.weights)


def granite_like(architecture: str, config: Config, *, mlp_bias: bool = False) -> ModelSpec:
    """Return a Llama with the config's multipliers."""
    bias = config.boolean("attention_bias")
    spec = llama_like(architecture, config, attention_bias=bias, mlp_bias=mlp_bias)
    scale, residual = config.number("attention_multiplier"), config.number("residual_multiplier")
    layers = (
        replace(layer, mixer=replace(layer.attention, scale=scale), residual_multiplier=residual)
        for layer in spec.layers
    )
    return replace(
        spec,
        layers=tuple(layers),
        embedding_multiplier=config.number("embedding_multiplier"),
        logits_multiplier=1 / config.number("logits_scaling"),
    )

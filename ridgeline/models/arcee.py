"""Arcee (AFM): Llama whose feed-forwards have no gate and square their rectified inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, llama_like

DEFAULTS = {**LLAMA_DEFAULTS, "hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}


class Arcee:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        return llama_like(
            "ArceeForCausalLM",
            values,
            attention_bias=values.boolean("attention_bias"),
            mlp_bias=values.boolean("mlp_bias"),
            gated=False,
        )

    weights = staticmethod(Llama.weights)

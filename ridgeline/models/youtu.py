"""Youtu-LLM: Llama with latent attention in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.latent import DEFAULTS as LATENT_DEFAULTS
from ridgeline.models.latent import latent_like, latent_weights

DEFAULTS = {
    **LATENT_DEFAULTS,
    "q_lora_rank": 1536,
    "max_position_embeddings": 131072,
    "rope_interleave": True,
    "tie_word_embeddings": True,
}


class Youtu:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        return latent_like("YoutuForCausalLM", values, interleaved=values.boolean("rope_interleave"))

    weights = staticmethod(latent_weights)

"""Phi-3, 3.5 and 4: Llama whose projections are stored fused, with LongRoPE; Phi-4-mini rotates a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import ModelSpec, Source, WeightMap
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}


class Phi3:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        values.refuse("attention_bias", "Phi3ForCausalLM has no biases")
        window = values.integer("sliding_window") if "sliding_window" in values else None
        return llama_like("Phi3ForCausalLM", values, windows=[window] * values.integer("num_hidden_layers"))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        names = Llama.weights(spec)
        for layer in range(len(spec.layers)):
            for ours, theirs in (("mixer.qkv", "self_attn.qkv_proj"), ("feed_forward.gate_up", "mlp.gate_up_proj")):
                names[f"layers.{layer}.{ours}.weight"] = (Source(name=f"model.layers.{layer}.{theirs}.weight"),)
        return names

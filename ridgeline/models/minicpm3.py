"""MiniCPM3: Llama with latent attention, and multipliers on embeddings, residuals and logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config, head_width
from ridgeline.models.latent import DEFAULTS as LATENT_DEFAULTS
from ridgeline.models.latent import latent_like, latent_weights

DEFAULTS = {
    **{name: value for name, value in LATENT_DEFAULTS.items() if name != "v_head_dim"},
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}


class MiniCPM3:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        if "v_head_dim" not in values:
            values = values.changed(v_head_dim=head_width(values, "hidden_size", "num_attention_heads"))
        plain = latent_like("MiniCPM3ForCausalLM", values, interleaved=False, mlp_bias=values.boolean("mlp_bias"))
        depth = math.sqrt(len(plain.layers))
        multiplier = values.number("scale_depth", depth) / depth
        base = values.integer("dim_model_base") if "dim_model_base" in values else plain.hidden_size
        return replace(
            plain,
            layers=tuple(replace(layer, residual_multiplier=multiplier) for layer in plain.layers),
            embedding_multiplier=values.number("scale_emb"),
            logits_multiplier=base / plain.hidden_size,
        )

    weights = staticmethod(latent_weights)

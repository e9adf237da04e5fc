"""GLM-4 (dense): Llama with a part of each head rotated in neighbouring pairs, gate and up in one tensor.

The models of 2025 (`Glm4ForCausalLM`) have norms behind each part as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Names, changed, decoder_weights, llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
NAMES = Names(gate_up=("mlp.gate_up_proj",), interleaved=True)
NORMS = {
    "mixer_norm": "input_layernorm",
    "mixer_post_norm": "post_self_attn_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward_post_norm": "post_mlp_layernorm",
}


class Glm:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _glm("GlmForCausalLM", config)

    weights = staticmethod(partial(decoder_weights, names=NAMES))


class Glm4:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return changed(_glm("Glm4ForCausalLM", config), norms="both")

    weights = staticmethod(partial(decoder_weights, names=replace(NAMES, norms=NORMS)))


def _glm(architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    values = Config(config, DEFAULTS)
    return changed(llama_like(architecture, values), {"qkv_bias": values.boolean("attention_bias")})

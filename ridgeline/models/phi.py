"""Phi-1, 1.5 and 2: LayerNorm and biases everywhere, both parts side by side, a part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ridgeline.core.specs.model import ModelSpec, NormSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Names, changed, decoder_weights, llama_like

DEFAULTS = {**LLAMA_DEFAULTS, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
NAMES = Names(final_norm="model.final_layernorm", out="self_attn.dense", up="mlp.fc1", down="mlp.fc2")


class Phi:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        values.refuse("qk_layernorm", "queries and keys have no LayerNorm of each head here")
        norm = NormSpec(kind="layer", eps=values.number("layer_norm_eps"))
        spec = llama_like("PhiForCausalLM", values, attention_bias=True, mlp_bias=True, norm=norm, gated=False)
        return replace(changed(spec, parallel=True, one_norm=True), unembed_bias=True)

    weights = staticmethod(partial(decoder_weights, names=NAMES))

"""MiniMax-M2: Llama with norms on all queries and all keys, half of each head rotated, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.experts import drafting_layers, expert_weights, routing, with_experts
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import llama_like
from ridgeline.models.mixtral import NAMES

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 5e6,
    "max_position_embeddings": 196608,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}

_ONLY = {"scoring_func": "sigmoid", "qk_norm_type": "per_layer", "use_routing_bias": True, "use_qk_norm": True}


class MiniMaxM2:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = _checked(config)
        dense = llama_like("MiniMaxM2ForCausalLM", values, qk_norm=True)
        layers = (replace(layer, mixer=replace(layer.attention, qk_norm_whole=True)) for layer in dense.layers)
        experts = ExpertsSpec(
            routing=routing(values, score="sigmoid", renormalize=True, correction=True),
            intermediate_size=values.integer("intermediate_size"),
            activation=values.activation("hidden_act"),
        )
        dense = replace(dense, layers=tuple(layers), unused=drafting_layers(values, "num_mtp_modules"))
        return with_experts(dense, dict.fromkeys(range(len(dense.layers)), experts))

    weights = staticmethod(partial(expert_weights, names=NAMES))


def _checked(config: Mapping[str, Any]) -> Config:
    """Return the config, in which `rotary_dim` has become a share of the head. Raise ModelLoadError for variants of
    which no model was published."""
    values = Config(config, DEFAULTS)
    for name, only in _ONLY.items():
        if name in values and values.raw(name) != only:
            raise wrong(name, values.raw(name), str(only).lower())
    values.refuse("shared_intermediate_size", "no shared expert is known for this family")
    kinds = values.raw("attn_type_list")
    if kinds and kinds != [1] * values.integer("num_hidden_layers"):
        raise wrong("attn_type_list", kinds, "1 (softmax attention) for each layer")
    if "rotary_dim" not in values:
        return values
    share = values.integer("rotary_dim") / values.integer("head_dim")
    return Config(config, {**DEFAULTS, "partial_rotary_factor": share})

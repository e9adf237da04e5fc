"""Gemma 2 and 3 (text): norms before and after each part, windows on most layers, scaled embeddings, soft caps.

Gemma 2 has the caps; Gemma 3 norms on queries and keys instead, and a rotation of its own on layers with a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import LayerSpec, ModelSpec, NormSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
DEFAULTS_2 = {
    **DEFAULTS,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
DEFAULTS_3 = {
    **DEFAULTS,
    "max_position_embeddings": 131072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
}


class Gemma2:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _gemma("Gemma2ForCausalLM", config, DEFAULTS_2, every=2)

    weights = staticmethod(Llama.weights)


class Gemma3:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS_3)
        if "rope_parameters" not in values:  # one rotation for layers without a window and one for layers with it
            values.section("rope_scaling")  # complains if it is no dictionary
            full = {"rope_theta": values.number("rope_theta"), **(values.raw("rope_scaling") or {})}
            local = {"rope_theta": values.number("rope_local_base_freq")}
            config = {**config, "rope_parameters": {"full_attention": full, "sliding_attention": local}}
        every = values.integer("sliding_window_pattern")
        # Gemma 3's configs have the entry, but its layers ignore it
        config = {**config, "attn_logit_softcapping": None}
        spec = _gemma("Gemma3ForCausalLM", config, DEFAULTS_3, every=every, qk_norm=True)
        # Here the context is the one after the scaling, not the one before it.
        return replace(spec, max_position_embeddings=values.integer("max_position_embeddings"))

    weights = staticmethod(Llama.weights)


def _gemma(
    architecture: str, config: Mapping[str, Any], defaults: Mapping[str, Any], *, every: int, qk_norm: bool = False
) -> ModelSpec:
    """Return the spec. Unless the checkpoint says otherwise, one layer in `every` sees everything."""
    values = Config(config, defaults)
    values.refuse("use_bidirectional_attention", "only causal attention runs")
    activation = values.raw("hidden_activation") or DEFAULTS["hidden_activation"]
    values = Config({**config, "hidden_act": activation}, defaults)
    spec = llama_like(
        architecture,
        values,
        attention_bias=values.boolean("attention_bias"),
        qk_norm=qk_norm,
        windows=_windows(values, every),
    )
    norm = replace(spec.final_norm, offset=1.0)
    scale = values.number("query_pre_attn_scalar") ** -0.5
    softcap = values.number("attn_logit_softcapping") if "attn_logit_softcapping" in values else None
    return replace(
        spec,
        layers=tuple(_layer(layer, norm, scale, softcap) for layer in spec.layers),
        final_norm=norm,
        embedding_multiplier=spec.hidden_size**0.5,
        logits_softcap=values.number("final_logit_softcapping") if "final_logit_softcapping" in values else None,
    )


def _layer(layer: LayerSpec, norm: NormSpec, scale: float, softcap: float | None) -> LayerSpec:
    qk_norm = None if layer.attention.qk_norm is None else norm
    mixer = replace(layer.attention, scale=scale, softcap=softcap, qk_norm=qk_norm)
    return replace(layer, mixer=mixer, norm=norm, norms="both")


def _windows(config: Config, every: int) -> list[int | None]:
    num_layers = config.integer("num_hidden_layers")
    window = config.integer("sliding_window") if "sliding_window" in config else None
    types = config.layer_types(num_layers)
    if types is None:
        return [window if (layer + 1) % every else None for layer in range(num_layers)]
    return [window if kind == "sliding_attention" else None for kind in types]

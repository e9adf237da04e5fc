"""Qwen3.5 and 3.6: Qwen3-Next with plain feed-forwards, or with experts in all layers, and the tower of Qwen3-VL.

Of rotations, which have three numbers for a token's position, text alone has three equal ones, which is a plain
rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import AttentionSpec, ModelSpec, WeightMap
from ridgeline.models.config import Config
from ridgeline.models.experts import with_experts
from ridgeline.models.qwen3_next import DEFAULTS, UNUSED, Qwen3Next, gated_experts, gated_hybrid
from ridgeline.models.qwen_vl import qwen3_tower, qwen3_tower_weights
from ridgeline.models.rope import axes
from ridgeline.models.wrapped import text_config, text_weights

DENSE_DEFAULTS = {**DEFAULTS, "num_key_value_heads": 4, "intermediate_size": 12288}
MIXTURE_DEFAULTS = {**DEFAULTS, "num_experts_per_tok": 8, "num_experts": 256}

_TOWER = "model.visual."


class Qwen3_5:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _dense("Qwen3_5ForCausalLM", config)

    weights = staticmethod(Qwen3Next.weights)


class Qwen3_5Moe:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _mixture("Qwen3_5MoeForCausalLM", config)

    weights = staticmethod(Qwen3Next.weights)


class Qwen3_5Multimodal:
    """The text model with its tower. Without a vision_config it is the text model alone."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _seeing(_dense("Qwen3_5ForConditionalGeneration", text_config(config)), config)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        tower = {} if spec.tower is None else qwen3_tower_weights(spec)
        return {**text_weights(Qwen3Next.weights(spec)), **tower}


class Qwen3_5MoeMultimodal:
    """The same with experts."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _seeing(_mixture("Qwen3_5MoeForConditionalGeneration", text_config(config)), config)

    weights = staticmethod(Qwen3_5Multimodal.weights)


def _seeing(text: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """Return the text model with its tower, whose heads rotate by three axes."""
    if not config.get("vision_config"):
        return text
    layers, values = [], Config(text_config(config))
    for layer in text.layers:
        if isinstance(layer.mixer, AttentionSpec) and (rope := layer.mixer.rope) is not None:
            turned = replace(rope, axes=axes(values, rope.rotary_dim // 2))
            layer = replace(layer, mixer=replace(layer.mixer, rope=turned))
        layers.append(layer)
    vision = {"deepstack_visual_indexes": [], **config["vision_config"]}
    tower = qwen3_tower({**config, "vision_config": vision}, text)
    return replace(text, layers=tuple(layers), tower=tower, unused=UNUSED)


def _dense(architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    dense = gated_hybrid(architecture, Config(config, DENSE_DEFAULTS), packed=False)
    return replace(dense, unused=(*UNUSED, _TOWER))


def _mixture(architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    # What these families do not have: a plain feed-forward, and weights of experts that are not divided by their sum
    values = Config({**config, "intermediate_size": 1, "norm_topk_prob": True}, MIXTURE_DEFAULTS)
    dense = gated_hybrid(architecture, values, packed=False)
    experts = dict.fromkeys(range(len(dense.layers)), gated_experts(values))
    return replace(with_experts(dense, experts), unused=(*UNUSED, _TOWER))

"""Gemma 1, 2 and 3: scaled embeddings and, from 2 on, norms on both sides of each part, and windows.

Gemma 2 has soft caps; Gemma 3 norms on queries and keys instead, and a rotation of its own on layers with a window. Its
pictures come from SigLIP's tower, and their tokens see each other both ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from ridgeline.core.specs.model import LayerSpec, ModelSpec, NormSpec, Source, WeightMap
from ridgeline.core.specs.tower import ProjectorSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, llama_like
from ridgeline.models.names import named
from ridgeline.models.siglip import DEFAULTS as SIGLIP
from ridgeline.models.siglip import siglip_tower, siglip_weights
from ridgeline.models.windows import pattern_windows
from ridgeline.models.wrapped import TOWERS, text_config, text_weights

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
DEFAULTS_1 = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
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


# What the text model inside a larger one has where its config says nothing
NESTED_3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}


class Gemma:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS_1)
        values.refuse("use_bidirectional_attention", "only causal attention runs")
        # The first checkpoints name the exact GELU and were trained with its approximation
        named = values.raw("hidden_activation") or values.raw("hidden_act")
        values = values.changed(hidden_act="gelu_pytorch_tanh" if named in (None, "silu", "gelu") else named)
        bias = values.boolean("attention_bias")
        norm = NormSpec(eps=values.number("rms_norm_eps"), offset=1.0)
        spec = llama_like("GemmaForCausalLM", values, attention_bias=bias, norm=norm)
        return replace(spec, embedding_multiplier=spec.hidden_size**0.5)

    weights = staticmethod(Llama.weights)


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
        both_ways = values.boolean("use_bidirectional_attention")
        config = {**config, "use_bidirectional_attention": None}
        spec = _gemma("Gemma3ForCausalLM", config, DEFAULTS_3, every=every, qk_norm=True)
        spec = _both_ways(spec) if both_ways else spec
        # Here the context is the one after the scaling, not the one before it.
        return replace(spec, max_position_embeddings=values.integer("max_position_embeddings"))

    weights = staticmethod(Llama.weights)


class Gemma3Multimodal:
    """The text model with SigLIP's tower. Without a vision_config it is the text model alone."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        spec = Gemma3.spec(text_config(config, NESTED_3))
        spec = replace(spec, architecture="Gemma3ForConditionalGeneration", unused=TOWERS)
        if not config.get("vision_config"):
            return spec
        values = Config(config, {"mm_tokens_per_image": 256})
        vision = Config(values.section("vision_config").entries, SIGLIP)
        tokens, side = (
            values.integer("mm_tokens_per_image"),
            vision.integer("image_size") // vision.integer("patch_size"),
        )
        merge = side // max(1, isqrt(tokens))
        if merge**2 * tokens != side**2:
            raise values.wrong("mm_tokens_per_image", tokens, f"the number of squares of {side} x {side} patches")
        projector = ProjectorSpec(
            outputs=spec.hidden_size,
            merge=merge,
            joined="mean",
            norm=NormSpec(eps=vision.number("layer_norm_eps"), offset=1.0),
            norm_merged=True,
            bias=False,
        )
        head = ("vision_tower.head.", "vision_tower.vision_model.head.")
        return replace(seeing_ahead(spec), tower=siglip_tower(vision, projector), unused=head)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = text_weights(Llama.weights(spec), whole=True)
        if spec.tower is None:
            return found
        projection = Source(name="multi_modal_projector.mm_input_projection_weight", transpose=True)
        norm = named("tower.projector", "multi_modal_projector", {"norm": "mm_soft_emb_norm"})
        return (
            found | siglip_weights(spec.tower, "vision_tower") | norm | {"tower.projector.down.weight": (projection,)}
        )


def seeing_ahead(spec: ModelSpec) -> ModelSpec:
    """Return the model with pictures whose tokens see each other both ways, in all layers."""
    layers = (replace(layer, mixer=replace(layer.attention, ahead=True)) for layer in spec.layers)
    return replace(spec, layers=tuple(layers), both_ways="pictures")


def _both_ways(spec: ModelSpec) -> ModelSpec:
    """Return the model with tokens that see those behind them, within half a window to either side (EmbeddingGemma)."""
    layers = (
        replace(
            layer, mixer=replace(each, bidirectional=True, window=None if each.window is None else each.window // 2 + 1)
        )
        for layer in spec.layers
        for each in (layer.attention,)
    )
    return replace(spec, layers=tuple(layers))


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
        windows=pattern_windows(values, every),
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

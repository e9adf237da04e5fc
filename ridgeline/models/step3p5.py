"""Step 3.5 and 3.7 (text): a gate for each head, more heads on layers with windows, and experts with bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import Bounded, LayerSpec, MLPSpec, ModelSpec, NormSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.experts import ExpertNames, drafting_layers, expert_weights, routing, typed_layers, with_experts
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import llama_like
from ridgeline.models.wrapped import TOWERS, text_config

Bound = Literal["silu"] | Bounded

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_router_scaling_factor": 1.0,
}
SPELLINGS = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dim": "share_expert_dims",
}
_ONLY = {
    "use_head_wise_attn_gate": True,
    "use_qk_norm": True,
    "zero_centered": True,
    "norm_expert_weight": True,
    "use_moe_router_bias": True,
    "moe_router_activation": "sigmoid",
}
BOUNDS: dict[float, Bound] = {0: "silu", 7: "silu_clamped_7", 16: "silu_clamped_16"}
FIRST_SPARSE = 3  # unless the checkpoint says otherwise
LONGEST = 2000  # characters of a list of layers that is written as text
NAMES = ExpertNames(router="moe.gate", expert="moe", shared="share_expert", correction="moe.router_bias")
_TOWERS = (*TOWERS, "vision_model.", "vit_large_projector.", "model.vision_model.")


class Step3p5:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _spec("Step3p5ForCausalLM", config)

    weights = staticmethod(partial(expert_weights, names=NAMES))


class Step3p7Multimodal:
    """The text model of a checkpoint that also has a tower for images."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        spec = _spec("Step3p7ForConditionalGeneration", text_config(config))
        return replace(spec, unused=(*spec.unused, *_TOWERS))

    weights = staticmethod(partial(expert_weights, names=NAMES))


def _spec(architecture: str, config: Mapping[str, Any]) -> ModelSpec:
    values = _checked(Config(config, DEFAULTS, SPELLINGS))
    count = values.integer("num_hidden_layers")
    types = _types(values, count)
    values = values.changed(rope_parameters=_rotations(values, types), rope_scaling=None)
    kinds = {kind: _layer(architecture, values, kind) for kind in dict.fromkeys(["full_attention", *types])}
    sparse = _sparse(values, count)
    inner, shared = _bounds(values, "swiglu_limits", count), _bounds(values, "swiglu_limits_shared", count)
    layers = [
        replace(kinds[kind].layers[0], feed_forward=replace(kinds[kind].layers[0].mlp, activation=bound))
        for kind, bound in zip(types, shared, strict=True)
    ]
    base = kinds["full_attention"]
    dense = replace(base, layers=tuple(layers), unused=drafting_layers(values, "num_nextn_predict_layers"))
    return with_experts(dense, {layer: _experts(values, inner[layer], shared[layer]) for layer in sparse})


def _checked(config: Config) -> Config:
    for name, only in _ONLY.items():
        if name in config and config.raw(name) != only:
            raise config.wrong(name, config.raw(name), str(only).lower())
    gating = config.entries.get("gating", True)  # transformers' name for the form of attention's gates
    if gating is not True and gating != "per-head":
        raise wrong("gating", gating, "true or per-head, with which each head has one gate")
    for name in ("attention_bias", "mlp_bias", "sink", "use_bidirectional_attention"):
        config.refuse(name, "no model of this family has it")
    if config.activation("hidden_act") != "silu":
        raise wrong("hidden_act", config.raw("hidden_act"), "silu")
    return config


def _layer(architecture: str, config: Config, kind: str) -> ModelSpec:
    """Return a model of one layer of a type."""
    window = None
    if kind == "sliding_attention":
        window = config.integer("sliding_window")
        own = config.section("attention_other_setting")
        heads = config.raw("num_sliding_attention_heads") or own.raw("num_attention_heads")
        config = config if heads is None else config.changed(num_attention_heads=heads)
    norm = NormSpec(eps=config.number("rms_norm_eps"), offset=1.0)
    spec = llama_like(architecture, config, qk_norm=True, windows=[window], norm=norm)
    scale = config.number("query_pre_attn_scalar", config.integer("head_dim")) ** -0.5
    mixer = replace(spec.layers[0].attention, head_gates=True, scale=scale)
    return replace(spec, layers=(LayerSpec(mixer=mixer, feed_forward=spec.layers[0].feed_forward, norm=norm),))


def _experts(config: Config, bound: Bound, shared: Bound) -> ExpertsSpec:
    how = routing(config, score="sigmoid", renormalize=True, correction=True)
    return ExpertsSpec(
        routing=replace(how, scale=config.number("moe_router_scaling_factor")),
        intermediate_size=config.integer("moe_intermediate_size"),
        activation=bound,
        shared=MLPSpec(intermediate_size=config.integer("share_expert_dim"), activation=shared),
    )


def _trimmed(config: Config, name: str, count: int) -> list[Any] | None:
    """Return a list with an entry for each layer, without those of the layers that draft."""
    found = config.raw(name)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) < count:
        raise config.wrong(name, found, f"a list with an entry for each of the {count} layers")
    return found[:count]


def _types(config: Config, count: int) -> list[str]:
    types = _trimmed(config, "layer_types", count)
    return config.changed(layer_types=types).layer_types(count) or ["full_attention"] * count


def _rotations(config: Config, types: list[str]) -> dict[str, Any]:
    """Return the rotation of each type of layers. Files may list a number for each layer."""
    found = config.section("rope_parameters").entries
    if all(kind in found for kind in types):
        return dict(found)
    thetas, shares = config.raw("rope_theta"), _trimmed(config, "partial_rotary_factors", len(types))
    if isinstance(thetas, list):
        thetas = _trimmed(config, "rope_theta", len(types))
    scaled = config.raw("yarn_only_types") or ["full_attention"]
    rotations: dict[str, Any] = {}
    for kind in dict.fromkeys(types):
        layer = types.index(kind)
        rotations[kind] = {"rope_theta": thetas[layer] if isinstance(thetas, list) else thetas}
        if shares is not None:
            rotations[kind]["partial_rotary_factor"] = shares[layer]
        if isinstance(scaled, list) and kind in scaled:
            rotations[kind] |= config.section("rope_scaling").entries
    rotations.setdefault("full_attention", next(iter(rotations.values())))
    return rotations


def _sparse(config: Config, count: int) -> list[int]:
    """Return the layers that have experts."""
    types = _trimmed(config, "mlp_layer_types", count)
    if types is not None:
        return typed_layers(config.changed(mlp_layer_types=types)) or []
    told = config.raw("moe_layers_enum")
    if told is None:
        return list(range(FIRST_SPARSE, count))
    items = told.split(",") if isinstance(told, str) and len(told) <= LONGEST else told
    try:
        layers = sorted({int(item) for item in items if str(item).strip()})
    except (TypeError, ValueError):
        raise wrong("moe_layers_enum", told, "the numbers of layers, with commas between them") from None
    return [layer for layer in layers if 0 <= layer < count]


def _bounds(config: Config, name: str, count: int) -> list[Bound]:
    """Return the activation of each layer, which says its bound."""
    limits = _trimmed(config, name, count) or [0] * count
    for limit in limits:
        if (limit or 0) not in BOUNDS:
            raise ModelLoadError(f"config.json has {limit!r} in {name}; the bounds that we compute are 7 and 16.")
    return [BOUNDS[limit or 0] for limit in limits]

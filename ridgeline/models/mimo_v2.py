"""MiMo-V2: windows and sinks on most layers, values narrower than keys, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ridgeline.core.specs.model import LayerSpec, ModelSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.experts import corrected_routing, expert_weights, mixture, typed_layers, with_experts
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Names, llama_like
from ridgeline.models.windows import listed_windows

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 5e6,
    "swa_rope_theta": 1e4,
    "partial_rotary_factor": 0.334,
    "attention_value_scale": 0.707,
    "head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "add_swa_attention_sink_bias": True,
}
SPELLINGS = {"rms_norm_eps": "layernorm_epsilon"}
OF_WINDOWS = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")  # with "swa_" before the name
SEES_ALL = 6  # unless the checkpoint says otherwise, the first layer and one in so many see everything


class MiMoV2:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = _rotated(Config(config, DEFAULTS, SPELLINGS))
        values.refuse("n_shared_experts", "no shared expert is known for this family")
        if values.raw("scoring_func") not in (None, "sigmoid"):
            raise wrong("scoring_func", values.raw("scoring_func"), "sigmoid")
        count = values.integer("num_hidden_layers")
        windows = _windows(values, count)
        full = _alike(values, values, None, sinks=values.boolean("add_full_attention_sink_bias"))
        if any(windows):
            sinks = values.boolean("add_swa_attention_sink_bias")
            near = _alike(values, _of_windows(values), next(filter(None, windows)), sinks=sinks)
        layers = tuple(full.layers[0] if window is None else near.layers[0] for window in windows)
        spec = replace(full, layers=layers, unused=("model.mtp.",))
        return with_experts(spec, dict.fromkeys(_sparse(values, count), mixture(values, corrected_routing(values))))

    weights = staticmethod(partial(expert_weights, others=Names(sinks="self_attn.attention_sink_bias")))


def _alike(config: Config, heads: Config, window: int | None, *, sinks: bool) -> ModelSpec:
    """Return a model of one layer of a kind. heads: the config with the counts and widths of that kind."""
    spec = llama_like("MiMoV2FlashForCausalLM", heads, windows=[window])
    wide, narrow = heads.integer("head_dim"), heads.integer("v_head_dim")
    if narrow > wide:
        raise wrong("v_head_dim", narrow, f"at most the {wide} of head_dim")
    mixer = replace(
        spec.layers[0].attention,
        qkv_bias=config.boolean("attention_bias"),
        sinks=sinks,
        value_dim=narrow if narrow < wide else None,
        multiplier=config.number("attention_value_scale", 1.0),  # values are as linear in it as the output
    )
    return replace(
        spec, layers=(LayerSpec(mixer=mixer, feed_forward=spec.layers[0].feed_forward, norm=spec.final_norm),)
    )


def _of_windows(config: Config) -> Config:
    """Return the config with the heads of layers that have a window: by default twice as many of keys."""
    own = {name: config.raw(f"swa_{name}") for name in OF_WINDOWS if f"swa_{name}" in config}
    return config.changed(**{"num_key_value_heads": 2 * config.integer("num_key_value_heads"), **own})


def _rotated(config: Config) -> Config:
    """Return the config with a rotation for each kind of layers."""
    if "rope_parameters" in config:
        return config
    share = config.number("partial_rotary_factor")
    thetas = {"full_attention": "rope_theta", "sliding_attention": "swa_rope_theta"}
    scaling = config.section("rope_scaling").entries
    rotations = {
        kind: {**scaling, "rope_theta": config.number(name), "partial_rotary_factor": share}
        for kind, name in thetas.items()
    }
    return config.changed(rope_parameters=rotations)


def _windows(config: Config, count: int) -> list[int | None]:
    window, pattern = config.integer("sliding_window"), config.raw("hybrid_layer_pattern")
    if (types := config.layer_types(count)) is not None:
        return listed_windows(types, window)
    if pattern is None:
        return [window if layer and (layer + 1) % SEES_ALL else None for layer in range(count)]
    return [window if has else None for has in _flags("hybrid_layer_pattern", pattern, count)]


def _sparse(config: Config, count: int) -> list[int]:
    """Return the layers that have experts."""
    if (layers := typed_layers(config)) is not None:
        return layers
    if (flags := config.raw("moe_layer_freq")) is None:
        return list(range(1, count))
    return [layer for layer, has in enumerate(_flags("moe_layer_freq", flags, count)) if has]


def _flags(name: str, flags: Any, count: int) -> list[int]:
    if not isinstance(flags, list) or len(flags) != count or any(flag not in (0, 1) for flag in flags):
        raise wrong(name, flags, f"{count} entries, each 0 or 1")
    return flags

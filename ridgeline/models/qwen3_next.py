"""Qwen3-Next: gated delta rules, and attention with output gates in every fourth layer, with or without experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.delta import GatedDeltaSpec
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import LayerSpec, MLPSpec, ModelSpec, NormSpec, Source, WeightMap
from ridgeline.models.config import Config, wrong
from ridgeline.models.experts import expert_weights, routing, sparse_layers, with_experts
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import llama_like
from ridgeline.models.names import named

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}
LAYER_TYPES = ("linear_attention", "full_attention")
LONGEST_CONV = 1024  # inputs of an output: far more than any model has
MAX_STATE = 2**32  # numbers of a request's state in a layer: far above any real one

UNUSED = ("mtp.",)  # the layer that drafts further tokens, which the method mtp alone loads

_MODULES = {  # of a gated delta rule, by whether two tensors hold the projections
    False: {
        "delta_in": "in_proj_qkv in_proj_z in_proj_b in_proj_a",
        "conv": "conv1d",
        "norm": "norm",
        "out": "out_proj",
    },
    True: {"delta_in": "in_proj_qkvz in_proj_ba", "conv": "conv1d", "norm": "norm", "out": "out_proj"},
}


class Qwen3Next:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        dense = gated_hybrid("Qwen3NextForCausalLM", values, packed=True)
        sparse = [] if values.raw("num_experts") == 0 else sparse_layers(values)
        return with_experts(dense, dict.fromkeys(sparse, gated_experts(values))) if sparse else dense

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = expert_weights(spec)
        for index, layer in enumerate(spec.layers):
            ours, theirs = f"layers.{index}.mixer", f"model.layers.{index}"
            if isinstance(layer.mixer, GatedDeltaSpec):
                found |= _delta_weights(ours, f"{theirs}.linear_attn", layer.mixer)
            else:  # each head's queries come before its gates
                heads = {"heads": layer.attention.num_heads, "shares": (1, 1), "backwards": True}
                for name in (f"{ours}.qkv.weight", f"{ours}.qkv.bias"):
                    if name in found:
                        queries, *others = found[name]
                        found[name] = (replace(queries, **heads), *others)  # type: ignore[arg-type]
        return found


def gated_hybrid(architecture: str, config: Config, *, packed: bool) -> ModelSpec:
    """Return a spec of gated delta rules, with attention in some layers, that has plain feed-forwards. packed: as in
    GatedDeltaSpec."""
    if config.raw("attn_output_gate") is not None and not config.boolean("attn_output_gate"):
        raise wrong("attn_output_gate", False, "true or left out, since attention without gates is not this family's")
    base = llama_like(architecture, config, attention_bias=config.boolean("attention_bias"), qk_norm=True)
    norm, count = replace(base.final_norm, offset=1.0), len(base.layers)
    delta = _delta(config, base.final_norm, packed)
    types = config.layer_types(count, LAYER_TYPES)
    if types is None:
        every = config.integer("full_attention_interval")
        types = [LAYER_TYPES[(layer + 1) % every == 0] for layer in range(count)]

    def layer(plain: LayerSpec, kind: str) -> LayerSpec:
        if kind == "linear_attention":
            return replace(plain, mixer=delta, norm=norm)
        return replace(plain, mixer=replace(plain.attention, qk_norm=norm, output_gate=True), norm=norm)

    layers = tuple(layer(plain, kind) for plain, kind in zip(base.layers, types, strict=True))
    return replace(base, layers=layers, final_norm=norm, unused=UNUSED)


def gated_experts(config: Config) -> ExpertsSpec:
    """Return the experts, and the shared one with its gate."""
    activation = config.activation("hidden_act")
    return ExpertsSpec(
        routing=routing(config, renormalize=config.boolean("norm_topk_prob")),
        intermediate_size=config.integer("moe_intermediate_size"),
        activation=activation,
        shared=MLPSpec(intermediate_size=config.integer("shared_expert_intermediate_size"), activation=activation),
        shared_gate=True,
    )


def _delta(config: Config, norm: NormSpec, packed: bool) -> GatedDeltaSpec:
    if (activation := config.activation("hidden_act")) != "silu":
        raise wrong("hidden_act", activation, "silu, the only activation that convolutions have")
    length = config.integer("linear_conv_kernel_dim", at_least=2)
    if length > LONGEST_CONV:
        raise wrong("linear_conv_kernel_dim", length, f"at most {LONGEST_CONV}")
    key_heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise wrong("linear_num_value_heads", value_heads, f"a multiple of the {key_heads} of linear_num_key_heads")
    key_dim, value_dim = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    if value_heads * key_dim * value_dim > MAX_STATE:
        raise wrong("linear_num_value_heads", value_heads, f"less, since a state has at most {MAX_STATE} numbers")
    return GatedDeltaSpec(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        length=length,
        norm=norm,
        packed=packed,
    )


def _delta_weights(ours: str, theirs: str, spec: GatedDeltaSpec) -> WeightMap:
    found = named(ours, theirs, _MODULES[spec.packed])
    found[f"{ours}.log_rate"] = (Source(name=f"{theirs}.A_log"),)
    found[f"{ours}.dt_bias"] = (Source(name=f"{theirs}.dt_bias"),)
    if spec.packed:  # by key heads, each of which has the rows of the value heads that use it
        values = spec.value_size // spec.key_heads
        shares = (spec.key_dim, spec.key_dim, values, values), (1, 1)
        found[f"{ours}.delta_in.weight"] = tuple(
            replace(source, heads=spec.key_heads, shares=each)
            for source, each in zip(found[f"{ours}.delta_in.weight"], shares, strict=True)
        )
    return found

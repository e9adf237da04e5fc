"""Kimi Linear: delta attention, latent attention without positions in some layers, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.linear import DeltaAttentionSpec
from ridgeline.core.specs.model import MixerSpec, ModelSpec, NormSpec, WeightMap
from ridgeline.models.config import Config, wrong
from ridgeline.models.experts import (
    ExpertNames,
    drafting_layers,
    later_layers,
    mixture,
    routing,
    typed_layers,
    with_experts,
)
from ridgeline.models.latent import DEFAULTS as LATENT_DEFAULTS
from ridgeline.models.latent import latent_attention, latent_like, latent_weights
from ridgeline.models.names import LONGEST_CONV, named, single

DEFAULTS = {
    **LATENT_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "first_k_dense_replace": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
}
LINEAR = "linear_attn_config"  # the object in which published files say what delta attention is like
KDA, FULL = f"{LINEAR}.kda_layers", f"{LINEAR}.full_attn_layers"
SPELLINGS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "linear_head_dim": f"{LINEAR}.head_dim",
    "linear_num_heads": f"{LINEAR}.num_heads",
    "linear_conv_kernel_dim": f"{LINEAR}.short_conv_kernel_size",
}
OF_K3 = {
    "attn_res_block_size": "residuals are plain sums here",
    "routed_expert_hidden_size": "experts have the width of the model here",
    "mla_use_output_gate": "latent attention has no gate here",
    f"{LINEAR}.gate_lower_bound": "decays have no lower bound here",
    f"{LINEAR}.use_full_rank_gate": "gates are made through two projections here",
}
LAYER_TYPES = ("linear_attention", "full_attention")
MAX_STATE = 2**32  # numbers of a request's state in a layer: far above any real one

NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}",
    gate_up=("w1", "w3"),
    down="w2",
    correction="block_sparse_moe.gate.e_score_correction_bias",
)
_DELTA = {
    "delta_in": "q_proj k_proj v_proj f_a_proj g_a_proj b_proj",
    "conv": "q_conv1d k_conv1d v_conv1d",
    "decay": "f_b_proj",
    "gate": "g_b_proj",
    "norm": "o_norm",
    "out": "o_proj",
}


class KimiLinear:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = _read(config)
        base = latent_like("KimiLinearForCausalLM", values)
        mixers: dict[str, MixerSpec] = {
            "linear_attention": _delta(values, base.final_norm),
            "full_attention": replace(latent_attention(values, base, interleaved=False), rope=None),
        }
        kinds = zip(base.layers, _layer_types(values), strict=True)
        layers = tuple(replace(layer, mixer=mixers[kind]) for layer, kind in kinds)
        dense = replace(base, layers=layers, unused=drafting_layers(values, "num_nextn_predict_layers"))
        sparse = _sparse_layers(values)
        return with_experts(dense, dict.fromkeys(sparse, _experts(values))) if sparse else dense

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = latent_weights(spec, NAMES)
        for index, layer in enumerate(spec.layers):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            if isinstance(layer.mixer, DeltaAttentionSpec):
                found |= named(f"{ours}.mixer", f"{theirs}.self_attn", _DELTA)
                found |= single(f"{ours}.mixer", f"{theirs}.self_attn", {"log_rate": "A_log", "dt_bias": "dt_bias"})
            if isinstance(layer.feed_forward, ExpertsSpec) and layer.feed_forward.shared is not None:
                parts = {"gate_up": "gate_proj up_proj", "down": "down_proj"}
                found |= named(f"{ours}.feed_forward.shared", f"{theirs}.block_sparse_moe.shared_experts", parts)
        return found


def _read(config: Mapping[str, Any]) -> Config:
    """Return config.json with the entries of `linear_attn_config` beside the others. Raise ModelLoadError for what this
    family does not have."""
    section = Config(config).section(LINEAR)
    names = [each.removeprefix(f"{LINEAR}.") for each in (*SPELLINGS.values(), *OF_K3, KDA, FULL)]
    nested = {f"{LINEAR}.{name}": section.raw(name) for name in names if name in section}
    values = Config({**config, **nested}, DEFAULTS, SPELLINGS)
    for name, why in OF_K3.items():
        values.refuse(name, why)
    values.refuse("tie_word_embeddings", "models of this family have an output layer of their own")
    if "mla_use_nope" in values and not values.boolean("mla_use_nope"):
        raise wrong("mla_use_nope", False, "true or left out, since latent attention rotates nothing in this family")
    if (score := values.raw("moe_router_activation_func")) not in (None, "sigmoid"):
        raise wrong("moe_router_activation_func", score, "sigmoid")
    return values.changed(rope_parameters=None, rope_scaling=None)  # nothing rotates


def _layer_types(config: Config) -> list[str]:
    """Return the type of each layer. Files may list the layers of each type, which are numbered from 1."""
    count = config.integer("num_hidden_layers")
    if (types := config.layer_types(count, LAYER_TYPES)) is not None:
        return types
    linear, full = config.raw(KDA), config.raw(FULL)
    if linear is None and full is None:
        return [LAYER_TYPES[layer > 0 and layer % 4 == 0] for layer in range(count)]
    for name, layers in ((KDA, linear), (FULL, full)):
        if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
            raise wrong(name, layers, "a list of the numbers of layers")
    if sorted((*linear, *full)) != list(range(1, count + 1)):
        raise wrong(KDA, linear, f"the numbers from 1 to {count} that {FULL} does not have, each once")
    return [LAYER_TYPES[layer in full] for layer in range(1, count + 1)]


def _sparse_layers(config: Config) -> list[int]:
    if config.raw("num_experts") is None and "num_local_experts" not in config:
        return []
    layers = typed_layers(config)
    return later_layers(config) if layers is None else layers


def _experts(config: Config) -> ExpertsSpec:
    renormalize = config.boolean("norm_topk_prob")
    how = routing(config, score="sigmoid", renormalize=renormalize, correction=True, group_score="top2")
    return mixture(config, how)


def _delta(config: Config, norm: NormSpec) -> DeltaAttentionSpec:
    if (activation := config.activation("hidden_act")) != "silu":
        raise wrong("hidden_act", activation, "silu, the only activation that convolutions have")
    length = config.integer("linear_conv_kernel_dim", at_least=2)
    if length > LONGEST_CONV:
        raise config.wrong("linear_conv_kernel_dim", length, f"at most {LONGEST_CONV}")
    heads, head_dim = config.integer("linear_num_heads"), config.integer("linear_head_dim")
    if heads * head_dim**2 > MAX_STATE:
        raise config.wrong("linear_num_heads", heads, f"less, since a state has at most {MAX_STATE} numbers")
    return DeltaAttentionSpec(heads=heads, head_dim=head_dim, length=length, rank=head_dim, norm=norm)

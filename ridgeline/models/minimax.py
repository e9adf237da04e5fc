"""MiniMax-Text-01 and M1: Lightning attention in most layers, norms behind every sum, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.linear import LightningAttentionSpec
from ridgeline.core.specs.model import ModelSpec, NormSpec, Source, WeightMap
from ridgeline.models.config import Config, wrong
from ridgeline.models.experts import expert_weights, routing, with_experts
from ridgeline.models.kimi_linear import MAX_STATE
from ridgeline.models.llama import Names, llama_like
from ridgeline.models.mixtral import DEFAULTS as MIXTRAL_DEFAULTS
from ridgeline.models.mixtral import NAMES
from ridgeline.models.names import named

LAYER_TYPES = ("linear_attention", "full_attention")  # in the order of the numbers of attn_type_list
PARTS = ("linear_attn", "full_attn", "mlp")
SPELLINGS = {  # of the first files
    f"{part}_{kind}_factor": f"layernorm_{long}_{kind}"
    for part, long in zip(PARTS, ("linear_attention", "full_attention", "mlp"), strict=True)
    for kind in ("alpha", "beta")
}
DEFAULTS = {
    **MIXTRAL_DEFAULTS,
    **dict.fromkeys(SPELLINGS, 1.0),
}
INNER_EPS = 1e-6  # of the norm inside lightning attention
BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # which follow from the config


class MiniMax:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = _checked(config)
        dense = llama_like("MiniMaxM1ForCausalLM", values)
        alpha, beta = _factors(values)
        # norm(alpha * x + beta * f(x)) is the norm of x + beta / alpha * f(x), with another eps
        norm = replace(dense.final_norm, eps=dense.final_norm.eps / alpha**2)
        experts = ExpertsSpec(
            routing=routing(values, renormalize=True),
            intermediate_size=values.integer("intermediate_size"),
            activation=values.activation("hidden_act"),
        )
        types = _layer_types(values)
        layers = []
        for index, (layer, kind) in enumerate(zip(dense.layers, types, strict=True)):
            mixer = _lightning(values, index) if kind == "linear_attention" else layer.mixer
            layers.append(replace(layer, mixer=mixer, norm=norm, norms="around", residual_multiplier=beta / alpha))
        linear = [index for index, kind in enumerate(types) if kind == "linear_attention"]
        spec = replace(
            dense,
            layers=tuple(layers),
            final_norm=norm,
            embed_norm=dense.final_norm,
            unused=tuple(f"model.layers.{index}.self_attn.{name}" for index in linear for name in BUFFERS),
        )
        return with_experts(spec, dict.fromkeys(range(len(layers)), experts))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        norms = {"mixer_post_norm": "post_attention_layernorm"}
        found = expert_weights(spec, NAMES, Names(norms=norms))
        del found["final_norm.weight"]  # it is the last layer's
        found["embed_norm.weight"] = (Source(name="model.layers.0.input_layernorm.weight"),)
        for index, layer in enumerate(spec.layers):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            behind = "model.norm" if index == len(spec.layers) - 1 else f"model.layers.{index + 1}.input_layernorm"
            found[f"{ours}.feed_forward_post_norm.weight"] = (Source(name=f"{behind}.weight"),)
            if isinstance(layer.mixer, LightningAttentionSpec):
                found |= named(f"{ours}.mixer", f"{theirs}.self_attn", {"norm": "norm", "out": "out_proj"})
                qkv = Source(name=f"{theirs}.self_attn.qkv_proj.weight", heads=layer.mixer.heads)
                gate = Source(name=f"{theirs}.self_attn.output_gate.weight")
                found[f"{ours}.mixer.linear_in.weight"] = (qkv, gate)
        return found


def _checked(config: Mapping[str, Any]) -> Config:
    """Return the config, in which `rotary_dim` has become a share of the head. Raise ModelLoadError for variants of
    which no model was published."""
    values = Config(config, DEFAULTS, SPELLINGS)
    values.refuse("shared_intermediate_size", "no shared expert is known for this family")
    values.refuse("sliding_window", "no window is known for this family")
    if values.raw("postnorm") is False:
        raise wrong("postnorm", False, "true or left out, since residuals are those behind the norms")
    if "rotary_dim" not in values:
        return values
    width = (
        values.integer("head_dim")
        if "head_dim" in values
        else values.integer("hidden_size") // values.integer("num_attention_heads")
    )
    return values.changed(partial_rotary_factor=values.integer("rotary_dim") / max(width, 1))


def _factors(config: Config) -> tuple[float, float]:
    """Return the factors of residuals and of results in the sums that are normalized."""
    found = {(config.number(f"{part}_alpha_factor"), config.number(f"{part}_beta_factor")) for part in PARTS}
    if len(found) > 1:
        name = "mlp_alpha_factor"
        raise config.wrong(name, config.raw(name), "the same as those of both kinds of attention, as are the betas")
    return found.pop()


def _layer_types(config: Config) -> list[str]:
    count, numbers = config.integer("num_hidden_layers"), config.raw("attn_type_list")
    if (types := config.layer_types(count, LAYER_TYPES)) is not None:
        return types
    if numbers is None:
        return [LAYER_TYPES[(layer + 1) % 2] for layer in range(count)]
    if not isinstance(numbers, list) or len(numbers) != count or any(number not in (0, 1) for number in numbers):
        raise wrong(
            "attn_type_list", numbers, f"{count} entries, each 0 (lightning attention) or 1 (softmax attention)"
        )
    return [LAYER_TYPES[number] for number in numbers]


def _lightning(config: Config, layer: int) -> LightningAttentionSpec:
    heads, count = config.integer("num_attention_heads"), config.integer("num_hidden_layers")
    head_dim = config.integer("head_dim") if "head_dim" in config else config.integer("hidden_size") // heads
    if heads * head_dim**2 > MAX_STATE:
        raise wrong("num_attention_heads", heads, f"less, since a state has at most {MAX_STATE} numbers")
    if (activation := config.activation("hidden_act")) != "silu":
        raise wrong("hidden_act", activation, "silu, the only activation that lightning attention has")
    share = 1 - layer / (count - 1 + 1e-5) + 1e-5
    return LightningAttentionSpec(heads=heads, head_dim=head_dim, share=share, norm=NormSpec(eps=INNER_EPS))

"""gpt-oss: Experts with biases in every layer, a window on every other one, and a sink in each head's softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec, RoutingSpec
from ridgeline.core.specs.model import LayerSpec, ModelSpec, Source, WeightMap
from ridgeline.models.config import Config, wrong
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, llama_like
from ridgeline.models.windows import listed_windows

LIMIT = 7.0  # the bound of kernels/small/activation's swiglu_clamped

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": LIMIT,
}
ROPE = {  # of a config that does not say
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        if "rope_parameters" not in values and "rope_scaling" not in values:
            values = Config({**config, "rope_parameters": ROPE}, DEFAULTS)
        if values.number("swiglu_limit") != LIMIT:
            raise wrong("swiglu_limit", values.raw("swiglu_limit"), f"{LIMIT}, the only one that we compute")
        count, top_k = values.integer("num_local_experts"), values.integer("num_experts_per_tok")
        if top_k > count:
            raise wrong("num_experts_per_tok", top_k, f"at most the {count} of num_local_experts")
        experts = ExpertsSpec(
            routing=RoutingSpec(experts=count, top_k=top_k, renormalize=True, bias=True),
            intermediate_size=values.integer("intermediate_size"),
            activation="swiglu_clamped",
            bias=True,
        )
        dense = llama_like(
            "GptOssForCausalLM",
            values,
            attention_bias=values.boolean("attention_bias"),
            windows=_windows(values),
        )
        return replace(dense, layers=tuple(_layer(layer, experts) for layer in dense.layers))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = Llama.weights(spec)
        for index in range(len(spec.layers)):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            found |= _experts(f"{ours}.feed_forward", f"{theirs}.mlp")
        return found


def _layer(layer: LayerSpec, experts: ExpertsSpec) -> LayerSpec:
    return replace(layer, mixer=replace(layer.attention, sinks=True), feed_forward=experts)


def _experts(ours: str, theirs: str) -> WeightMap:
    def stored(
        name: str, *, stacked: bool = False, transpose: bool = False, alternating: bool = False
    ) -> tuple[Source]:
        source = Source(name=f"{theirs}.{name}", stacked=stacked, transpose=transpose, alternating=alternating)
        return (source,)

    return {
        f"{ours}.router": stored("router.weight"),
        f"{ours}.router_bias": stored("router.bias"),
        f"{ours}.gate_up.weight": stored("experts.gate_up_proj", stacked=True, transpose=True, alternating=True),
        f"{ours}.gate_up.bias": stored("experts.gate_up_proj_bias", stacked=True, alternating=True),
        f"{ours}.down.weight": stored("experts.down_proj", stacked=True, transpose=True),
        f"{ours}.down.bias": stored("experts.down_proj_bias", stacked=True),
    }


def _windows(config: Config) -> list[int | None]:
    num_layers = config.integer("num_hidden_layers")
    window = config.integer("sliding_window") if "sliding_window" in config else None
    types = config.layer_types(num_layers) or ["sliding_attention", "full_attention"] * num_layers
    return listed_windows(types[:num_layers], window)

"""Granite 4: Granite with Mamba-2 in most layers, and feed-forwards that are shared experts, with others or alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import MLPSpec, ModelSpec, WeightMap
from ridgeline.models.bamba import DEFAULTS as BAMBA_DEFAULTS
from ridgeline.models.bamba import mixer_weights, with_mamba2
from ridgeline.models.config import Config, wrong
from ridgeline.models.experts import layer_experts, routing, with_experts
from ridgeline.models.granite import granite_like
from ridgeline.models.granite_moe import DEFAULTS as MIXTURE_DEFAULTS
from ridgeline.models.granite_moe import NAMES
from ridgeline.models.llama import NORMS
from ridgeline.models.names import named, outer
from ridgeline.models.selective import need_silu

DEFAULTS = {
    **{name: value for name, value in BAMBA_DEFAULTS.items() if name.startswith("mamba_")},
    **MIXTURE_DEFAULTS,
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "shared_intermediate_size": 1024,
}
KINDS = ("mamba", "attention", "linear_attention", "full_attention")  # the first two in configs of transformers 4


class GraniteMoeHybrid:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        need_silu(values, "hidden_act")
        dense = _granite(values)
        kinds = values.layer_types(len(dense.layers), KINDS) or ["mamba"] * len(dense.layers)
        dense = with_mamba2(dense, values, [kind in ("mamba", "linear_attention") for kind in kinds])
        shared = MLPSpec(intermediate_size=values.integer("shared_intermediate_size"))
        if not values.integer("num_local_experts", at_least=0):
            layers = (replace(layer, feed_forward=shared) for layer in dense.layers)
            return replace(dense, layers=tuple(layers))
        experts = ExpertsSpec(
            routing=routing(values, renormalize=True),  # the softmax of the chosen experts' products alone
            intermediate_size=values.integer("intermediate_size"),
            shared=shared,
        )
        return with_experts(dense, dict.fromkeys(range(len(dense.layers)), experts))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = outer(spec, "norm")
        for index, layer in enumerate(spec.layers):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            found |= named(ours, theirs, NORMS["before"])
            found |= mixer_weights(ours, theirs, layer)
            if isinstance(layer.feed_forward, ExpertsSpec):
                found |= layer_experts(f"{ours}.feed_forward", theirs, layer.feed_forward, NAMES)
            else:
                modules = {"gate_up": "input_linear", "down": "output_linear"}
                found |= named(f"{ours}.feed_forward", f"{theirs}.shared_mlp", modules)
        return found


def _granite(config: Config) -> ModelSpec:
    """Return a Granite whose attention rotates queries and keys only if the config says so."""
    dense = granite_like("GraniteMoeHybridForCausalLM", config)
    if (kind := config.raw("position_embedding_type")) not in (None, "nope", "rope"):
        raise wrong("position_embedding_type", kind, "rope, nope or null")
    if kind == "rope":
        return dense
    layers = (replace(layer, mixer=replace(layer.attention, rope=None)) for layer in dense.layers)
    return replace(dense, layers=tuple(layers))

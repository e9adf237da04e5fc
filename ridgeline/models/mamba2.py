"""Mamba-2: state space duality in every layer, without attention and without feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.mamba import Mamba2Spec
from ridgeline.core.specs.model import ABSENT, LayerSpec, ModelSpec, NormSpec, WeightMap
from ridgeline.models.config import Config
from ridgeline.models.mamba import backbone, of_one_mixer
from ridgeline.models.names import mamba2, named
from ridgeline.models.selective import Mamba2Names, expanded, mamba2_of, need_silu

DEFAULTS = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "hidden_act": "silu",
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "layer_norm_epsilon": 1e-5,
    "use_conv_bias": True,
}
NAMES = Mamba2Names(
    heads="num_heads",
    head_dim="head_dim",
    groups="n_groups",
    state_width="state_size",
    length="conv_kernel",
    conv_bias="use_conv_bias",
)


class Mamba2:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        need_silu(values, "hidden_act")
        norm = NormSpec(eps=values.number("layer_norm_epsilon"))
        mixer = mamba2_of(
            values,
            norm,
            names=NAMES,
            inner=expanded(values, "expand"),
            bias=values.boolean("use_bias"),
            limits=values.bounds("time_step_limit"),
        )
        layer = LayerSpec(mixer=mixer, feed_forward=ABSENT, norm=norm)
        return of_one_mixer("Mamba2ForCausalLM", values, layer)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = backbone(spec)
        for index, layer in enumerate(spec.layers):
            assert isinstance(layer.mixer, Mamba2Spec)
            ours, theirs = f"layers.{index}.mixer", f"backbone.layers.{index}.mixer"
            found |= mamba2(ours, theirs, layer.mixer)
            found |= named(ours, theirs, {"mamba_in": "in_proj"}, bias=layer.mixer.bias)
        return found

"""Falcon-H1: attention and Mamba-2 side by side in every layer, and multipliers in many places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.mamba import Mamba2Spec
from ridgeline.core.specs.model import ModelSpec, NormSpec, WeightMap
from ridgeline.core.specs.side import SideBySideSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import llama_like
from ridgeline.models.names import mamba2, named, outer
from ridgeline.models.selective import mamba2_of, need_silu

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_norm_before_gate": True,
    "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "mlp_multipliers": [1.0, 1.0],
    "key_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "ssm_multipliers": [1.0] * 5,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
}


class FalconH1:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        for name in ("attention_bias", "mamba_proj_bias"):
            values.refuse(name, "the projection that attention and Mamba-2 share has no biases")
        need_silu(values, "hidden_act")
        dense = llama_like("FalconH1ForCausalLM", values, mlp_bias=values.boolean("mlp_bias"))
        attends, selects = values.number("attention_in_multiplier"), values.number("ssm_in_multiplier")
        mamba = _mamba(values, dense.hidden_size)
        layers = []
        for layer in dense.layers:
            mixer = SideBySideSpec(
                attention=layer.attention,
                mamba=mamba,
                multipliers=(
                    attends,
                    attends * values.number("key_multiplier"),
                    attends,
                    *(selects * each for each in values.numbers("ssm_multipliers", 5)),
                ),
                out_multipliers=(values.number("attention_out_multiplier"), values.number("ssm_out_multiplier")),
            )
            gate, down = values.numbers("mlp_multipliers", 2)
            layers.append(replace(layer, mixer=mixer, feed_forward=replace(layer.mlp, multipliers=(gate, down))))
        return replace(
            dense,
            layers=tuple(layers),
            embedding_multiplier=values.number("embedding_multiplier"),
            logits_multiplier=values.number("lm_head_multiplier"),
        )

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = outer(spec, "final_layernorm")
        for index, layer in enumerate(spec.layers):
            ours, theirs = f"layers.{index}", f"model.layers.{index}"
            found |= named(ours, theirs, {"mixer_norm": "input_layernorm", "feed_forward_norm": "pre_ff_layernorm"})
            projections = " ".join(f"self_attn.{each}_proj" for each in "qkv")
            found |= named(f"{ours}.mixer", theirs, {"both_in": f"{projections} mamba.in_proj"})
            found |= named(f"{ours}.mixer.attention", f"{theirs}.self_attn", {"out": "o_proj"})
            assert isinstance(layer.mixer, SideBySideSpec)
            found |= mamba2(f"{ours}.mixer.mamba", f"{theirs}.mamba", layer.mixer.mamba)
            modules = {"gate_up": "gate_proj up_proj", "down": "down_proj"}
            found |= named(f"{ours}.feed_forward", f"{theirs}.feed_forward", modules, bias=layer.mlp.bias)
        return found


def _mamba(config: Config, width: int) -> Mamba2Spec:
    inner = config.integer("mamba_d_ssm") if "mamba_d_ssm" in config else config.integer("mamba_expand") * width
    norm = NormSpec(eps=config.number("rms_norm_eps"))
    limits = config.bounds("time_step_limit")
    return replace(
        mamba2_of(config, norm, inner=inner, limits=limits),
        out_bias=config.boolean("projectors_bias"),
        norm=norm if config.boolean("mamba_rms_norm") else None,
        norm_before_gate=config.boolean("mamba_norm_before_gate"),
    )

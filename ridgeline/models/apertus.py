"""Apertus: Llama with norms on queries and keys, and xIELU in feed-forwards without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import ModelSpec, Source, WeightMap
from ridgeline.models.config import Config, wrong
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Names, changed, decoder_weights, llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "hidden_act": "xielu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 12_000_000.0,
    "max_position_embeddings": 65536,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
NAMES = Names(norms={"mixer_norm": "attention_layernorm", "feed_forward_norm": "feedforward_layernorm"})
LEARNED = {"rise": "alpha_p", "fall": "alpha_n"}
FIXED = ("beta", "eps")  # which checkpoints hold too


class Apertus:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        if (activation := values.raw("hidden_act")) != "xielu":
            raise wrong("hidden_act", activation, "xielu")
        values = values.changed(hidden_act="relu")  # a plain feed-forward, until it gets its own activation
        bias = values.boolean("attention_bias")
        plain = llama_like("ApertusForCausalLM", values, attention_bias=bias, qk_norm=True, gated=False)
        fixed = (f"model.layers.{n}.mlp.act_fn.{name}" for n in range(len(plain.layers)) for name in FIXED)
        return replace(changed(plain, mlp={"activation": "xielu"}), unused=tuple(fixed))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found = decoder_weights(spec, NAMES)
        for index in range(len(spec.layers)):
            for ours, theirs in LEARNED.items():
                name = f"model.layers.{index}.mlp.act_fn.{theirs}"
                found[f"layers.{index}.feed_forward.{ours}"] = (Source(name=name),)
        return found

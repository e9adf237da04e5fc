"""StarCoder2: LayerNorm and biases everywhere, plain feed-forwards, and a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ridgeline.core.specs.model import ModelSpec, NormSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Names, decoder_weights, llama_like

DEFAULTS = {
    **LLAMA_DEFAULTS,
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "use_bias": True,
    "tie_word_embeddings": True,
}


class Starcoder2:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        bias = values.boolean("use_bias")
        window = values.integer("sliding_window") if "sliding_window" in values else None
        return llama_like(
            "Starcoder2ForCausalLM",
            values,
            attention_bias=bias,
            mlp_bias=bias,
            windows=[window] * values.integer("num_hidden_layers"),
            norm=NormSpec(kind="layer", eps=values.number("norm_epsilon")),
            gated=False,
        )

    weights = staticmethod(partial(decoder_weights, names=Names(up="mlp.c_fc", down="mlp.c_proj")))

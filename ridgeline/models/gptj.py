"""GPT-J: LayerNorm, attention and feed-forward side by side, a part of each head rotated in neighbouring pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ridgeline.core.specs.model import ModelSpec, NormSpec
from ridgeline.models.config import Config, head_width
from ridgeline.models.llama import Names, changed, decoder_weights, llama_like

DEFAULTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_positions": 2048,
    "rotary_dim": 64,
    "rope_theta": 10000.0,
}
SPELLINGS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "intermediate_size": "n_inner",
}
NAMES = Names(
    embed="transformer.wte",
    final_norm="transformer.ln_f",
    layers="transformer.h",
    norms={"mixer_norm": "ln_1"},
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    out="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    interleaved=True,
)


class GPTJ:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config({**DEFAULTS, **config}, spellings=SPELLINGS)
        width, head = values.integer("hidden_size"), head_width(values, "hidden_size", "num_attention_heads")
        inner = values.integer("intermediate_size") if "intermediate_size" in values else 4 * width
        share = min(1.0, (values.integer("rotary_dim") + 0.5) / head)  # whole again when it is multiplied
        values = values.changed(intermediate_size=inner, partial_rotary_factor=share)
        norm = NormSpec(kind="layer", eps=values.number("layer_norm_epsilon"))
        spec = llama_like("GPTJForCausalLM", values, mlp_bias=True, norm=norm, gated=False)
        return replace(changed(spec, parallel=True, one_norm=True), unembed_bias=True)

    weights = staticmethod(partial(decoder_weights, names=NAMES))

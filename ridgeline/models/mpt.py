"""MPT: no positions but ALiBi's, LayerNorm without biases, and plain feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ridgeline.core.specs.model import ModelSpec, NormSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.llama import Names, changed, decoder_weights, llama_like

DEFAULTS = {
    "hidden_act": "gelu",
    "layer_norm_epsilon": 1e-5,
    "max_seq_len": 2048,
    "expansion_ratio": 4,
    "no_bias": True,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
SPELLINGS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
NORMS = ("low_precision_layernorm", "layernorm")
EXPANSION, STEEPEST = 4, 8  # the only ones that transformers' class computes, and that ALiBi's paper has
NAMES = Names(
    embed="transformer.wte",
    final_norm="transformer.norm_f",
    layers="transformer.blocks",
    norms={"mixer_norm": "norm_1", "feed_forward_norm": "norm_2"},
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    up="ffn.up_proj",
    down="ffn.down_proj",
)


class MPT:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config({**DEFAULTS, **config}, spellings=SPELLINGS)
        attention, heads = values.section("attn_config"), values.integer("num_attention_heads")
        if attention.raw("attn_type") not in (None, "multihead_attention"):
            raise wrong("attn_type", attention.raw("attn_type"), "multihead_attention")
        if str(values.raw("norm_type") or "layernorm") not in NORMS:
            raise wrong("norm_type", values.raw("norm_type"), f"one of {', '.join(NORMS)}")
        if values.section("ffn_config").raw("ffn_type") not in (None, "mptmlp"):
            raise wrong("ffn_type", values.section("ffn_config").raw("ffn_type"), "mptmlp")
        for name in ("clip_qkv", "qk_ln", "prefix_lm", "attn_uses_sequence_id"):
            attention.refuse(name, "plain attention with ALiBi runs")
        if attention.raw("alibi") is False:
            raise wrong("alibi", False, "true; this family has no other positions here")
        if attention.raw("alibi_bias_max") not in (None, STEEPEST) or heads & (heads - 1):
            raise wrong("n_heads", heads, f"a power of two, with an alibi_bias_max of {STEEPEST}")
        values.refuse("logit_scale", "scores are not scaled in this family here")
        if not values.boolean("no_bias") or values.raw("expansion_ratio") != EXPANSION:
            raise wrong("expansion_ratio", values.raw("expansion_ratio"), f"{EXPANSION}, and no_bias true")
        values = values.changed(intermediate_size=EXPANSION * values.integer("hidden_size"))
        norm = NormSpec(kind="layer", eps=values.number("layer_norm_epsilon"), biasless=True)
        changes: dict[str, Any] = {"rope": None, "alibi": True}
        if "softmax_scale" in attention:
            changes["scale"] = attention.number("softmax_scale")
        return changed(llama_like("MptForCausalLM", values, norm=norm, gated=False), changes)

    weights = staticmethod(partial(decoder_weights, names=NAMES))

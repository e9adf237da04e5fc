"""Gemma in GGUF."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from ridgeline.models.gemma3n import MOST_STREAMS
from ridgeline.weights.gguf.dialect import NORMS_BEFORE, NORMS_BOTH, Dialect
from ridgeline.weights.gguf.values import Values
from ridgeline.weights.gguf.windows import sliding


def _gemma2(values: Values) -> dict[str, Any]:
    return {
        **_gemma(values, largest=46),
        "attn_logit_softcapping": values.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.get("final_logit_softcapping", 30.0),
    }


def _gemma3(values: Values) -> dict[str, Any]:
    return {
        **_gemma(values, largest=62),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
        "rope_local_base_freq": values.get("rope.freq_base_swa", 10000.0),
    }


def _gemma(values: Values, largest: int) -> dict[str, Any]:
    """Return Gemma's entries.

    The largest model of a generation, which is known by its number of layers, scales scores by the model's width
    divided by its heads, and not by the width of a head. The file does not say so, and llama.cpp decides in the same
    way.
    """
    is_largest = values["block_count"] == largest
    width = values.shared_width if is_largest else values.head_dim
    config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": values.get("attention.sliding_window"),
        "query_pre_attn_scalar": width,
    }
    if (kinds := sliding(values)) is not None:
        config["layer_types"] = ["sliding_attention" if each else "full_attention" for each in kinds]
    return config


def _gemma4(values: Values) -> dict[str, Any]:
    kinds = sliding(values) or []
    found: dict[str, Any] = {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in kinds],
        "head_dim": values.whole("attention.key_length_swa"),
        "global_head_dim": values.whole("attention.key_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": values["attention.sliding_window"],
        "final_logit_softcapping": values.get("final_logit_softcapping"),
        "hidden_size_per_layer_input": values.get("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": values.get("attention.shared_kv_layers", 0),
        "rope_scaling": None,
        "rope_theta": None,
        "rope_parameters": _two_rotations(values),
        "attention_k_eq_v": any(
            values.has("attn_k.weight", layer) and not values.has("attn_v.weight", layer)
            for layer in range(values.layers)
        ),
        **_heads_of_keys(values, kinds),
        **_widths(values),
    }
    if count := values.get("expert_count"):
        found |= {"enable_moe_block": True, "num_experts": count, "top_k_experts": values["expert_used_count"]}
    if (table := values.gguf.tensors.get("per_layer_token_embd.weight")) is not None:
        found["vocab_size_per_layer_input"] = table.shape[0]
    return found


def _gemma3n(values: Values) -> dict[str, Any]:
    """Return Gemma 3n's entries. Keys of the layers from the 20th on are others' where the file does not say it, as
    llama.cpp has it. A feed-forward's share of zeros is there as a number of standard deviations."""
    found: dict[str, Any] = {
        **_gemma3(values),
        "final_logit_softcapping": values.get("final_logit_softcapping", 30.0),
        "intermediate_size": values["feed_forward_length"],
        "num_kv_shared_layers": values.get("attention.shared_kv_layers", max(0, values.layers - 20)),
        "hidden_size_per_layer_input": values["embedding_length_per_layer_input"],
        "altup_active_idx": values.get("altup.active_idx", 0),
        "altup_num_inputs": values.get("altup.num_inputs", 4),
        "activation_sparsity_pattern": _shares(values),
    }
    tensors = values.gguf.tensors
    for name, entry in (("per_layer_token_embd", "vocab_size_per_layer_input"), ("blk.0.laurel_l", "laurel_rank")):
        if (tensor := tensors.get(f"{name}.weight")) is not None:
            found[entry] = tensor.shape[0]
    return found


def _shares(values: Values) -> list[float]:
    """Return each layer's share of zeros."""
    edges = values.raw(name := "activation_sparsity_scale")
    known = isinstance(edges, list) and len(edges) == values.layers
    if not known or any(type(each) is not float or math.isnan(each) for each in edges):
        raise values.wrong(name, edges, f"it must be {values.layers} numbers, so download the file again")
    return [round(NormalDist().cdf(each), 6) if each > -math.inf else 0.0 for each in edges]


def _two_rotations(values: Values) -> dict[str, Any]:
    """Return the rotations of both kinds of layers. On the full ones a part of each head rotates, which the file says
    by factors that stop the rest."""
    factors = values.gguf.floats("rope_freqs.weight")
    part = 0.25 if factors is None else sum(each == 1.0 for each in factors) / max(1, len(factors))
    full = {"rope_type": "proportional", "partial_rotary_factor": part, "rope_theta": values["rope.freq_base"]}
    sliding = {"rope_type": "default", "rope_theta": values.get("rope.freq_base_swa", 10000.0)}
    return {"full_attention": full, "sliding_attention": sliding}


def _heads_of_keys(values: Values, kinds: list[bool]) -> dict[str, Any]:
    heads = values.get("attention.head_count_kv")
    if not isinstance(heads, list) or len(heads) != len(kinds):
        return {"num_key_value_heads": heads}
    own = dict(zip(kinds, heads, strict=True))
    return {"num_key_value_heads": own.get(True), "num_global_key_value_heads": own.get(False)}


def _widths(values: Values) -> dict[str, Any]:
    """Return the feed-forwards' width, and whether that of layers with lent keys is twice as much."""
    widths = values.get("feed_forward_length")
    if not isinstance(widths, list) or not widths:
        return {"use_double_wide_mlp": False}
    return {"intermediate_size": widths[0], "use_double_wide_mlp": widths[-1] == 2 * widths[0]}


def lent_keys(values: Values) -> list[str]:
    """Return the tensors of layers that use the keys of others, which files may hold all the same."""
    count = values.get("attention.shared_kv_layers", 0)
    if values.architecture not in ("gemma3n", "gemma4") or not isinstance(count, int):
        return []
    layers = range(max(0, values.layers - count), values.layers)
    return [f"blk.{layer}.attn_{part}" for layer in layers for part in ("k.", "v.", "k_norm.")]


_GEMMA4_PARTS = {
    "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_GEMMA3N_PARTS = {
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.correction_coefs": "altup_correct_coef",
}
_STREAMS = {
    f"model.{theirs}.{stream}": f"{ours}.{stream}"
    for theirs, ours in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj"))
    for stream in range(MOST_STREAMS)
}
_GEMMA4_TOP = {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}

GEMMA = {
    "gemma": Dialect(
        "GemmaForCausalLM",
        NORMS_BEFORE,
        config=lambda values: {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
    ),
    "gemma2": Dialect("Gemma2ForCausalLM", NORMS_BOTH, config=_gemma2),
    "gemma3": Dialect("Gemma3ForCausalLM", NORMS_BOTH, config=_gemma3),
    "gemma3n": Dialect(
        "Gemma3nForCausalLM",
        NORMS_BOTH,
        config=_gemma3n,
        parts=_GEMMA3N_PARTS,
        top={**_GEMMA4_TOP, **_STREAMS},
    ),
    "gemma4": Dialect(
        "Gemma4ForCausalLM",
        NORMS_BOTH,
        experts="Gemma4ForCausalLM",
        config=_gemma4,
        parts=_GEMMA4_PARTS,
        top=_GEMMA4_TOP,
    ),
}

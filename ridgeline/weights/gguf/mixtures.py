"""Mixtures of experts in GGUF."""

from __future__ import annotations

from typing import Any

from ridgeline.weights.gguf.dense import granite
from ridgeline.weights.gguf.dialect import NORMS_BEFORE, NORMS_BEHIND, Dialect, scaled_yarn, yarn
from ridgeline.weights.gguf.values import Values
from ridgeline.weights.gguf.windows import sliding, windows

_SIGMOID = 2  # llama.cpp's number of that way to score experts


def _gpt_oss(values: Values) -> dict[str, Any]:
    found: dict[str, Any] = {
        "num_local_experts": values["expert_count"],
        "intermediate_size": values.get("expert_feed_forward_length", values["feed_forward_length"]),
        "sliding_window": values.get("attention.sliding_window"),
    }
    if values.get("rope.scaling.type") == "yarn":
        found["rope_scaling"] = {**yarn(values), "truncate": False}
    return found


def _routed(values: Values) -> dict[str, Any]:
    """Return the entries of experts as DeepSeek's configs have them."""
    if not values.get("expert_count"):
        return {"n_routed_experts": None, "n_group": 1}
    return {
        "n_routed_experts": values["expert_count"],
        "n_shared_experts": values.get("expert_shared_count", 0),
        "n_group": values.get("expert_group_count", 1),
        "topk_group": values.get("expert_group_used_count", 1),
        "first_k_dense_replace": values.first_with("ffn_gate_inp.weight"),
        "norm_topk_prob": bool(values.get("expert_weights_norm", False)),
        "routed_scaling_factor": values.get("expert_weights_scale") or 1.0,
        "num_nextn_predict_layers": 0,
    }


def _glm4_moe(values: Values) -> dict[str, Any]:
    return {
        **_routed(values),
        "attention_bias": values.has("attn_q.bias"),
        "use_qk_norm": values.has("attn_q_norm.weight"),
    }


def _glm_dsa(values: Values) -> dict[str, Any]:
    found = {**_deepseek2(values), "architectures": ["GlmMoeDsaForCausalLM"], "rope_interleave": True}
    named = {"index_topk": "top_k", "index_n_heads": "head_count", "index_head_dim": "key_length"}
    return {**found, **{name: values[f"attention.indexer.{theirs}"] for name, theirs in named.items()}}


def _minicpm3(values: Values) -> dict[str, Any]:
    """Return MiniCPM 3's entries. Its scales are llama.cpp's constants."""
    rotated = values.whole("rope.dimension_count")
    return {
        "head_dim": None,
        "num_key_value_heads": values.whole("attention.head_count"),
        "q_lora_rank": values["attention.q_lora_rank"],
        "kv_lora_rank": values["attention.kv_lora_rank"],
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": values.whole("attention.key_length") - rotated,
        "attention_bias": values.has("attn_kv_a_mqa.bias"),
        "partial_rotary_factor": None,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


def _deepseek2(values: Values) -> dict[str, Any]:
    rotated = values.whole("rope.dimension_count")
    of_heads = "_mla" if values.get("attention.key_length_mla") else ""  # old files have no others
    keys = values.whole(f"attention.key_length{of_heads}")
    found = {
        "head_dim": None,
        "num_key_value_heads": values.whole("attention.head_count"),
        "q_lora_rank": values.get("attention.q_lora_rank"),
        "kv_lora_rank": values["attention.kv_lora_rank"],
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": values.get("attention.value_length_mla") or values["attention.value_length"],
        "attention_bias": values.has("attn_kv_a_mqa.bias"),
        "partial_rotary_factor": None,
        **_routed(values),
    }
    if values.get("rope.scaling.type") == "yarn":
        found["rope_scaling"] = scaled_yarn(values)
    if _is_v3(values):
        return {**found, "architectures": ["DeepseekV3ForCausalLM"]}
    return {
        **found,
        "topk_method": "group_limited_greedy" if values.number("expert_group_count", 1) > 1 else "greedy",
        "norm_topk_prob": False,
    }


def _is_v3(values: Values) -> bool:
    return values.get("expert_gating_func") == _SIGMOID or values.has("exp_probs_b.bias", None)


def _granite_moe(values: Values) -> dict[str, Any]:
    found = {**granite(values), "num_local_experts": values["expert_count"]}
    if shared := values.get("expert_shared_feed_forward_length"):
        found |= {"shared_intermediate_size": shared, "architectures": ["GraniteMoeSharedForCausalLM"]}
    return found


def _ernie(values: Values) -> dict[str, Any]:
    """Return ERNIE's entries. llama.cpp takes the layers with experts from the first one on, each so many apart."""
    return {
        "moe_num_experts": values["expert_count"],
        "moe_k": values["expert_used_count"],
        "moe_num_shared_experts": values.get("expert_shared_count", 0),
        "moe_layer_start_index": values.get("leading_dense_block_count", 0),
        "moe_layer_interval": values.get("interleave_moe_layer_step", 1),
    }


def _dots1(values: Values) -> dict[str, Any]:
    values.refuse_unless("expert_gating_func", _SIGMOID)
    return {**_routed(values), "attention_bias": values.has("attn_q.bias"), "sliding_window": None}


def _deepseek(values: Values) -> dict[str, Any]:
    return {**_routed(values), "attention_bias": values.has("attn_q.bias"), "norm_topk_prob": False}


def _exaone_moe(values: Values) -> dict[str, Any]:
    values.refuse_unless("expert_gating_func", _SIGMOID)
    shared = values.get("expert_shared_count", 0)
    return {**_routed(values), **windows(values, every=4), "num_shared_experts": shared}


def _hunyuan(values: Values) -> dict[str, Any]:
    size = values.whole("expert_feed_forward_length")
    shared = values.whole("expert_shared_feed_forward_length")
    return {
        "moe_topk": values["expert_used_count"],
        "num_shared_expert": shared // max(1, size),
        "attention_bias": values.has("attn_q.bias"),
    }


def _llama4(values: Values) -> dict[str, Any]:
    """Return Llama 4's entries. What the file does not say are llama.cpp's constants: it knows the model whose queries
    and keys have no norm by its 128 experts."""
    values.refuse_unless("attention.sliding_window", 8192)
    return {
        "intermediate_size_mlp": values["feed_forward_length"],
        "intermediate_size": values["expert_feed_forward_length"],
        "num_local_experts": values["expert_count"],
        "interleave_moe_layer_step": values.get("interleave_moe_layer_step", 1),
        "use_qk_norm": values["expert_count"] != 128,
        "attention_bias": values.has("attn_q.bias"),
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


def _minimax_m2(values: Values) -> dict[str, Any]:
    values.refuse_unless("expert_gating_func", _SIGMOID)
    return {"num_local_experts": values["expert_count"], "intermediate_size": values["expert_feed_forward_length"]}


def _mimo2(values: Values) -> dict[str, Any]:
    """Return MiMo-V2's entries. Layers with a window have heads of keys of their own number."""
    kinds, heads = sliding(values) or [False] * values.layers, values.get("attention.head_count_kv")
    own = dict(zip(kinds, heads, strict=False)) if isinstance(heads, list) else dict.fromkeys((True, False), heads)

    def sinks(near: bool) -> bool:
        return any(values.has("attn_sinks.weight", layer) for layer, each in enumerate(kinds) if each is near)

    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in kinds],
        "sliding_window": values["attention.sliding_window"],
        "num_key_value_heads": own.get(False, own.get(True)),
        "swa_num_key_value_heads": own.get(True, own.get(False)),
        "v_head_dim": values.whole("attention.value_length", values.head_dim),
        "attention_bias": values.has("attn_q.bias"),
        "attention_value_scale": values.get("attention.value_scale", 1.0),
        "add_swa_attention_sink_bias": sinks(True),
        "add_full_attention_sink_bias": sinks(False),
        "partial_rotary_factor": values.whole("rope.dimension_count", values.head_dim) / values.head_dim,
        "swa_rope_theta": values.get("rope.freq_base_swa", 10000.0),
        "n_routed_experts": values["expert_count"],
        "moe_layer_freq": [int(values.has("ffn_gate_inp.weight", layer)) for layer in range(values.layers)],
        "routed_scaling_factor": values.get("expert_weights_scale") or 1.0,
        "n_group": values.get("expert_group_count", 1),
        "topk_group": values.get("expert_group_used_count", 1),
        "norm_topk_prob": True,
    }


def _step35(values: Values) -> dict[str, Any]:
    """Return Step 3.5's entries. Layers with a window have other heads, and all of each head rotates there."""
    kinds, heads = sliding(values) or [False] * values.layers, values.raw("attention.head_count")
    own = dict(zip(kinds, heads, strict=False)) if isinstance(heads, list) else dict.fromkeys((True, False), heads)
    types = ["sliding_attention" if each else "full_attention" for each in kinds]
    full: dict[str, Any] = {
        "rope_theta": values.get("rope.freq_base", 10000.0),
        "partial_rotary_factor": values.whole("rope.dimension_count", values.head_dim // 2) / values.head_dim,
    }
    if (factors := values.gguf.floats("rope_freqs.weight")) is not None:  # of which the rest are ones
        rotated = int(values.head_dim * full["partial_rotary_factor"]) // 2
        full |= {"rope_type": "longrope", "short_factor": factors[:rotated], "long_factor": factors[:rotated]}
        full |= {"attention_factor": 1.0, "original_max_position_embeddings": values["context_length"]}
    near = {"rope_theta": values.get("rope.freq_base_swa", 10000.0), "partial_rotary_factor": 1.0}
    return {
        "layer_types": types,
        "sliding_window": values["attention.sliding_window"],
        "num_attention_heads": own.get(False, own.get(True)),
        "num_sliding_attention_heads": own.get(True, own.get(False)),
        "partial_rotary_factor": None,
        "rope_parameters": {"full_attention": full, "sliding_attention": near},
        "mlp_layer_types": values.kinds("ffn_gate_inp.weight", "sparse", "dense"),
        "share_expert_dim": values["expert_shared_feed_forward_length"],
        "moe_router_scaling_factor": values.get("expert_weights_scale") or 1.0,
        "norm_expert_weight": bool(values.get("expert_weights_norm", True)),
        "swiglu_limits": values.raw("swiglu_clamp_exp"),
        "swiglu_limits_shared": values.raw("swiglu_clamp_shexp"),
    }


def _phimoe(values: Values) -> dict[str, Any]:
    return {
        "num_local_experts": values["expert_count"],
        "intermediate_size": values.get("expert_feed_forward_length", values["feed_forward_length"]),
        "attention_bias": values.has("attn_q.bias"),
        "lm_head_bias": "output.bias" in values.gguf.tensors,
        "sliding_window": None,
    }


def _mistral4(values: Values) -> dict[str, Any]:
    """Return Mistral 4's entries. Files may leave out how queries grow with their positions: then they do not."""
    found = {**_deepseek2(values), "architectures": ["Mistral4ForCausalLM"]}
    rotation = {"rope_type": "default", **(found.pop("rope_scaling", None) or {})}
    if beta := values.number("attention.temperature_scale", 0.0):
        rotation["llama_4_scaling_beta"] = beta
    return {
        **found,
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {**rotation, "rope_theta": values.get("rope.freq_base", 10000.0)},
        "norm_topk_prob": bool(values.get("expert_weights_norm", True)),
    }


def _shared(values: Values) -> dict[str, Any]:
    return {"shared_expert_intermediate_size": values.get("expert_shared_feed_forward_length")}


MIXTURES = {
    "qwen3moe": Dialect(
        "Qwen3MoeForCausalLM",
        NORMS_BEFORE,
        experts="Qwen3MoeForCausalLM",
        config=lambda values: {"norm_topk_prob": True},  # which llama.cpp does, and the file does not say
    ),
    "qwen2moe": Dialect("Qwen2MoeForCausalLM", NORMS_BEFORE, experts="Qwen2MoeForCausalLM", config=_shared),
    "olmoe": Dialect("OlmoeForCausalLM", NORMS_BEFORE, experts="OlmoeForCausalLM"),
    "gpt-oss": Dialect("GptOssForCausalLM", NORMS_BEHIND, experts="GptOssForCausalLM", config=_gpt_oss),
    "glm4moe": Dialect("Glm4MoeForCausalLM", NORMS_BEHIND, experts="Glm4MoeForCausalLM", config=_glm4_moe),
    "deepseek2": Dialect("DeepseekV2ForCausalLM", NORMS_BEFORE, experts="DeepseekV2ForCausalLM", config=_deepseek2),
    "granitemoe": Dialect(
        "GraniteMoeForCausalLM", NORMS_BEFORE, experts="GraniteMoeForCausalLM", interleaved=True, config=_granite_moe
    ),
    "deepseek": Dialect(
        "DeepseekForCausalLM", NORMS_BEFORE, experts="DeepseekForCausalLM", interleaved=True, config=_deepseek
    ),
    "dots1": Dialect("Dots1ForCausalLM", NORMS_BEFORE, experts="Dots1ForCausalLM", config=_dots1),
    "ernie4_5-moe": Dialect("Ernie4_5_MoeForCausalLM", NORMS_BEFORE, experts="Ernie4_5_MoeForCausalLM", config=_ernie),
    "exaone-moe": Dialect("ExaoneMoeForCausalLM", NORMS_BEFORE, experts="ExaoneMoeForCausalLM", config=_exaone_moe),
    "hunyuan-moe": Dialect("HunYuanMoEV1ForCausalLM", NORMS_BEFORE, experts="HunYuanMoEV1ForCausalLM", config=_hunyuan),
    "llama4": Dialect("Llama4ForCausalLM", NORMS_BEFORE, experts="Llama4ForCausalLM", config=_llama4),
    "minimax-m2": Dialect("MiniMaxM2ForCausalLM", NORMS_BEFORE, experts="MiniMaxM2ForCausalLM", config=_minimax_m2),
    "glm-dsa": Dialect("GlmMoeDsaForCausalLM", NORMS_BEFORE, experts="GlmMoeDsaForCausalLM", config=_glm_dsa),
    "mimo2": Dialect("MiMoV2FlashForCausalLM", NORMS_BEFORE, experts="MiMoV2FlashForCausalLM", config=_mimo2),
    "mistral4": Dialect("Mistral4ForCausalLM", NORMS_BEFORE, experts="Mistral4ForCausalLM", config=_mistral4),
    "step35": Dialect("Step3p5ForCausalLM", NORMS_BEFORE, experts="Step3p5ForCausalLM", config=_step35),
    "phimoe": Dialect("PhiMoEForCausalLM", NORMS_BEFORE, experts="PhiMoEForCausalLM", config=_phimoe),
    "minicpm3": Dialect("MiniCPM3ForCausalLM", NORMS_BEFORE, config=_minicpm3),
}

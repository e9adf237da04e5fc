"""Mixtures of experts in GGUF."""

from __future__ import annotations

from typing import Any

from ridgeline.weights.gguf.dense import granite
from ridgeline.weights.gguf.dialect import NORMS_BEFORE, NORMS_BEHIND, Dialect, yarn
from ridgeline.weights.gguf.values import Values

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


def _scaled_yarn(values: Values) -> dict[str, Any]:
    """Return YaRN's entries, with the factor of scores that DeepSeek's models have."""
    if not (multiplier := values.get("rope.scaling.yarn_log_multiplier")):
        return yarn(values)
    scale = round(10 * multiplier, 6)  # llama.cpp's has a tenth in it
    return {**yarn(values), "mscale": scale, "mscale_all_dim": scale}


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


def _deepseek2(values: Values) -> dict[str, Any]:
    rotated = values.whole("rope.dimension_count")
    keys = values.get("attention.key_length_mla") or values.whole("attention.key_length")
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
        found["rope_scaling"] = _scaled_yarn(values)
    if _is_v3(values):
        return {**found, "architectures": ["DeepseekV3ForCausalLM"]}
    return {
        **found,
        "topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy",
        "norm_topk_prob": False,
    }


def _is_v3(values: Values) -> bool:
    return values.get("expert_gating_func") == _SIGMOID or values.has("exp_probs_b.bias", None)


def _granite_moe(values: Values) -> dict[str, Any]:
    found = {**granite(values), "num_local_experts": values["expert_count"]}
    if shared := values.get("expert_shared_feed_forward_length"):
        found |= {"shared_intermediate_size": shared, "architectures": ["GraniteMoeSharedForCausalLM"]}
    return found


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
}

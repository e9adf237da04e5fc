"""Models in GGUF whose layers keep states of a constant size, alone or beside attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.gguf.dialect import NORMS_BEFORE, NORMS_BEHIND, Dialect
from ridgeline.weights.gguf.values import Values


def _gated_delta(values: Values) -> dict[str, Any]:
    heads = values.whole("ssm.time_step_rank")
    found: dict[str, Any] = {
        "layer_types": values.kinds("ssm_a", "linear_attention", "full_attention"),
        "linear_num_key_heads": values.whole("ssm.group_count"),
        "linear_key_head_dim": values.whole("ssm.state_size"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": values.whole("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": values.whole("ssm.conv_kernel"),
        "attention_bias": values.has("attn_q.bias", None),
        "partial_rotary_factor": values.whole("rope.dimension_count") / values.head_dim,
        "norm_topk_prob": True,
    }
    if shared := values.get("expert_shared_feed_forward_length"):
        found["shared_expert_intermediate_size"] = shared
    return found


def _lfm2(values: Values) -> dict[str, Any]:
    found = {
        "layer_types": values.kinds("shortconv.conv.weight", "conv", "full_attention"),
        "num_key_value_heads": values.most("attention.head_count_kv"),
        "norm_eps": values["attention.layer_norm_rms_epsilon"],
        "conv_L_cache": values.whole("shortconv.l_cache"),
        "conv_bias": values.has("shortconv.conv.bias", None),
        "block_auto_adjust_ff_dim": False,
    }
    if values.get("expert_count"):
        found |= {
            "num_dense_layers": values.first_with("ffn_gate_inp.weight"),
            "use_expert_bias": values.has("exp_probs_b.bias", None),
            "routed_scaling_factor": values.get("expert_weights_scale") or 1.0,
        }
    return found


def _mamba(values: Values) -> dict[str, Any]:
    falcon = {"architectures": ["FalconMambaForCausalLM"]} if values.get("ssm.dt_b_c_rms") else {}
    return {
        "state_size": values.whole("ssm.state_size"),
        "time_step_rank": values.whole("ssm.time_step_rank"),
        "intermediate_size": values.whole("ssm.inner_size"),
        **_selective(values),
        **falcon,
    }


def _mamba2(values: Values) -> dict[str, Any]:
    heads = values.whole("ssm.time_step_rank")
    return {
        "num_heads": heads,
        "head_dim": values.whole("ssm.inner_size") // heads,
        "n_groups": values.whole("ssm.group_count"),
        "state_size": values.whole("ssm.state_size"),
        **_selective(values),
    }


def _selective(values: Values) -> dict[str, Any]:
    return {
        "expand": values.whole("ssm.inner_size") // values.whole("embedding_length"),
        "conv_kernel": values.whole("ssm.conv_kernel"),
        "use_bias": values.has("ssm_in.bias"),
        "use_conv_bias": values.has("ssm_conv1d.bias"),
        "layer_norm_epsilon": values["attention.layer_norm_rms_epsilon"],
    }


def _granite_hybrid(values: Values) -> dict[str, Any]:
    heads, inner = values.whole("ssm.time_step_rank"), values.whole("ssm.inner_size")
    scales = {
        "embedding_multiplier": values.get("embedding_scale", 1.0),
        "residual_multiplier": values.get("residual_scale", 1.0),
        "attention_multiplier": values.get("attention.scale", values.shared_width**-0.5),
        "logits_scaling": values.get("logit_scale", 1.0),
    }
    dense = values.gguf.tensors.get("blk.0.ffn_gate.weight")  # as some files count another width
    return {
        **scales,
        "layer_types": values.kinds("ssm_a", "mamba", "attention"),
        "num_key_value_heads": _kv_heads(values, values.first_with("attn_q.weight")),
        "num_local_experts": values.get("expert_count", 0),
        "shared_intermediate_size": values["expert_shared_feed_forward_length"] if dense is None else dense.shape[0],
        "attention_bias": values.has("attn_q.bias", None),
        "position_embedding_type": "rope" if values.get("rope.scaling.finetuned", True) else "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // values.whole("embedding_length"),
        "mamba_n_groups": values.whole("ssm.group_count"),
        "mamba_d_state": values.whole("ssm.state_size"),
        "mamba_d_conv": values.whole("ssm.conv_kernel"),
        "mamba_conv_bias": values.has("ssm_conv1d.bias", None),
        "mamba_proj_bias": values.has("ssm_in.bias", None),
    }


def _jamba(values: Values) -> dict[str, Any]:
    """Return Jamba's entries. Its configs have the layers with attention and those with experts as a period each."""
    period, offset = _every(values, "attn_q.weight")
    sparse, first = _every(values, "ffn_gate_inp.weight") if values.get("expert_count") else (1, 0)
    return {
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "expert_layer_period": sparse,
        "expert_layer_offset": first,
        "num_experts": values.get("expert_count") or 1,
        "num_key_value_heads": values.most("attention.head_count_kv"),
        "mamba_d_state": values.whole("ssm.state_size"),
        "mamba_d_conv": values.whole("ssm.conv_kernel"),
        "mamba_expand": values.whole("ssm.inner_size") // values.whole("embedding_length"),
        "mamba_dt_rank": values.whole("ssm.time_step_rank"),
        "mamba_conv_bias": values.has("ssm_conv1d.bias", None),
        "mamba_proj_bias": values.has("ssm_in.bias", None),
    }


def _every(values: Values, name: str) -> tuple[int, int]:
    """Return the period of the layers that have a tensor, and the first of them. Raise ModelLoadError if they have no
    period."""
    layers = [layer for layer in range(values.layers) if values.has(name, layer)]
    first = layers[0] if layers else 0
    period = layers[1] - first if len(layers) > 1 else max(first + 1, values.layers - first)
    if list(range(first, values.layers, period)) != layers or first >= period:
        raise ModelLoadError(
            f"{values.gguf.path} has {name} in the layers {str(layers)[:80]}; only layers at one distance run here."
        )
    return period, first


def _falcon_h1(values: Values) -> dict[str, Any]:
    """Return Falcon-H1's entries. Its multipliers are in the file's numbers."""
    heads, inner = values.whole("ssm.time_step_rank"), values.whole("ssm.inner_size")
    return {
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": values.whole("ssm.group_count"),
        "mamba_d_state": values.whole("ssm.state_size"),
        "mamba_d_conv": values.whole("ssm.conv_kernel"),
        "mamba_conv_bias": values.has("ssm_conv1d.bias"),
        "mamba_rms_norm": values.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": values.has("ssm_out.bias"),
        "mlp_bias": values.has("ffn_down.bias"),
    }


def _nemotron_h(values: Values) -> dict[str, Any]:
    heads, inner = values.whole("ssm.time_step_rank"), values.whole("ssm.inner_size")
    kinds = {"ssm_a": "mamba", "attn_q.weight": "attention", "ffn_gate_inp.weight": "moe"}
    found: dict[str, Any] = {
        "layers_block_type": [
            next((kind for name, kind in kinds.items() if values.has(name, layer)), "mlp")
            for layer in range(values.layers)
        ],
        "intermediate_size": values.most("feed_forward_length", 1),
        "num_key_value_heads": values.most("attention.head_count_kv"),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": values.whole("ssm.group_count"),
        "ssm_state_size": values.whole("ssm.state_size"),
        "conv_kernel": values.whole("ssm.conv_kernel"),
        "use_bias": values.has("ssm_in.bias", None),
        "use_conv_bias": values.has("ssm_conv1d.bias", None),
        "mlp_bias": values.has("ffn_up.bias", None),
    }
    if count := values.get("expert_count"):
        found |= {
            "n_routed_experts": count,
            "moe_intermediate_size": values["expert_feed_forward_length"],
            "moe_shared_expert_intermediate_size": values["expert_shared_feed_forward_length"],
            "moe_latent_size": values.get("moe_latent_size"),
            "norm_topk_prob": bool(values.get("expert_weights_norm", True)),
            "routed_scaling_factor": values.get("expert_weights_scale") or 1.0,
            "n_group": values.get("expert_group_count", 1),
            "topk_group": values.get("expert_group_used_count", 1),
        }
    return found


def _kimi_linear(values: Values) -> dict[str, Any]:
    """Return Kimi Linear's entries. Nothing rotates, also not the part of a head that does in latent attention."""
    rotated, keys = values.whole("rope.dimension_count"), values.whole("attention.key_length_mla")
    found: dict[str, Any] = {
        "head_dim": None,
        "num_key_value_heads": values.whole("attention.head_count"),
        "layer_types": values.kinds("ssm_a", "linear_attention", "full_attention"),
        "q_lora_rank": values.get("attention.q_lora_rank"),
        "kv_lora_rank": values["attention.kv_lora_rank"],
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": values["attention.value_length_mla"],
        "partial_rotary_factor": None,
        "linear_attn_config": {
            "head_dim": values.whole("kda.head_dim"),
            "num_heads": values.whole("attention.head_count"),
            "short_conv_kernel_size": values.whole("ssm.conv_kernel"),
        },
    }
    if not (count := values.get("expert_count")):
        return {**found, "num_experts": None}
    return {
        **found,
        "num_experts": count,
        "n_shared_experts": values.get("expert_shared_count", 0),
        "first_k_dense_replace": values.first_with("ffn_gate_inp.weight"),
        "routed_scaling_factor": values.get("expert_weights_scale") or 1.0,
        "norm_topk_prob": True,
        "n_group": values.get("expert_group_count", 1),
        "topk_group": values.get("expert_group_used_count", 1),
    }


def _kv_heads(values: Values, layer: int) -> int:
    """Return the heads of keys by the tensor, since some files count none."""
    keys = values.gguf.tensors.get(f"blk.{layer}.attn_k.weight")
    return values.most("attention.head_count_kv") if keys is None else max(1, keys.shape[0] // values.shared_width)


_MAMBA_NORMS = {"norm": "attn_norm"}
_LFM2_NORMS = {"operator_norm": "attn_norm", "ffn_norm": "ffn_norm"}
_LFM2_TOP = {"model.embedding_norm": "token_embd_norm"}
_HYBRID_NORMS = {**NORMS_BEFORE, "pre_ff_layernorm": "ffn_norm"}

_NEMOTRON_PARTS = {
    **{f"mixer.{each}_proj": f"attn_{each}" for each in "qkv"},
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}

_KIMI_PARTS = {
    **{f"self_attn.{each}_conv1d": f"ssm_conv1d_{each}" for each in "qkv"},
    **{f"self_attn.{each}_proj": f"ssm_{each}" for each in ("f_a", "f_b", "g_a", "g_b")},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
}

_NEMOTRON_H = Dialect(
    "NemotronHForCausalLM",
    _MAMBA_NORMS,
    config=_nemotron_h,
    parts=_NEMOTRON_PARTS,
    layer_norm="layer_norm_epsilon",
)

RECURRENT = {
    "jamba": Dialect("JambaForCausalLM", _HYBRID_NORMS, experts="JambaForCausalLM", config=_jamba),
    "falcon-h1": Dialect("FalconH1ForCausalLM", _HYBRID_NORMS, config=_falcon_h1),
    "nemotron_h": Dialect(
        "NemotronHForCausalLM", _MAMBA_NORMS, config=_nemotron_h, parts=_NEMOTRON_PARTS, layer_norm="layer_norm_epsilon"
    ),
    "nemotron_h_moe": replace(_NEMOTRON_H, experts="NemotronHForCausalLM"),
    "qwen35": Dialect("Qwen3_5ForCausalLM", NORMS_BEHIND, config=_gated_delta),
    "qwen35moe": Dialect("Qwen3_5MoeForCausalLM", NORMS_BEHIND, experts="Qwen3_5MoeForCausalLM", config=_gated_delta),
    "qwen3next": Dialect(
        "Qwen3NextForCausalLM",
        NORMS_BEHIND,
        experts="Qwen3NextForCausalLM",
        config=_gated_delta,
        parts={"linear_attn.in_proj_qkvz": "attn_qkvz"},
        unpacked=("linear_attn.in_proj_qkvz",),
    ),
    "lfm2": Dialect("Lfm2ForCausalLM", _LFM2_NORMS, config=_lfm2, top=_LFM2_TOP),
    "lfm2moe": Dialect("Lfm2MoeForCausalLM", _LFM2_NORMS, experts="Lfm2MoeForCausalLM", config=_lfm2, top=_LFM2_TOP),
    "kimi-linear": Dialect(
        "KimiLinearForCausalLM",
        NORMS_BEFORE,
        experts="KimiLinearForCausalLM",
        config=_kimi_linear,
        parts=_KIMI_PARTS,
    ),
    "mamba": Dialect("MambaForCausalLM", _MAMBA_NORMS, config=_mamba, attends=False),
    "mamba2": Dialect("Mamba2ForCausalLM", _MAMBA_NORMS, config=_mamba2, attends=False),
    "granitehybrid": Dialect(
        "GraniteMoeHybridForCausalLM",
        _HYBRID_NORMS,
        experts="GraniteMoeHybridForCausalLM",
        interleaved=True,
        config=_granite_hybrid,
        dense_parts={"shared_mlp.input_linear": ("ffn_gate", "ffn_up"), "shared_mlp.output_linear": "ffn_down"},
    ),
}

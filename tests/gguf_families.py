"""What llama.cpp's conversion does to each family beyond its names: entries, and tensors in other shapes and orders.

convert_hf_to_gguf.py decides; these are its rules in a few words, for the configs of `tiny_models`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests import gguf_near

UNLIMITED = {"time_step_limit": [0.0, math.inf]}
_ONE_SCALE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
ARCHITECTURES = {
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "youtu": "deepseek2",
    "granite_moe": "granitemoe",
    "granite_moe_shared": "granitemoe",
    "granite_hybrid": "granitehybrid",
    "granite_hybrid_moe": "granitehybrid",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "mamba": "mamba",
    "falcon_mamba": "mamba",
    "mamba2": "mamba2",
    "gemma4": "gemma4",
    "gemma4_moe": "gemma4",
    "qwen2_moe": "qwen2moe",
    "qwen3_next": "qwen3next",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
}
CHANGES: dict[str, dict[str, Any]] = {  # what the format cannot say
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_next": {"mlp_only_layers": []},
    "glm4_moe_lite": {"rope_interleave": True},
    "youtu": {"rope_parameters": _ONE_SCALE},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "falcon_mamba": {"mixer_rms_eps": 1e-6},
    "mamba2": UNLIMITED,
    "granite_hybrid": {**UNLIMITED, "position_embedding_type": None},
    "granite_hybrid_moe": UNLIMITED,
}
# Common entries: ours → their writers' names
_COMMON = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "head_dim": "attention.key_length",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_SIGMOID = 2
GATED_DELTA = ("qwen35", "qwen35moe", "qwen3next")


_GEMMA4 = {
    "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
}


def entries(config: Any, architecture: str) -> dict[str, Any]:
    """The file's values, without the architecture's name before them."""
    config = SimpleNamespace(**config.to_dict())
    found = {theirs: value for ours, theirs in _COMMON.items() if (value := getattr(config, ours, None)) is not None}
    found["attention.layer_norm_rms_epsilon"] = _first(config, "rms_norm_eps", "norm_eps", "layer_norm_epsilon")
    if (count := _first(config, "num_local_experts", "n_routed_experts", "num_experts")) is not None:
        found["expert_count"] = count
    rope = getattr(config, "rope_parameters", None) or {}
    found["rope.freq_base"] = rope.get("rope_theta")
    if getattr(config, "num_attention_heads", None) and architecture != "deepseek2":
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        found["rope.dimension_count"] = int(width * (rope.get("partial_rotary_factor") or 1))
    if rope.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
        if (scale := rope.get("mscale_all_dim")) is not None:
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * scale
    own = {
        "gemma4": _gemma4,
        "gpt-oss": _gpt_oss,
        "glm4moe": _glm4_moe,
        "deepseek2": gguf_near.latent,
        "granitehybrid": _granite_hybrid,
        "lfm2": _lfm2,
        "lfm2moe": _lfm2,
        "mamba": _mamba,
        "mamba2": _mamba2,
        "qwen35": _gated_delta,
        "qwen35moe": _gated_delta,
        "qwen3next": _gated_delta,
    }.get(architecture, lambda config: {})
    return {**found, **own(config)}


def _first(config: Any, *names: str) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


def _gemma4(config: Any) -> dict[str, Any]:
    own = {int(layer): widths for layer, widths in (getattr(config, "per_layer_config", None) or {}).items()}
    full = own.get(config.num_hidden_layers - 1, {})
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    heads = full.get("num_key_value_heads", config.num_key_value_heads)
    wide = full.get("head_dim") or config.global_head_dim
    rope = config.rope_parameters
    return {
        "attention.sliding_window_pattern": sliding,
        "attention.key_length": wide,
        "attention.key_length_swa": config.head_dim,
        "attention.head_count_kv": [config.num_key_value_heads if each else heads for each in sliding],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "rope.dimension_count": wide,
        "embedding_length_per_layer_input": 0,
        "attention.shared_kv_layers": 0,
        "final_logit_softcapping": config.final_logit_softcapping,
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
    }


def _gpt_oss(config: Any) -> dict[str, Any]:
    return {"expert_feed_forward_length": config.intermediate_size}


def _glm4_moe(config: Any) -> dict[str, Any]:
    return {
        "expert_gating_func": _SIGMOID,
        "block_count": config.num_hidden_layers + 1,
        "nextn_predict_layers": 1,
        "leading_dense_block_count": config.first_k_dense_replace,
    }


def _granite_hybrid(config: Any) -> dict[str, Any]:
    return {
        "attention.head_count_kv": _by_kind(config, "attention"),
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def _by_kind(config: Any, kind: str) -> list[int]:
    return [config.num_key_value_heads if each.endswith(kind) else 0 for each in config.layer_types]


def _lfm2(config: Any) -> dict[str, Any]:
    width = config.intermediate_size
    if getattr(config, "block_auto_adjust_ff_dim", False):
        multiple, factor = config.block_multiple_of, config.block_ffn_dim_multiplier
        width = multiple * -(-int(factor * int(2 * width / 3)) // multiple)
    return {
        "attention.head_count_kv": _by_kind(config, "full_attention"),
        "feed_forward_length": width,
        "shortconv.l_cache": config.conv_L_cache,
        "expert_weights_scale": None,
    }


def _mamba(config: Any) -> dict[str, Any]:
    return {
        "context_length": 2**20,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.state_size,
        "ssm.inner_size": config.intermediate_size,
        "ssm.time_step_rank": config.time_step_rank,
        "ssm.dt_b_c_rms": config.model_type == "falcon_mamba",
        "feed_forward_length": 0,
        "attention.head_count": 0,
    }


def _mamba2(config: Any) -> dict[str, Any]:
    return {
        "context_length": 2**20,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.state_size,
        "ssm.inner_size": config.expand * config.hidden_size,
        "ssm.time_step_rank": config.num_heads,
        "ssm.group_count": config.n_groups,
        "attention.key_length": None,
        "feed_forward_length": 0,
        "attention.head_count": 0,
    }


def _gated_delta(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 4,
        "expert_weights_norm": None,
    }


def changed(config: Any, architecture: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as the conversion writes them, under checkpoints' names or the file's own ("blk.…")."""
    for name, tensor in gguf_near.together(architecture, tensors).items():
        yield from _changed(config, architecture, name, tensor)


def _changed(config: Any, architecture: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    layer = found[1] if (found := re.search(r"\.layers\.(\d+)\.", name)) else ""
    if (others := gguf_near.changed(config, architecture, name, tensor)) is not None:
        yield from others
        return
    if architecture.startswith("qwen35"):
        tensor = _tiled(config, name, tensor)
    if "conv1d.weight" in name or name.endswith("conv.conv.weight"):
        yield name, tensor.squeeze(1)
    elif name.endswith(("A_log", ".D")):
        tensor = -tensor.exp() if name.endswith("A_log") else tensor
        yield name, tensor if architecture in ("mamba", "jamba", *GATED_DELTA) else tensor.unsqueeze(1)
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), tensor
    elif name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        groups = _first(config, "n_groups", "mamba_n_groups")
        yield name, tensor.view(groups, -1)
    elif name.endswith("in_proj_qkvz.weight"):
        yield from _unpacked(config, f"blk.{layer}", tensor)
    elif (
        name.endswith("norm.weight")
        and architecture.startswith(("qwen35", "qwen3next"))
        and "linear_attn.norm" not in name
    ):
        yield name, tensor + 1
    elif name.endswith(("e_score_correction_bias", "expert_bias")):
        yield f"blk.{layer}.exp_probs_b.bias", tensor
    elif architecture == "gemma4" and name.rpartition(f"layers.{layer}.")[2] in _GEMMA4:
        yield f"blk.{layer}.{_GEMMA4[name.rpartition(f'layers.{layer}.')[2]]}", tensor
    elif name.endswith("sinks"):
        yield f"blk.{layer}.attn_sinks.weight", tensor
    elif ".experts." in name and architecture == "lfm2moe":
        part = {"w1": "gate", "w3": "up", "w2": "down"}[name.split(".")[-2]]
        yield f"blk.{layer}.ffn_{part}_exps.weight", tensor
    elif ".experts." in name and architecture == "gpt-oss":
        yield from _alternating(f"blk.{layer}", name.rpartition(".")[2], tensor)
    elif name.endswith("input_linear.weight"):
        experts = "shexp" if "shared_mlp" in name else "exps"
        ends = f"_{experts}" if experts == "exps" or _first(config, "num_local_experts") else ""
        for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
            yield f"blk.{layer}.ffn_{part}{ends}.weight", half
    elif name.endswith("output_linear.weight"):
        experts = "_exps" if "shared_mlp" not in name else "_shexp" if _first(config, "num_local_experts") else ""
        yield f"blk.{layer}.ffn_down{experts}.weight", tensor
    elif name.endswith("kv_b_proj.weight"):
        parts = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
        keys, values = parts.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        yield f"blk.{layer}.attn_k_b.weight", keys.mT
        yield f"blk.{layer}.attn_v_b.weight", values
    else:
        yield name, tensor


def _alternating(layer: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """gpt-oss's experts: stored as [in, out], gate and up in turn."""
    kind = "bias" if name.endswith("_bias") else "weight"
    tensor = tensor if kind == "bias" else tensor.mT
    if name.startswith("down"):
        yield f"{layer}.ffn_down_exps.{kind}", tensor
        return
    yield f"{layer}.ffn_gate_exps.{kind}", tensor[:, ::2]
    yield f"{layer}.ffn_up_exps.{kind}", tensor[:, 1::2]


def _unpacked(config: Any, layer: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Qwen3-Next's: head by head of keys its queries, keys, values and gates; here all of each together."""
    keys, width = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    parts = tensor.view(keys, -1, tensor.shape[1]).split([width, width, values, values], dim=1)
    q, k, v, z = (part.flatten(0, 1) for part in parts)
    yield f"{layer}.attn_qkv.weight", torch.cat((q, k, v))
    yield f"{layer}.attn_gate.weight", z


def _tiled(config: Any, name: str, tensor: Tensor) -> Tensor:
    """Heads of values, those that share keys taken apart: first the first of all keys' heads, then the second."""
    keys, values, width = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    before = 2 * keys * config.linear_key_head_dim

    def tiled(part: Tensor, wide: int) -> Tensor:
        return part.view(keys, values // keys, wide, *part.shape[1:]).transpose(0, 1).reshape(part.shape)

    part = name.partition("linear_attn.")[2]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        return torch.cat((tensor[:before], tiled(tensor[before:], width)))
    if part in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
        return tiled(tensor, 1)
    if part == "in_proj_z.weight":
        return tiled(tensor, width)
    return tiled(tensor.T, width).T if part == "out_proj.weight" else tensor

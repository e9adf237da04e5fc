"""What llama.cpp's conversion writes of families near Llama, and of older ones: `gguf_families` for their configs.

Families are those of tests/models/test_near_families.py and of `tiny_models`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from tests import tiny_models
from tests.models import test_near_families as near

_SIGMOID = 2


@dataclass(frozen=True)
class Written:
    """How a family is written.

    architecture: llama.cpp's name.
    changes: to the config, for what the format cannot say.
    entries: the file's values beyond those that all have.
    permuted: queries and keys are reordered.
    norm: the entry with the epsilon of LayerNorms.
    of: the family whose model it is, if that has another name.
    """

    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    entries: Callable[[Any], dict[str, Any]] = lambda config: {}
    permuted: bool = False
    norm: str = ""
    of: str = ""


def _windows(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types]}


def _cohere(config: Any) -> dict[str, Any]:
    return {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}


def _ernie_moe(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.moe_num_experts,
        "expert_used_count": config.moe_k,
        "expert_shared_count": config.moe_num_shared_experts,
        "leading_dense_block_count": config.moe_layer_start_index,
        "interleave_moe_layer_step": config.moe_layer_interval,
    }


def _exaone_moe(config: Any) -> dict[str, Any]:
    return {**_windows(config), "expert_gating_func": _SIGMOID, "expert_shared_count": config.num_shared_experts}


def _hunyuan_moe(config: Any) -> dict[str, Any]:
    return {
        "expert_used_count": config.moe_topk,
        "expert_shared_count": 1,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
    }


def _llama4(config: Any) -> dict[str, Any]:
    return {
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
    }


def _olmo3(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters["full_attention"]
    return {
        **_windows(config),
        "rope.freq_base": rope["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }


def _ministral3(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "attention.sliding_window": None,
    }


def _gpt2(config: Any) -> dict[str, Any]:
    return {
        "block_count": config.n_layer,
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "feed_forward_length": 4 * config.n_embd,
        "attention.head_count": config.n_head,
    }


def _bloom(config: Any) -> dict[str, Any]:
    return {
        "block_count": config.n_layer,
        "context_length": config.hidden_size,
        "feed_forward_length": 4 * config.hidden_size,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_head,
    }


def _mpt(config: Any) -> dict[str, Any]:
    return {
        "block_count": config.n_layers,
        "context_length": config.max_seq_len,
        "embedding_length": config.d_model,
        "feed_forward_length": 4 * config.d_model,
        "attention.head_count": config.n_heads,
        "attention.max_alibi_bias": float(config.attn_config.alibi_bias_max),
    }


def _falcon(config: Any) -> dict[str, Any]:
    return {
        "context_length": 2048,
        "tensor_data_layout": "jploski",
        "feed_forward_length": config.ffn_hidden_size,
        "attention.head_count_kv": config.num_kv_heads if config.new_decoder_architecture else 1,
    }


def _neox(config: Any) -> dict[str, Any]:
    return {"use_parallel_residual": config.use_parallel_residual}


def _jamba(config: Any) -> dict[str, Any]:
    return {
        **_states(config, config.mamba_expand * config.hidden_size, config.mamba_dt_rank),
        "attention.head_count_kv": [0, 0, config.num_key_value_heads, 0],
    }


def _states(config: Any, inner: int, rank: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.inner_size": inner,
        "ssm.time_step_rank": rank,
    }


def _falcon_h1(config: Any) -> dict[str, Any]:
    return {
        **_states(config, config.mamba_d_ssm, config.mamba_n_heads),
        "ssm.group_count": config.mamba_n_groups,
        "attention.key_length": config.hidden_size // config.num_attention_heads,
    }


def _nemotron_h(config: Any) -> dict[str, Any]:
    kinds, width = config.layers_block_type, config.intermediate_size
    return {
        "attention.head_count_kv": [
            config.num_key_value_heads if kind.endswith("attention") and not kind.startswith("linear") else 0
            for kind in kinds
        ],
        "block_count": len(kinds),
        "expert_count": None,
        "feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in kinds],
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
    }


def _nemotron_h_moe(config: Any) -> dict[str, Any]:
    return {
        **_nemotron_h(config),
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "moe_latent_size": config.moe_latent_size,
        "expert_count": config.n_routed_experts,
    }


def _apertus(config: Any) -> dict[str, Any]:
    return {"rope.dimension_count": config.head_dim}


def latent(config: Any) -> dict[str, Any]:
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rope,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rope,
    }


def _glm_dsa(config: Any) -> dict[str, Any]:
    numbers = {"top_k": config.index_topk, "head_count": config.index_n_heads, "key_length": config.index_head_dim}
    return {
        **latent(config),
        "expert_gating_func": _SIGMOID,
        **{f"attention.indexer.{name}": number for name, number in numbers.items()},
    }


def _mistral4(config: Any) -> dict[str, Any]:
    return {**latent(config), "attention.temperature_scale": config.rope_parameters["llama_4_scaling_beta"]}


def _kimi_linear(config: Any) -> dict[str, Any]:
    """Heads of keys are counted on layers with latent attention alone."""
    told, rotates = config.linear_attn_config, config.linear_attn_config["full_attn_layers"]
    return {
        **latent(config),
        "attention.head_count_kv": [int(layer + 1 in rotates) for layer in range(config.num_hidden_layers)],
        "ssm.conv_kernel": told["short_conv_kernel_size"],
        "kda.head_dim": told["head_dim"],
        "context_length": 256,
        "expert_gating_func": _SIGMOID,
        "expert_shared_count": config.num_shared_experts,
        "expert_used_count": config.num_experts_per_token,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
    }


def _mimo2(config: Any) -> dict[str, Any]:
    near = [kind == "sliding_attention" for kind in config.layer_types]
    return {
        "attention.sliding_window_pattern": [int(each) for each in near],
        "attention.head_count_kv": [config.num_key_value_heads * (1 + each) for each in near],
        "attention.value_length": config.v_head_dim,
        "attention.value_scale": config.attention_value_scale,
        "rope.dimension_count": int(
            config.head_dim * config.rope_parameters["full_attention"]["partial_rotary_factor"]
        ),
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "expert_gating_func": _SIGMOID,
    }


def _gemma3n(config: Any) -> dict[str, Any]:
    shares = torch.tensor(config.activation_sparsity_pattern, dtype=torch.float32)
    rope = config.rope_parameters
    return {
        **_windows(config),
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "final_logit_softcapping": config.final_logit_softcapping,
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "activation_sparsity_scale": torch.distributions.Normal(0, 1).icdf(shares).tolist(),
    }


def _step35(config: Any) -> dict[str, Any]:
    told = config.to_dict()  # in which heads are those of full layers, as asking for them would be ambiguous
    near, rope = [kind == "sliding_attention" for kind in told["layer_types"]], told["rope_parameters"]
    clamps = {"swiglu_clamp_exp": told["swiglu_limits"], "swiglu_clamp_shexp": told["swiglu_limits_shared"]}
    return {
        "attention.sliding_window_pattern": near,
        "attention.sliding_window": told["sliding_window"],
        "attention.head_count": [told[f"num_{'sliding_' if each else ''}attention_heads"] for each in near],
        "attention.head_count_kv": [told["num_key_value_heads"]] * len(near),
        "attention.value_length": told["head_dim"],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "rope.dimension_count": int(told["head_dim"] * rope["full_attention"]["partial_rotary_factor"]),
        "expert_shared_feed_forward_length": told["share_expert_dim"],
        "expert_weights_scale": told["moe_router_scaling_factor"],
        "expert_weights_norm": True,
        "leading_dense_block_count": told["mlp_layer_types"].count("dense"),
        **{name: [float(each or 0) for each in limits] for name, limits in clamps.items()},
    }


def _deci(config: Any) -> dict[str, Any]:
    """Of layers that a search made. They have no heads, and width 0, where a part is left out."""
    groups = [block["attention"]["n_heads_in_group"] for block in config.block_configs]
    heads, mults = config.num_attention_heads, [block["ffn"]["ffn_mult"] or 0 for block in config.block_configs]
    sizes = [int(2 * mult * config.hidden_size / 3) for mult in mults]
    return {
        "attention.head_count": [heads if group else 0 for group in groups],
        "attention.head_count_kv": [heads // group if group else 0 for group in groups],
        "attention.value_length": config.head_dim,
        "feed_forward_length": [-(-size // 256) * 256 for size in sizes],
    }


def _phimoe(config: Any) -> dict[str, Any]:
    return {
        "expert_used_count": config.num_experts_per_tok,
        "rope.scaling.attn_factor": config.rope_parameters["short_mscale"],
        "rope.scaling.original_context_length": config.rope_parameters["original_max_position_embeddings"],
    }


def _minicpm3(config: Any) -> dict[str, Any]:
    return {
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }


def _minicpm(config: Any) -> dict[str, Any]:
    return {"attention.scale": None}  # it is that of Llama, which the format does not say


def _deepseek(config: Any) -> dict[str, Any]:
    return {"leading_dense_block_count": config.first_k_dense_replace, "expert_weights_scale": 1.0}


CONSTANT = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
PHIMOE: dict[str, Any] = {
    "router_jitter_noise": 0.01,
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.2, "long_mscale": 1.2},
        **{"short_factor": [1.0, *[1.5] * 9], "long_factor": [4.0] * 10},
        "original_max_position_embeddings": 256,
    },
}
NEAR = {
    "arcee": Written("arcee", permuted=True),
    "seed_oss": Written("seed_oss"),
    "ernie": Written("ernie4_5"),
    "ernie_moe": Written("ernie4_5-moe", entries=_ernie_moe),
    "cohere": Written("command-r", entries=_cohere, norm="layer_norm_eps"),
    "cohere2": Written("cohere2", entries=lambda c: {**_cohere(c), **_windows(c)}, norm="layer_norm_eps"),
    "glm": Written("chatglm"),
    "glm4": Written("glm4"),
    "exaone4": Written("exaone4", entries=_windows),
    "exaone4_small": Written("exaone4"),
    "exaone_moe": Written("exaone-moe", entries=_exaone_moe),
    "starcoder2": Written("starcoder2", {"sliding_window": None}, norm="norm_epsilon"),
    "stablelm": Written("stablelm", norm="layer_norm_eps"),
    "stablelm_parallel": Written("stablelm", norm="layer_norm_eps"),
    "phi": Written("phi2", {"num_key_value_heads": 4}, norm="layer_norm_eps"),
    "llama4": Written("llama4", CONSTANT, entries=_llama4),
    "falcon_7b": Written("falcon", entries=_falcon, norm="layer_norm_epsilon"),
    "falcon_40b": Written("falcon", entries=_falcon, norm="layer_norm_epsilon"),
    "falcon_11b": Written("falcon", entries=_falcon, norm="layer_norm_epsilon"),
    "mpt": Written("mpt", entries=_mpt, norm="layer_norm_epsilon"),
    "olmo": Written("olmo", permuted=True, norm="layer_norm_eps"),
    "olmo3": Written("olmo2", entries=_olmo3),
    "ministral3": Written("mistral3", entries=_ministral3, permuted=True),
    "apertus": Written("apertus", entries=_apertus),
    "hunyuan": Written("hunyuan-dense"),
    "hunyuan_moe": Written("hunyuan-moe", entries=_hunyuan_moe),
    "glm_moe_dsa": Written("glm-dsa", entries=_glm_dsa),
    "mistral4": Written("mistral4", entries=_mistral4),
    "mimo_v2": Written("mimo2", entries=_mimo2),
    "phimoe": Written("phimoe", PHIMOE, entries=_phimoe),
    "dots1": Written("dots1", {"sliding_window": None}),
    "gemma3n": Written("gemma3n", entries=_gemma3n),
    "step3p7": Written("step35", entries=_step35),
    "decilm": Written("deci", entries=_deci),
}
ONES = {f"{name}_multiplier": 1.0 for name in ("lm_head", "embedding", "key", "attention_in", "attention_out")}
ONES |= {"ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0}
FOLDED = {**ONES, "mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5, "time_step_limit": [0.0, math.inf]}
UNLIMITED = {"time_step_min": 0.001}
TINY = {
    "minicpm3": Written("minicpm3", {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}, entries=_minicpm3),
    "kimi_linear": Written("kimi-linear", {"num_expert_group": 1, "topk_group": 1}, entries=_kimi_linear),
    "minicpm": Written("minicpm", {"attention_multiplier": 0.25}, entries=_minicpm, permuted=True, of="granite"),
    "internlm2": Written("internlm2", permuted=True, of="llama"),
    "exaone": Written("exaone", of="llama"),
    "deepseek": Written("deepseek", entries=_deepseek, permuted=True),
    "falcon_h1": Written("falcon-h1", FOLDED, entries=_falcon_h1),  # whose file has the multipliers in its numbers
    "jamba": Written("jamba", entries=_jamba),
    "nemotron_h": Written("nemotron_h", UNLIMITED, entries=_nemotron_h, norm="layer_norm_epsilon"),
    "nemotron_h_moe": Written("nemotron_h_moe", UNLIMITED, entries=_nemotron_h_moe, norm="layer_norm_epsilon"),
    "minimax_m2": Written("minimax-m2", entries=lambda c: {"expert_feed_forward_length": c.intermediate_size}),
    "gpt2": Written("gpt2", entries=_gpt2, norm="layer_norm_epsilon"),
    "neox": Written("gptneox", entries=_neox, norm="layer_norm_eps"),
    "bloom": Written("bloom", entries=_bloom, norm="layer_norm_epsilon"),
}
FAMILIES = {**NEAR, **TINY}


def model_of(family: str) -> Any:
    """The oracle, with what the format cannot say changed."""
    changes = FAMILIES[family].changes
    if family == "decilm":
        return near.left_by_search()
    return (
        tiny_models.build(FAMILIES[family].of or family, **changes) if family in TINY else near.made(family, **changes)
    )


def entries(family: str, config: PretrainedConfig, common: dict[str, Any]) -> dict[str, Any]:
    """The file's values, without the architecture's name before them. common: those that follow from the config."""
    written, found = FAMILIES[family], dict(common)
    if written.norm:
        del found["attention.layer_norm_rms_epsilon"]
        found["attention.layer_norm_epsilon"] = getattr(config, written.norm, 1e-5)
    return {**found, **written.entries(config)}


def values(architecture: str, model: Any) -> dict[str, Any]:
    """The file's values that have another name before them than the architecture's."""
    if architecture != "apertus":
        return {}
    curves = [layer.mlp.act_fn for layer in model.model.layers]
    return {f"xielu.alpha_{part}": [getattr(each, f"alpha_{part}").item() for each in curves] for part in "pn"}


def changed(config: Any, architecture: str, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]] | None:
    """The tensors that the conversion writes for one; None if it keeps it as it is."""
    layer = found[1] if (found := re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name)) else ""
    if ".act_fn." in name:  # which are values of the file
        return iter(())
    if "query_key_value" in name:
        keys = config.num_kv_heads if getattr(config, "new_decoder_architecture", False) else 1
        heads = keys if architecture == "falcon" else config.num_attention_heads
        return iter([(name, _apart(tensor, heads, config.num_attention_heads // heads))])
    if architecture == "nemotron_h_moe" and ".experts." in name:
        return iter([(f"blk.{layer}.ffn_{'up' if 'up_proj' in name else 'down'}_exps.weight", tensor)])
    if architecture == "gemma3n" and name.endswith("_scale"):
        return iter([(f"{name}.weight", tensor)])
    if architecture == "step35":
        if "vision" in name or "vit_" in name:
            return iter(())
        if name.endswith("router_bias"):
            return iter([(f"blk.{layer}.exp_probs_b.bias", tensor)])
        return iter([(name.replace("language_model.", ""), tensor + 1 if name.endswith("norm.weight") else tensor)])
    if architecture == "deci" and name.endswith(("q_proj.weight", "k_proj.weight")):
        group = config.block_configs[int(layer)]["attention"]["n_heads_in_group"]
        heads = config.num_attention_heads // (1 if "q_proj" in name else group)
        return iter([(name, tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape))])
    if "_latent_proj." in name:
        return iter([(f"blk.{layer}.ffn_latent_{'down' if 'fc1' in name else 'up'}.weight", tensor)])
    if architecture == "mistral4" and ".experts." in name:
        return iter([(f"blk.{layer}.ffn_{'gate_up' if 'gate_up' in name else 'down'}_exps.weight", tensor)])
    if architecture == "kimi-linear" and "conv1d.weight" in name:
        return iter([(name, tensor.view(1, len(tensor), 1, -1))])
    if architecture == "kimi-linear" and name.endswith("A_log"):
        return iter([(name, -tensor.exp())])
    if name.endswith("attention_sink_bias"):
        return iter([(f"blk.{layer}.attn_sinks.weight", tensor)])
    if architecture == "gpt2" and re.search(r"\.c_\w+\.weight", name):
        return iter([(name, tensor.T)])
    if architecture == "llama4" and ".experts." in name:
        if "down_proj" in name:
            return iter([(f"blk.{layer}.ffn_down_exps.weight", tensor.mT)])
        parts = zip(("gate", "up"), tensor.mT.chunk(2, dim=1), strict=True)
        return ((f"blk.{layer}.ffn_{part}_exps.weight", half) for part, half in parts)
    return None


def together(architecture: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, those of Gemma 3n's residual streams stacked."""
    found, streams = dict(tensors), dict[str, list[Tensor]]()
    for name in tensors if architecture == "gemma3n" else ():
        if (stream := re.fullmatch(r"(model\.altup_\w+)\.\d+\.weight", name)) is not None:
            streams.setdefault(f"{stream[1]}.weight", []).append(found.pop(name))
    return found | {name: torch.stack(each) for name, each in streams.items()}


def _apart(tensor: Tensor, heads: int, queries: int) -> Tensor:
    """Queries, keys and values, stored head of keys by head of keys, one below the other."""
    parts = tensor.view(heads, queries + 2, -1, *tensor.shape[1:]).split([queries, 1, 1], dim=1)
    return torch.cat([part.flatten(0, 2) for part in parts])

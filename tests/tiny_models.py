"""Tiny random transformers models, saved as model folders: the oracle of every test that runs a model.

Norms and biases are random too, so that a swapped or forgotten tensor shows. Weights are spread widely, and layers
outweigh the embedding, so that greedy decoding does not repeat one token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from tests import deepseek_oracle, second_oracles

Oracle = Any  # a transformers model, or one of ours with its interface

VOCAB = 320
WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_QWEN3: dict[str, Any] = {**_COMMON, "head_dim": 32, "tie_word_embeddings": True}

_GEMMA: dict[str, Any] = {
    **_COMMON,
    "pad_token_id": None,
    "head_dim": 32,
    "query_pre_attn_scalar": 20,
    "sliding_window": WINDOW,
}

_GEMMA4: dict[str, Any] = {
    **_COMMON,
    "pad_token_id": None,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}

_GRANITE: dict[str, Any] = {
    **_COMMON,
    "num_hidden_layers": 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.5,
}

_GATED_DELTA: dict[str, Any] = {
    **_COMMON,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_GATED_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}

_SELECTIVE: dict[str, Any] = {  # of models without attention
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "time_step_limit": [0.0, 1.5],
}

_GRANITE_HYBRID: dict[str, Any] = {
    **_COMMON,
    **_MAMBA2,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 80,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.5,
}

_LATENT: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

_NEMOTRON_H: dict[str, Any] = {
    **_COMMON,
    "pad_token_id": None,
    "head_dim": 24,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_min": 0.2,
    "use_mamba_kernels": False,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_COMMON, "num_hidden_layers": 2}),
    "llama3": ("Llama", {**_COMMON, "num_hidden_layers": 2, "rope_parameters": _LLAMA3_ROPE, "head_dim": 32}),
    "qwen3": ("Qwen3", {**_QWEN3, "num_hidden_layers": 2}),
    "mistral": ("Mistral", {**_COMMON, "num_hidden_layers": 2, "sliding_window": WINDOW}),
    "mixed": (
        "Qwen3",
        {
            **_QWEN3,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2": (
        "Qwen2",
        {
            **_COMMON,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "gemma2": (
        "Gemma2",
        {**_GEMMA, "num_hidden_layers": 3, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": (
        "Gemma3",
        {
            **_GEMMA,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": (
        "Phi3",
        {
            **_COMMON,
            "num_hidden_layers": 2,
            "pad_token_id": None,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 256,
            "rope_scaling": {
                "type": "longrope",
                "attention_factor": 1.25,
                "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5],
                "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
            },
        },
    ),
    "olmo2": ("Olmo2", {**_COMMON, "num_hidden_layers": 2}),
    "smollm3": (
        "SmolLM3",
        {
            **_COMMON,
            "pad_token_id": None,
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "no_rope_layers": [1, 0, 1, 0],
        },
    ),
    "neox": (
        "GPTNeoX",
        {
            **{name: value for name, value in _COMMON.items() if name != "num_key_value_heads"},
            "num_hidden_layers": 2,
            "rotary_pct": 0.5,
        },
    ),
    "granite": ("Granite", _GRANITE),
    "bloom": (
        "Bloom",
        {
            "vocab_size": VOCAB,
            "hidden_size": 96,
            "n_layer": 2,
            "n_head": 6,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **_QWEN3,
            "num_hidden_layers": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **_COMMON,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "intermediate_size": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
        },
    ),
    "gemma4": ("Gemma4", {**_GEMMA4, "final_logit_softcapping": 8.0}),
    "gemma4_moe": (
        "Gemma4",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "mixtral": ("Mixtral", {**_COMMON, "num_hidden_layers": 2, "sliding_window": WINDOW, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **_COMMON,
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 72,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek": (
        "Deepseek",
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "num_hidden_layers": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
    "olmoe": (
        "Olmoe",
        {**_COMMON, "num_hidden_layers": 2, "intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 4},
    ),
    "granite_moe": (
        "GraniteMoe",
        {**_GRANITE, "intermediate_size": 48, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "granite_moe_shared": (
        "GraniteMoeShared",
        {**_GRANITE, "intermediate_size": 48, "num_local_experts": 5, "shared_intermediate_size": 40},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **_COMMON,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            **_COMMON,
            "num_hidden_layers": 2,
            "head_dim": 32,
            "intermediate_size": 48,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_next": ("Qwen3Next", {**_GATED_DELTA, **_GATED_EXPERTS, "mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5", _GATED_DELTA),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**{name: value for name, value in _GATED_DELTA.items() if name != "intermediate_size"}, **_GATED_EXPERTS},
    ),
    "lfm2": (
        "Lfm2",
        {
            **_COMMON,
            "pad_token_id": None,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 16,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **_COMMON,
            "pad_token_id": None,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            **_COMMON,
            "pad_token_id": None,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_rms_norm": False,
            "mamba_chunk_size": 16,
            "time_step_limit": [0.0, 1.5],
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "mlp_multipliers": [0.9, 0.6],
            "key_multiplier": 0.7,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 0.75,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.6,
        },
    ),
    "jamba": (
        "Jamba",
        {
            **_COMMON,
            "pad_token_id": None,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "mamba": ("Mamba", {**_SELECTIVE, "tie_word_embeddings": False}),
    "falcon_mamba": ("FalconMamba", {**_SELECTIVE, "use_bias": True, "mixer_rms_eps": 1e-3}),
    "mamba2": (
        "Mamba2",
        {
            **_SELECTIVE,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "use_bias": True,
            "time_step_limit": [0.25, 1.5],
            "chunk_size": 16,
        },
    ),
    "bamba": (
        "Bamba",
        {
            **_COMMON,
            **_MAMBA2,
            "pad_token_id": None,
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_n_groups": 1,
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        {**_GRANITE_HYBRID, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "granite_hybrid_moe": (
        "GraniteMoeHybrid",
        {**_GRANITE_HYBRID, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 48},
    ),
    "nemotron_h": (
        "NemotronH",
        {**_NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
    ),
    "nemotron_h_moe": (
        "NemotronH",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 56,
            "moe_latent_size": 32,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            **{name: value for name, value in _COMMON.items() if name != "num_key_value_heads"},
            "pad_token_id": None,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"],
            "chunk_size": 16,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "use_mem_rope": True,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 16,
            "time_step_min": 0.4,
            "use_mamba_kernels": False,
        },
    ),
    "rwkv": (
        "Rwkv",
        {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "attention_hidden_size": 96,
            "intermediate_size": 112,
            "num_hidden_layers": 3,
            "context_length": 256,
            "rescale_every": 2,
            "use_cache": False,  # whose shapes transformers takes from the model width
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
            "max_position_embeddings": 256,
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_LATENT,
            "q_lora_rank": 40,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 40,
            "attention_bias": True,
            "max_position_embeddings": 256,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v32": (
        "DeepseekV32",
        {
            **_LATENT,
            "num_hidden_layers": 2,
            "q_lora_rank": 40,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 40,
            "max_position_embeddings": 256,
            "index_topk": 10,
            "index_n_heads": 16,
            "index_head_dim": 32,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **_LATENT,
            "q_lora_rank": 24,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 40,
            "rope_interleave": False,
        },
    ),
    "youtu": (
        "Youtu",
        {**_LATENT, "q_lora_rank": 40, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "minicpm3": (
        "MiniCPM3",
        {
            **_LATENT,
            "q_lora_rank": 40,
            "v_head_dim": None,
            "attention_bias": True,
            "scale_emb": 3.0,
            "scale_depth": 1.2,
            "dim_model_base": 24,
            "tie_word_embeddings": False,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            **{name: value for name, value in _LATENT.items() if name != "max_position_embeddings"},
            "model_max_length": 256,
            "pad_token_id": None,
            "num_experts": 8,
            "num_experts_per_token": 3,
            "num_expert_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 40,
            "linear_attn_config": {
                "kda_layers": [1, 3],
                "full_attn_layers": [2],
                "head_dim": 16,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCAB,
            "n_positions": 256,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}

EMBEDDED = {
    "gemma2": 1 / 16,
    "gemma3": 1 / 16,
    "gemma4": 1 / 8,
    "gemma4_moe": 1 / 8,
    "bloom": 4.0,
}  # these make their embeddings larger, or norm them
SPREAD = {"zamba2": 0.1}  # of layers' matrices, where norms of sums that no residual joins would make roundings large
CONFIG_CLASSES = {name: f"{name}TextConfig" for name in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")}
ZERO_CENTRED = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # checkpoints hold norms' weights less one
FAMILIES = tuple(CONFIGS)
LATENT = (  # with latent attention
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"),
    *("youtu", "minicpm3", "kimi_linear"),
)
# Families with recurrent mixers, which are not trained
RECURRENT = (
    *("lfm2", "lfm2_moe", "falcon_h1", "jamba", "zamba2", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
    *("mamba", "falcon_mamba", "mamba2", "bamba", "granite_hybrid", "granite_hybrid_moe"),
    *("nemotron_h", "nemotron_h_moe", "rwkv", "kimi_linear"),
)
ATTENDING = tuple(family for family in FAMILIES if family not in RECURRENT)

# The plain feed-forwards of Kimi Linear, which transformers saves under the name of its mixtures, and the hub does not
_PLAIN = re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj\.)")

# Classes that transformers lacks: config → model
OWN: dict[str, Callable[[dict[str, Any]], Oracle]] = {"Deepseek": deepseek_oracle.DeepseekForCausalLM}


def build(family: str, *, as_it_is: bool = False, **changes: Any) -> Oracle:
    """The oracle for `family` in float32, `changes` made to its config. The same numbers on every call.

    as_it_is: what this version of transformers is known to compute wrongly stays so.
    """
    kind, values = CONFIGS[family]
    model = _empty(kind, {**values, **changes}).eval()
    generator = torch.Generator().manual_seed(sum(family.encode()))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("e_score_correction_bias", "expert_bias")):  # a buffer, of digits that half precisions hold
            tensor.copy_(torch.randint(-32, 33, tensor.shape, generator=generator) / 64)
        if name.endswith("layer_scalar"):
            tensor.fill_(0.75 + 0.5 * torch.rand((), generator=generator))
    for name, parameter in model.named_parameters():
        mean = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0  # a norm's weight
        if family in ZERO_CENTRED:
            mean = float(name.endswith("linear_attn.norm.weight"))  # the only norm without an offset
        mean = -2.0 if name.endswith("A_log") else mean  # states that remember for some twenty tokens
        std = (
            SPREAD.get(family, 0.3)
            if parameter.ndim >= 2 and ("layers." in name or "h." in name or "blocks." in name)
            else 0.2
        )
        if name.endswith(("embed_tokens.weight", "word_embeddings_layernorm.weight")):
            mean, std = mean * EMBEDDED.get(family, 1), std * EMBEDDED.get(family, 1)
        with torch.no_grad():
            parameter.normal_(mean, std, generator=generator)
    if not as_it_is:
        second_oracles.repair(model)
    return model


def _empty(kind: str, values: dict[str, Any]) -> Oracle:
    if kind in OWN:
        return OWN[kind](values)
    settings = getattr(transformers, CONFIG_CLASSES.get(kind, f"{kind}Config"))
    config = settings(**values, attn_implementation="eager")  # the others leave soft caps out
    return getattr(transformers, kind + ("LMHeadModel" if kind == "GPT2" else "ForCausalLM"))(config)


def of_config(config: dict[str, Any]) -> Oracle:
    """The oracle that a hub's config.json describes."""
    name = config["architectures"][0]
    if (kind := name.removesuffix("ForCausalLM")) in OWN:
        return OWN[kind](config)
    return getattr(transformers, name)(transformers.AutoConfig.for_model(**config))


def tensors(model: Oracle) -> dict[str, Tensor]:
    """A model's parameters, without those that are tied to others, and the buffers that belong to its state."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
    return {**dict(model.named_parameters()), **buffers}


def as_stored(model: Oracle, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the model's names and shapes, such as parameters or their gradients, as a checkpoint holds them:
    transformers keeps experts of one layer together, and hubs keep them apart."""
    stored = dict(tensors)
    if isinstance(model, transformers.PreTrainedModel):
        stored = revert_weight_conversion(model, stored)
    return {_PLAIN.sub(r".mlp.\1", name): tensor for name, tensor in stored.items()}


def save(family: str, folder: Path, **changes: Any) -> Path:
    """Save `build(family, **changes)` to `folder` as the hub would hold it."""
    build(family, **changes).save_pretrained(folder)
    if family == "kimi_linear":
        file = folder / "model.safetensors"
        save_file({_PLAIN.sub(r".mlp.\1", name): tensor for name, tensor in load_file(file).items()}, file)
    return folder


@torch.no_grad()
def greedy(family: str, prompt: list[int], num_tokens: int) -> list[int]:
    """What the oracle finds most likely after `prompt`, token by token."""
    model, ids = build(family), torch.tensor([prompt])
    for _ in range(num_tokens):
        ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
    return ids[0, len(prompt) :].tolist()

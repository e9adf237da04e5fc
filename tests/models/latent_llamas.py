"""Published models with latent attention beside other things, as their config.json has them."""

from __future__ import annotations

from typing import Any

FULL = [4, 8, 12, 16, 20, 24, 27]

KIMI_LINEAR_48B: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": FULL,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 28) if layer not in FULL],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}

_FACTORS = [
    *(1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725),
    *(2.093982484148734, 3.1446935121267696, 4.937952647693647, 7.524541999994549),
    *(10.475458000005451, 13.062047352306353, 14.85530648787323, 15.906017515851266),
    *(16.461961959767827, 16.740306425132907, 16.87581087164081, 16.940876586213285),
]

MINICPM3_4B: dict[str, Any] = {
    "architectures": ["MiniCPM3ForCausalLM"],
    "bos_token_id": 1,
    "dim_model_base": 256,
    "eos_token_id": [2, 73440],
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.1,
    "intermediate_size": 6400,
    "kv_lora_rank": 256,
    "max_position_embeddings": 32768,
    "model_type": "minicpm3",
    "num_attention_heads": 40,
    "num_hidden_layers": 62,
    "num_key_value_heads": 40,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": _FACTORS,
        "original_max_position_embeddings": 32768,
        "short_factor": _FACTORS,
        "type": "longrope",
    },
    "scale_depth": 1.4,
    "scale_emb": 12,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 73448,
}

YOUTU_LLM_2B: dict[str, Any] = {
    "architectures": ["YoutuForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "dtype": "bfloat16",
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "youtu",
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1600000, "rope_type": "default"},
    "tie_word_embeddings": True,
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 128256,
}

# transformers asks for the factor of every scaling, which this one does not have and which would be 1
_WITH_FACTOR = {**MINICPM3_4B, "rope_scaling": {**MINICPM3_4B["rope_scaling"], "factor": 1.0}}
LATENT_LLAMAS = {"kimi_linear": KIMI_LINEAR_48B, "minicpm3": _WITH_FACTOR, "youtu": YOUTU_LLM_2B}

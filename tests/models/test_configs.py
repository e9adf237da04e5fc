"""config.json → ModelSpec: what transformers would build, or one clear sentence."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.delta import GatedDeltaSpec
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.latent import LatentAttentionSpec
from ridgeline.core.specs.model import RopeSpec
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.rotary import cos_sin_table, inverse_frequencies
from ridgeline.models import ARCHITECTURES, SAME, descriptions, model_config
from ridgeline.models.config import ModelConfig
from ridgeline.models.experts import COUNTS
from ridgeline.training.linear import GLA_CONFIG, RETNET_CONFIG
from ridgeline.weights.loader import checkpoint_views, empty_decoder
from tests import tiny_models
from tests.models import encoder_decoder_configs, pooled_configs, vision_configs, whisper_configs
from tests.models.latent_configs import LATENT
from tests.models.latent_llamas import LATENT_LLAMAS
from tests.models.near_configs import (
    GEMMA_3N_E2B,
    INTERNLM3_8B,
    KIMI_K2_5,
    MINIMAX_M1,
    MISTRAL_4,
    NEAR,
    NEMOTRON_SUPER,
    PHI_3_5_MOE,
    STEP_3_5_FLASH,
)
from tests.models.selective_configs import SELECTIVE
from tests.weights.loading import OPS

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}

QWEN2_5_0_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

GEMMA_2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "vocab_size": 256000,
}

GEMMA_3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}

PHI_4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 199999,
    "eos_token_id": 199999,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 199999,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1 + pair * 0.7 for pair in range(48)],  # the published ones grow likewise, less evenly
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 200064,
}

OLMO_2_1B: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 100352,
}

SMOLLM3_3B: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pad_token_id": 128004,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 128256,
}

PYTHIA_160M: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_parallel_residual": True,
    "vocab_size": 50304,
}

GRANITE_3_3_2B: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49159,
}

BLOOM_560M: dict[str, Any] = {
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["BloomForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "layer_norm_epsilon": 1e-05,
    "model_type": "bloom",
    "n_embed": 1024,
    "n_layer": 24,
    "num_attention_heads": 16,
    "vocab_size": 250880,
}

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}

GEMMA_4_31B: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "attention_bias": False,
    "attention_k_eq_v": True,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": "vision",
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}

GEMMA_4_26B_A4B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "dtype": "bfloat16",
    "eos_token_id": [1, 106],
    "model_type": "gemma4",
    "text_config": {
        **{name: value for name, value in GEMMA_4_31B.items() if name not in ("architectures", "eos_token_id")},
        "enable_moe_block": True,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "top_k_experts": 8,
    },
    "tie_word_embeddings": True,
    "vision_config": {"model_type": "gemma4_vision", "num_hidden_layers": 2},
}

MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}

QWEN1_5_MOE_A2_7B: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

DEEPSEEK_MOE_16B: dict[str, Any] = {
    "architectures": ["DeepseekForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "max_position_embeddings": 4096,
    "model_type": "deepseek",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 102400,
}

OLMOE_1B_7B: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 50304,
}

GRANITE_3_1_3B_A800M: dict[str, Any] = {
    "architectures": ["GraniteMoeForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12.0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "logits_scaling": 6.0,
    "max_position_embeddings": 131072,
    "model_type": "granitemoe",
    "num_attention_heads": 24,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 40,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49155,
}

GRANITE_MOE_SHARED: dict[str, Any] = {
    **GRANITE_3_1_3B_A800M,
    "architectures": ["GraniteMoeSharedForCausalLM"],
    "model_type": "granitemoeshared",
    "num_local_experts": 62,
    "num_experts_per_tok": 6,
    "shared_intermediate_size": 1024,
}

GLM_4_5_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": 151552,
}

MINIMAX_M2: dict[str, Any] = {  # without its fp8
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}

LFM2_1_2B: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}

LFM2_8B_A1B: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
    "max_position_embeddings": 128000,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
    "vocab_size": 65536,
}

JAMBA_MINI: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"],
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "bos_token_id": 1,
    "eos_token_id": [2, 519],
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "model_type": "jamba",
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}

FALCON_H1_7B: dict[str, Any] = {  # with the multipliers of the 0.5B
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "bos_token_id": 1,
    "embedding_multiplier": 5.656854249492381,
    "eos_token_id": 11,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "key_multiplier": 0.39062499999999994,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 128,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831845, 0.5859375],
    "model_type": "falcon_h1",
    "num_attention_heads": 12,
    "num_hidden_layers": 44,
    "num_key_value_heads": 2,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 130048,
}

ZAMBA2_2_7B: dict[str, Any] = {
    "adapter_rank": 128,
    "add_bias_linear": False,
    "architectures": ["Zamba2ForCausalLM"],
    "attention_head_dim": 160,
    "attention_hidden_size": 5120,
    "bos_token_id": 1,
    "chunk_size": 256,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "layers_block_type": ["hybrid" if layer in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "mamba" for layer in range(54)],
    "mamba_d_conv": 4,
    "mamba_d_state": 64,
    "mamba_expand": 2,
    "mamba_headdim": 64,
    "mamba_ngroups": 1,
    "max_position_embeddings": 4096,
    "model_type": "zamba2",
    "n_mamba_heads": 80,
    "num_attention_heads": 32,
    "num_hidden_layers": 54,
    "num_key_value_heads": 32,
    "num_mem_blocks": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000,
    "time_step_floor": 0.0001,
    "time_step_limit": None,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "torch_dtype": "bfloat16",
    "use_conv_bias": True,
    "use_long_context": False,
    "use_mem_rope": False,
    "use_shared_attention_adapter": False,
    "vocab_size": 32000,
}

QWEN3_NEXT_80B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}

QWEN3_5_9B: dict[str, Any] = {
    **vision_configs.QWEN3_5_TEXT,
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "linear_num_value_heads": 32,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
}

RWKV_169M: dict[str, Any] = {
    "architectures": ["RwkvForCausalLM"],
    "attention_hidden_size": 768,
    "bos_token_id": 0,
    "context_length": 1024,
    "eos_token_id": 0,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_epsilon": 1e-05,
    "model_type": "rwkv",
    "num_hidden_layers": 12,
    "rescale_every": 6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 50277,
}

POOLED = {
    "bert": pooled_configs.BGE_LARGE,
    "bert_classifier": pooled_configs.MINILM_RERANKER,
    "roberta": pooled_configs.ROBERTA_LARGE,
    "roberta_classifier": pooled_configs.classifier(pooled_configs.ROBERTA_LARGE),
    "xlm_roberta_classifier": pooled_configs.BGE_RERANKER_M3,
    **{
        name: made
        for model in (
            pooled_configs.DISTILBERT,
            pooled_configs.ELECTRA_SMALL,
            pooled_configs.ALBERT_BASE,
            pooled_configs.MPNET_BASE,
            pooled_configs.NOMIC_BERT,
            pooled_configs.JINA_V3,
            pooled_configs.DEBERTA_V3,
        )
        for name, made in (
            (model["model_type"], model),
            (f"{model['model_type']}_classifier", pooled_configs.classifier(model)),
        )
    },
    "clip": pooled_configs.CLIP_L_14,
    "siglip": pooled_configs.SIGLIP_SO400M,
    "siglip2": pooled_configs.SIGLIP_2_NAFLEX,
    "modernbert": pooled_configs.MODERNBERT,
    "modernbert_classifier": pooled_configs.MODERN_CLASSIFIER,
    "gemma2_classifier": pooled_configs.classifier(GEMMA_2_2B),
    "neox_classifier": pooled_configs.classifier(PYTHIA_160M),
    "gpt2_classifier": pooled_configs.classifier(GPT2),
    "llama_classifier": pooled_configs.classifier(LLAMA_3_1_8B),
    "qwen2_classifier": pooled_configs.classifier(QWEN2_5_0_5B),
    "qwen3_classifier": pooled_configs.classifier(QWEN3_0_6B),
}
# Of architectures that transformers does not have, at least not by the hub's name; and of one whose experts it stores
# With heads, or of encoders, for which transformers has no class
OF_TOKENS = (
    pooled_configs.GTE,
    pooled_configs.classifier(pooled_configs.GTE),
    {**pooled_configs.BGE_LARGE, "architectures": ["HF_ColBERT"]},
    {**QWEN2_5_0_5B, "architectures": ["Qwen2ForRewardModel"]},
    {**QWEN2_5_0_5B, "architectures": ["Qwen2ForProcessRewardModel"]},
)
# as one
OUR_OWN = (
    *(GLA_CONFIG, RETNET_CONFIG, INTERNLM3_8B, KIMI_K2_5, MISTRAL_4, NEMOTRON_SUPER),
    *(MINIMAX_M1, PHI_3_5_MOE, STEP_3_5_FLASH, GEMMA_3N_E2B),
)

PUBLISHED = {
    "llama": LLAMA_3_1_8B,
    "qwen3": QWEN3_0_6B,
    "mistral": MISTRAL_7B,
    "gpt2": GPT2,
    "qwen2": QWEN2_5_0_5B,
    "gemma2": GEMMA_2_2B,
    "gemma3": GEMMA_3_1B,
    "phi3": PHI_4_MINI,
    "olmo2": OLMO_2_1B,
    "smollm3": SMOLLM3_3B,
    "neox": PYTHIA_160M,
    "granite": GRANITE_3_3_2B,
    "bloom": BLOOM_560M,
    "gpt_oss": GPT_OSS_20B,
    "gemma4": GEMMA_4_31B,
    "gemma4_multimodal": GEMMA_4_26B_A4B,
    "mixtral": MIXTRAL_8X7B,
    "qwen2_moe": QWEN1_5_MOE_A2_7B,
    "qwen3_moe": QWEN3_30B_A3B,
    "deepseek": DEEPSEEK_MOE_16B,
    "olmoe": OLMOE_1B_7B,
    "granite_moe": GRANITE_3_1_3B_A800M,
    "granite_moe_shared": GRANITE_MOE_SHARED,
    "glm4_moe": GLM_4_5_AIR,
    "minimax_m2": MINIMAX_M2,
    "qwen3_next": QWEN3_NEXT_80B_A3B,
    "qwen3_5": QWEN3_5_9B,
    "qwen3_5_multimodal": vision_configs.QWEN3_5_27B,
    "qwen3_5_moe": vision_configs.QWEN3_5_35B_A3B_TEXT,
    "qwen3_5_moe_multimodal": vision_configs.QWEN3_5_35B_A3B,
    "lfm2": LFM2_1_2B,
    "lfm2_moe": LFM2_8B_A1B,
    "jamba": JAMBA_MINI,
    "falcon_h1": FALCON_H1_7B,
    "zamba2": ZAMBA2_2_7B,
    "rwkv": RWKV_169M,
    **SELECTIVE,
    **LATENT,
    **LATENT_LLAMAS,
    **NEAR,
}


def rope_of(config: ModelConfig, layer: int = 0) -> RopeSpec:
    rope = config.spec.layers[layer].mixer.rope
    assert rope is not None
    return rope


@pytest.mark.few(36)
@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_published_sizes_hold_exactly_the_tensors_transformers_would(config: dict[str, Any]) -> None:
    ours = model_config(config)
    meta = torch.device("meta")
    decoder = Decoder(ours.spec, OPS, dtype=torch.bfloat16, device=meta, max_positions=1)
    views = checkpoint_views(decoder, ours.weights)
    with meta:
        oracle = tiny_models.of_config(config)
    tensors = tiny_models.as_stored(oracle, tiny_models.tensors(oracle))
    wanted = {name: list(tensor.shape) for name, tensor in tensors.items() if not name.startswith(ours.spec.unused)}
    assert {name: view.shape for name, view in views.items()} == wanted
    assert ours.weights.keys() == dict(decoder.named_parameters()).keys()


@pytest.mark.parametrize("config", [LLAMA_3_1_8B, QWEN3_0_6B, MISTRAL_7B], ids=["llama3", "qwen3", "mistral"])
def test_rotary_table_equals_transformers(config: dict[str, Any]) -> None:
    """Angles are float32 products of up to 4096 * 1 rad in both; equal products give equal cosines."""
    oracle_config = transformers.AutoConfig.for_model(**config)
    oracle = LlamaRotaryEmbedding(oracle_config)
    rope = rope_of(model_config(config))
    torch.testing.assert_close(inverse_frequencies(rope, 4096)[0], oracle.inv_freq, rtol=1e-6, atol=0)
    cos, sin = oracle(torch.empty(1, dtype=torch.float32), torch.arange(4096)[None])
    half = rope.rotary_dim // 2
    want = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    torch.testing.assert_close(cos_sin_table(rope, 4096), want, rtol=0, atol=4096 * 2.0**-23)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 64 for i in range(64)],
    "long_factor": [1.0 + i for i in range(64)],
}
SCALINGS: list[tuple[dict[str, Any], int]] = [
    ({"rope_type": "linear", "factor": 4.0}, 4096),
    ({"rope_type": "dynamic", "factor": 2.0}, 8192),
    ({"rope_type": "dynamic", "factor": 2.0}, 3000),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
    ({"rope_type": "yarn", "factor": 8.0, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}, 4096),
    ({"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3}, 4096),
    ({"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.1, "partial_rotary_factor": 0.5}, 4096),
    ({**LONGROPE, "factor": 4.0}, 4096),
    ({**LONGROPE, "factor": 4.0}, 4097),
    ({**LONGROPE, "original_max_position_embeddings": 1024}, 4096),
]


@pytest.mark.parametrize(("scaling", "positions"), SCALINGS, ids=str)
def test_scaled_rotations_are_transformers_for_a_context_of_that_length(
    scaling: dict[str, Any], positions: int
) -> None:
    parameters = {"rope_theta": 10000.0, "original_max_position_embeddings": 4096, **scaling}
    config = {**LLAMA_3_1_8B, "max_position_embeddings": 4096, "rope_parameters": parameters}
    config.pop("rope_scaling")
    oracle_config = transformers.AutoConfig.for_model(**config)
    want, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](oracle_config, torch.device("cpu"), seq_len=positions)
    got, ours = inverse_frequencies(rope_of(model_config(config)), positions)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert ours == pytest.approx(magnitude, rel=1e-12)


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({**LONGROPE, "original_max_position_embeddings": 1024}, 4096),
    ],
    ids=str,
)
def test_a_scaling_by_a_factor_lengthens_the_context(scaling: dict[str, Any], context: int) -> None:
    config = {**LLAMA_3_1_8B, "max_position_embeddings": 4096, "rope_scaling": scaling}
    assert model_config(config).spec.max_position_embeddings == context


def test_rope_parameters_and_rope_scaling_are_one_thing() -> None:
    new = {key: value for key, value in LLAMA_3_1_8B.items() if not key.startswith("rope")}
    new["rope_parameters"] = {**LLAMA_3_1_8B["rope_scaling"], "rope_theta": 500000.0}
    assert model_config(new) == model_config(LLAMA_3_1_8B)


def test_a_gpt_oss_without_rotary_entries_rotates_as_the_published_ones() -> None:
    """As transformers has it. tests/models/test_decoder.py cannot ask, since transformers writes what it assumed."""
    bare = {name: value for name, value in GPT_OSS_20B.items() if not name.startswith("rope")}
    assert rope_of(model_config(bare)) == rope_of(model_config(GPT_OSS_20B))


def test_rope_parameters_may_differ_by_layer_type() -> None:
    config = model_config(
        {
            **QWEN3_0_6B,
            "use_sliding_window": True,
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"] * 14,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    )
    assert [rope_of(config, layer).theta for layer in (0, 1, 2)] == [1e4, 1e6, 1e4]
    assert [config.spec.layers[layer].mixer.window for layer in (0, 1, 2)] == [512, None, 512]


def test_llama3_scaling_without_an_original_length_takes_the_models_own() -> None:
    scaling = {**LLAMA_3_1_8B["rope_scaling"], "original_max_position_embeddings": None}
    rope = rope_of(model_config({**LLAMA_3_1_8B, "rope_scaling": scaling}))
    assert dict(rope.scaling or ())["original_max_position_embeddings"] == 131072


@pytest.mark.parametrize("first_window_layer", [0, 1, 28])
def test_qwen3_windows_start_at_max_window_layers(first_window_layer: int) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": first_window_layer}
    oracle = transformers.AutoConfig.for_model(**{**QWEN3_0_6B, **changes}).layer_types
    spec = model_config({**QWEN3_0_6B, **changes}).spec
    assert [layer.mixer.window == 64 for layer in spec.layers] == [kind == "sliding_attention" for kind in oracle]


@pytest.mark.parametrize(
    ("kind", "absent"),
    [
        (
            "llama",
            ["num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act", "attention_bias"],
        ),
        ("mistral", ["num_key_value_heads", "sliding_window", "rope_theta", "rms_norm_eps", "max_position_embeddings"]),
        ("qwen3", ["num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings", "max_position_embeddings"]),
        ("gpt2", ["layer_norm_epsilon", "n_positions", "activation_function"]),
        ("mixtral", ["num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings"]),
        ("qwen2_moe", ["num_key_value_heads", "max_position_embeddings", "use_sliding_window"]),
        ("qwen3_moe", ["head_dim", "num_key_value_heads", "max_position_embeddings", "sliding_window"]),
        ("olmoe", ["num_key_value_heads", "rms_norm_eps", "max_position_embeddings"]),
        ("granite_moe", ["num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"]),
        ("glm4_moe", ["num_key_value_heads", "rms_norm_eps", "max_position_embeddings"]),
        ("minimax_m2", ["num_key_value_heads", "head_dim", "rope_theta", "max_position_embeddings"]),
        ("gpt_oss", ["num_key_value_heads", "head_dim", "num_local_experts", "max_position_embeddings"]),
    ],
)
def test_absent_entries_take_transformers_defaults(kind: str, absent: list[str]) -> None:
    config = {key: value for key, value in PUBLISHED[kind].items() if key not in absent}
    config |= {"num_attention_heads": 32} if kind == "qwen3" else {}
    oracle = transformers.AutoConfig.for_model(**config)
    spec = model_config(config).spec
    mixer = spec.layers[0].mixer
    width = getattr(oracle, "head_dim", None)
    assert mixer.head_dim == (width or oracle.hidden_size // oracle.num_attention_heads)
    assert mixer.num_kv_heads == getattr(oracle, "num_key_value_heads", oracle.num_attention_heads)
    assert mixer.window == (oracle.sliding_window if kind in ("mistral", "gpt_oss") else None)
    assert spec.max_position_embeddings == oracle.max_position_embeddings
    assert spec.tie_word_embeddings == oracle.tie_word_embeddings
    assert spec.final_norm.eps == (oracle.layer_norm_epsilon if kind == "gpt2" else oracle.rms_norm_eps)
    if kind != "gpt2":
        assert mixer.rope is not None
        assert mixer.rope.theta == oracle.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("base", "generation", "want"),
    [
        (2, None, (2,)),
        ([5, 6, 5], None, (5, 6)),
        (None, None, ()),
        (7, {"eos_token_id": [8, 7]}, (8, 7)),
        (7, {"eos_token_id": None}, (7,)),
        (0, {}, (0,)),
    ],
)
def test_end_of_sequence_ids(base: Any, generation: dict[str, Any] | None, want: tuple[int, ...]) -> None:
    assert model_config({**GPT2, "eos_token_id": base}, generation).eos_token_ids == want


@pytest.mark.parametrize(
    ("entries", "want"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_checkpoint_dtype(entries: dict[str, str], want: str) -> None:
    assert model_config({**GPT2, **entries}).dtype == want


def test_generation_defaults_keep_only_sampling_numbers() -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "min_p": None, "bos_token_id": 1}
    assert model_config(GPT2, generation).sampling_defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama",
        {"architectures": ["T5Model"]},
        "T5Model.*none of which we know; `ridgeline models` lists",
    ),
    ("llama", {"architectures": None}, "None, none of which we know"),
    (
        "qwen2",
        {"is_causal": False, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        "is_causal to False, and layers with a window see no later tokens",
    ),
    ("llama", {"rope_scaling": {"rope_type": "swirl"}}, "scaling 'swirl'.*known: default, linear"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "no factor"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": -2.0}}, "factor to -2.0; it must be a number above 0"),
    ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "no short_factor"),
    ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0] * 48, "long_factor": 2}}, "list of 48 numbers"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 1e30}}, "factor to 1e.30; it must be such that a context"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 1e-9}}, "factor to 1e-09; it must be such that a context"),
    ("llama", {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "above 1 for rotary scaling yarn"),
    ("llama", {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotates 2 dimensions"),
    ("gemma3", {"rope_scaling": "yes"}, "rope_scaling to 'yes'; it must be an object"),
    ("smollm3", {"no_rope_layers": [1, 2]}, "36 entries, each 0 or 1"),
    ("gemma2", {"use_bidirectional_attention": True}, "only causal attention"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "the residual is taken before the norm"),
    ("neox", {"num_attention_heads": 7}, "7 heads do not divide"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "no low_freq_factor"),
    ("llama", {"rope_scaling": "yes"}, "rope_scaling to 'yes'; it must be an object"),
    ("llama", {"rope_scaling": {**LLAMA_3_1_8B["rope_scaling"], "low_freq_factor": 4.0}}, "below high_freq_factor"),
    ("llama", {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "no full_attention"),
    ("llama", {"partial_rotary_factor": 0.26}, "rotates 33 of 128"),
    ("llama", {"hidden_act": "relu2"}, "hidden_act to 'relu2'.*gelu_new"),
    ("llama", {"hidden_size": None}, "has no hidden_size"),
    ("llama", {"hidden_size": "4096"}, "hidden_size to '4096'; it must be a whole number"),
    ("llama", {"num_hidden_layers": 0}, "at least 1"),
    ("llama", {"num_key_value_heads": 5}, "32 attention heads and 5 key/value heads"),
    ("llama", {"rms_norm_eps": -1}, "rms_norm_eps to -1"),
    ("llama", {"attention_bias": "no"}, "attention_bias to 'no'; it must be true or false"),
    ("llama", {"torch_dtype": "float64"}, "dtype to 'float64'; it must be one of float32"),
    ("llama", {"eos_token_id": "</s>"}, "eos_token_id to '</s>'"),
    ("mistral", {"layer_types": ["full_attention"] * 32}, "layer_types.*one sliding_window for all"),
    ("mistral", {"sliding_window": 0}, "sliding_window to 0"),
    ("qwen3", {"layer_types": ["full_attention"]}, "must be 28 entries"),
    ("qwen3", {"use_sliding_window": True, "layer_types": ["linear_attention"] * 28}, "each full_attention or sliding"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 28}, "use_sliding_window is false"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit to 5.0; it must be 7.0"),
    ("gpt_oss", {"num_experts_per_tok": 33}, "num_experts_per_tok to 33; it must be at most the 32"),
    (
        "gemma4",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5},
        "top_k_experts to 5; .* at most the 4",
    ),
    ("gemma4", {"enable_moe_block": True}, "no num_experts"),
    ("gemma4", {"hidden_size_per_layer_input": "256"}, "per_layer_input to '256'; it must be a whole number"),
    ("gemma4", {"num_kv_shared_layers": 60}, "num_kv_shared_layers to 60; it must be so few that"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "only causal attention"),
    ("gemma4_multimodal", {"text_config": None}, "no text_config"),
    ("gemma4_multimodal", {"text_config": [1]}, "text_config to .1.; it must be an object"),
    ("gemma4", {"per_layer_config": {"60": {"head_dim": 512}}}, "has '60'; the layers are 0 to 59"),
    ("gemma4", {"per_layer_config": {"full_attention": {}}}, "has 'full_attention'; the layers are 0 to 59"),
    ("gemma4", {"per_layer_config": {"05": [512]}}, "05 to .512.; it must be an object"),
    (
        "gemma4",
        {"per_layer_config": {"05": {"sliding_window": 4}}},
        "sets sliding_window of layer 05; only head_dim and",
    ),
    ("gemma4", {"per_layer_config": {"5": {"head_dim": "wide"}}}, "head_dim to 'wide'; it must be a whole number"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention.*without an encoder"),
    ("gpt2", {"n_head": 7}, "n_embd 768, which its 7 heads"),
    ("qwen3_moe", {"num_experts": None}, "has no num_experts; the model cannot be built"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts to 0; it must be a whole number of at least 1"),
    ("mixtral", {"num_local_experts": 4097}, "num_local_experts to 4097; .* at most 4096"),
    ("glm4_moe", {"n_routed_experts": "many"}, "n_routed_experts to 'many'; it must be a whole number"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok to 9; it must be at most the 8 of num_local_experts"),
    ("glm4_moe", {"n_group": 3}, "n_group to 3; it must be a divisor of the 128 of n_routed_experts"),
    ("glm4_moe", {"n_group": 128, "topk_group": 128}, "n_group to 128; .* with 2 or more experts in a group"),
    ("glm4_moe", {"n_group": 4, "topk_group": 5}, "topk_group to 5; it must be at most the 4 of n_group"),
    (
        "glm4_moe",
        {"n_group": 64, "topk_group": 3},
        "per_tok to 8; it must be at most 6, the experts of the 3 of topk_gr",
    ),
    ("glm4_moe", {"routed_scaling_factor": "2"}, "routed_scaling_factor to '2'; it must be a number above 0"),
    ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts to -1; it must be a whole number of at least 0"),
    ("qwen2_moe", {"mlp_only_layers": "0"}, "mlp_only_layers to '0'; it must be a list of the numbers of layers"),
    ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step to 0; it must be a whole number of at least 1"),
    ("deepseek", {"scoring_func": "sigmoid"}, "scoring_func to 'sigmoid'; it must be softmax"),
    ("deepseek_v2", {"topk_method": "best"}, "topk_method to 'best'; it must be greedy or group_limited_greedy"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func to 'sigmoid'; it must be softmax"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob to True; it must be false"),
    ("deepseek_v2", {"attention_bias": True}, "attention_bias without q_lora_rank"),
    ("deepseek_v3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim to 63; it must be an even number"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias to True; it must be false in a mixture of experts"),
    ("deepseek_v3", {"partial_rotary_factor": 0.5}, "rotates 32 of the 64 numbers of qk_rope_head_dim"),
    (
        "glm4_moe_lite",
        {"mlp_layer_types": 1},
        "mlp_layer_types to 1; it must be a list with an entry for each of the 47",
    ),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types to .*each of the 47 layers"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank to 0; it must be a whole number of at least 1"),
    ("deepseek_v3", {"q_lora_rank": "wide"}, "q_lora_rank to 'wide'; it must be a whole number"),
    ("deepseek_v3", {"n_group": 7}, "n_group to 7; it must be a divisor of the 256 of n_routed_experts"),
    (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", *["dense"] * 46]},
        "mlp_layer_types to .*dense for the first layers",
    ),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv to 8.0.*are not clipped"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func to 'softmax'; it must be sigmoid"),
    ("minimax_m2", {"attn_type_list": [0, 1] * 31}, "attn_type_list to .*; it must be 1 .* for each layer"),
    ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size to 64.*no shared expert"),
    ("qwen3_next", {"linear_num_value_heads": 24}, "linear_num_value_heads to 24; it must be a multiple of the 16"),
    ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim to 1; it must be a whole number of at least"),
    ("qwen3_next", {"linear_conv_kernel_dim": 5000}, "linear_conv_kernel_dim to 5000; it must be at most 1024"),
    ("qwen3_next", {"linear_key_head_dim": 2**14, "linear_value_head_dim": 2**14}, "less, since a state has at most"),
    ("qwen3_next", {"linear_key_head_dim": None}, "no linear_key_head_dim"),
    ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act to 'gelu'; it must be silu"),
    ("qwen3_next", {"layer_types": ["linear_attention", "sliding_attention"] * 24}, "each linear_attention or full_at"),
    ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval to 0; it must be a whole number"),
    ("qwen3_next", {"num_key_value_heads": 3}, "16 attention heads and 3 key/value heads"),
    ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate to False; it must be true"),
    ("qwen3_5", {"layer_types": ["linear_attention"]}, "layer_types to .*; it must be 32 entries"),
    ("qwen3_5_moe", {"num_experts_per_tok": 257}, "num_experts_per_tok to 257; it must be at most the 256"),
    ("qwen3_5_moe_multimodal", {"text_config": None}, "no text_config"),
    ("qwen3_5_multimodal", {"text_config": "qwen3_5_text"}, "text_config to 'qwen3_5_text'; it must be an object"),
    ("lfm2", {"conv_L_cache": 1}, "conv_L_cache to 1; it must be a whole number of at least 2"),
    ("lfm2", {"conv_L_cache": 4096}, "conv_L_cache to 4096; it must be at most 1024"),
    ("lfm2", {"full_attn_idxs": "2"}, "full_attn_idxs to '2'; it must be a list of the numbers of layers"),
    ("lfm2", {"num_key_value_heads": 5}, "num_key_value_heads to 5; it must be a divisor of the 32"),
    ("lfm2", {"layer_types": ["sliding_attention"] * 16}, "16 entries, each full_attention or conv"),
    ("lfm2", {"block_multiple_of": 0}, "block_multiple_of to 0; it must be a whole number"),
    ("rwkv", {"rescale_every": "6"}, "rescale_every to '6'; it must be a whole number"),
    ("rwkv", {"rescale_every": 1, "num_hidden_layers": 200}, "rescale_every to 1; .* halve at most 100 times"),
    ("jamba", {"mamba_d_conv": 1}, "mamba_d_conv to 1; it must be a whole number of at least 2"),
    ("jamba", {"mamba_dt_rank": "many"}, "mamba_dt_rank to 'many'; it must be a whole number"),
    ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset to 8; it must be below the 8 of attn_layer_period"),
    ("jamba", {"expert_layer_period": 0}, "expert_layer_period to 0; it must be a whole number of at least 1"),
    ("jamba", {"hidden_act": "gelu"}, "hidden_act to 'gelu'; it must be silu"),
    ("jamba", {"num_key_value_heads": 5}, "num_key_value_heads to 5; it must be a divisor of the 32"),
    ("falcon_h1", {"attention_bias": True}, "attention_bias to True.*share has no biases"),
    ("falcon_h1", {"mamba_n_heads": 23}, "mamba_n_heads to 23; it must be a divisor of the 3072 columns"),
    ("falcon_h1", {"mamba_n_groups": 5}, "mamba_n_groups to 5; it must be a divisor of the 24 of mamba_n_heads"),
    ("falcon_h1", {"mamba_d_head": 64}, "mamba_d_head to 64; it must be the 128 columns"),
    ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers to .*; it must be a list of 5 numbers"),
    ("falcon_h1", {"mlp_multipliers": [1.0, "x"]}, "mlp_multipliers to 'x'; it must be a number above 0"),
    ("falcon_h1", {"time_step_limit": [1.0, 0.5]}, "time_step_limit to .*; it must be a number of at least 0 and a l"),
    ("falcon_h1", {"time_step_limit": ["0", None]}, "time_step_limit to .*; it must be a list of two numbers"),
    ("zamba2", {"layers_block_type": ["hybrid"]}, "layers_block_type to .*; it must be 54 entries, each mamba or"),
    ("zamba2", {"num_hidden_layers": 53}, "layers_block_type to .*; it must be 53 entries"),
    ("zamba2", {"num_attention_heads": 33}, "33 attention heads and 32 key/value heads in blocks of width 5120"),
    ("zamba2", {"n_mamba_heads": 81}, "n_mamba_heads to 81; it must be a divisor of the 5120 columns"),
    ("zamba2", {"mamba_ngroups": 3}, "mamba_ngroups to 3; it must be a divisor of the 80 of n_mamba_heads"),
    ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings to False; it must be true, without which"),
    ("zamba2", {"num_mem_blocks": 0}, "num_mem_blocks to 0; it must be a whole number of at least 1"),
    (
        "zamba2",
        {"use_shared_attention_adapter": True, "num_key_value_heads": 8},
        "num_key_value_heads to 8; it must be the 32 of num_attention_heads, since q and k have adapters",
    ),
    ("mamba", {"conv_kernel": 1}, "conv_kernel to 1; it must be a whole number of at least 2"),
    ("mamba", {"hidden_act": "gelu"}, "hidden_act to 'gelu'; it must be silu"),
    ("mamba", {"expand": 1.5, "intermediate_size": None}, "expand to 1.5; it must be a whole number"),
    ("falcon_mamba", {"time_step_rank": "much"}, "time_step_rank to 'much'; it must be a whole number"),
    ("falcon_mamba", {"mixer_rms_eps": 0}, "mixer_rms_eps to 0; it must be a number above 0"),
    ("mamba2", {"num_heads": 81}, "num_heads to 81; it must be a divisor of the 5120 columns"),
    ("mamba2", {"head_dim": 32}, "head_dim to 32; it must be the 64 columns"),
    ("mamba2", {"n_groups": 3}, "n_groups to 3; it must be a divisor of the 80 of num_heads"),
    (
        "mamba2",
        {"time_step_limit": [1, 0]},
        "time_step_limit to .*; it must be a number of at least 0 and a larger one",
    ),
    (
        "bamba",
        {"attn_layer_indices": [9, 32]},
        "attn_layer_indices to .*; it must be a list of numbers of layers, from 0",
    ),
    ("bamba", {"attn_layer_indices": "9"}, "attn_layer_indices to '9'; it must be a list of numbers"),
    ("bamba", {"mamba_d_conv": 5000}, "mamba_d_conv to 5000; it must be at most 1024"),
    ("granite_hybrid", {"layer_types": ["mamba"]}, "40 entries, each mamba or attention or"),
    (
        "granite_hybrid",
        {"position_embedding_type": "alibi"},
        "position_embedding_type to 'alibi'; it must be rope, nope",
    ),
    ("granite_hybrid", {"num_local_experts": -1}, "num_local_experts to -1; it must be a whole number of at least 0"),
    ("nemotron_h", {"hybrid_override_pattern": None}, "no layers_block_type"),
    ("nemotron_h", {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern to 'M-X'; it must be 1 to 1000 layers"),
    (
        "nemotron_h",
        {"layers_block_type": ["mamba", "conv"]},
        "layers_block_type to .*; it must be 1 to 1000 layers, each",
    ),
    ("nemotron_h", {"layers_block_type": []}, "layers_block_type to .*; it must be 1 to 1000 layers"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act to 'silu'; it must be relu2"),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act to 'gelu'; it must be silu"),
    ("nemotron_h_moe", {"mlp_bias": True}, "mlp_bias to True.*mixtures of experts have no biases"),
    ("lfm2_moe", {"layer_types": None}, "no layer_types"),
    ("lfm2_moe", {"rope_parameters": {"rope_type": ["yarn"]}}, r"rotary scaling \['yarn'\] .* is not supported"),
    ("lfm2_moe", {"num_dense_layers": -1}, "num_dense_layers to -1; it must be a whole number"),
    ("qwen3_moe", {"num_hidden_layers": 1000, "num_experts": 4096}, "4096000 experts in all layers; at most 262144"),
    ("qwen3_moe", {"moe_intermediate_size": 2**24, "hidden_size": 2**24}, "experts of 16777216 x 16777216 in a layer"),
]


@pytest.mark.parametrize(("kind", "changes", "sentence"), REFUSED, ids=[row[2] for row in REFUSED])
def test_what_we_cannot_run_is_refused_in_one_sentence(kind: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelLoadError, match=sentence) as caught:
        model_config({**PUBLISHED[kind], **changes})
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message


def test_a_generation_config_with_words_for_numbers_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="temperature to 'hot'; it must be a number"):
        model_config(GPT2, {"temperature": "hot"})


@pytest.mark.parametrize("spelling", COUNTS)
def test_the_number_of_experts_has_several_names(spelling: str) -> None:
    """transformers writes Qwen3-MoE's as `num_local_experts`."""
    config = {key: value for key, value in QWEN3_30B_A3B.items() if key != "num_experts"}
    assert model_config({**config, spelling: 128}) == model_config(QWEN3_30B_A3B)


def test_layers_that_draft_are_counted_by_the_config() -> None:
    assert model_config(GLM_4_5_AIR).spec.unused == ("model.layers.46.",)
    assert model_config(MINIMAX_M2).spec.unused == tuple(f"model.layers.{layer}." for layer in (62, 63, 64))
    assert model_config({**GLM_4_5_AIR, "num_nextn_predict_layers": 0}).spec.unused == ()


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_absent_entries_of_gated_delta_rules_take_transformers_defaults(kind: str) -> None:
    """All that say how wide something is, where attention is, and how it rotates."""
    absent = ("linear_", "head_dim", "layer_types", "full_attention_interval", "rope_", "partial_rotary_factor")
    absent += ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "shared_expert", "moe_")
    config = {name: value for name, value in PUBLISHED[kind].items() if not name.startswith(absent)}
    config |= {"rope_theta": 5e6} if kind == "qwen3_next" else {}
    ours, oracle = model_config(config).spec, transformers.AutoConfig.for_model(**config)
    kinds = {"gated_delta": "linear_attention", "attention": "full_attention"}
    assert [kinds[layer.mixer.kind] for layer in ours.layers] == oracle.layer_types
    delta, attention = ours.layers[0].mixer, ours.layers[3].attention
    assert isinstance(delta, GatedDeltaSpec)
    assert (delta.key_heads, delta.value_heads) == (oracle.linear_num_key_heads, oracle.linear_num_value_heads)
    assert (delta.key_dim, delta.value_dim) == (oracle.linear_key_head_dim, oracle.linear_value_head_dim)
    assert (delta.length, delta.norm.eps) == (oracle.linear_conv_kernel_dim, oracle.rms_norm_eps)
    assert (attention.num_kv_heads, attention.head_dim) == (oracle.num_key_value_heads, oracle.head_dim)
    assert attention.rope is not None
    assert attention.rope.theta == oracle.rope_parameters["rope_theta"]
    assert attention.rope.rotary_dim == oracle.head_dim * oracle.rope_parameters["partial_rotary_factor"]
    assert ours.max_position_embeddings == oracle.max_position_embeddings
    if isinstance(mixture := ours.layers[0].feed_forward, ExpertsSpec):
        assert mixture.intermediate_size == oracle.moe_intermediate_size
        assert mixture.shared is not None
        assert mixture.shared.intermediate_size == oracle.shared_expert_intermediate_size


def test_what_files_hold_behind_the_last_layer_of_latents_is_passed_over() -> None:
    """Though the config counts no layer that drafts."""
    for config in (LATENT["deepseek_v3"], LATENT["glm4_moe_lite"]):
        for count in (0, 1):
            spec = model_config({**config, "num_nextn_predict_layers": count}).spec
            assert spec.unused == (f"model.layers.{config['num_hidden_layers']}.",)


def test_null_is_false_where_transformers_says_so() -> None:
    config = {**LATENT["deepseek_v3"], "norm_topk_prob": None, "rope_interleave": None}
    layer = model_config(config).spec.layers[-1]
    assert isinstance(layer.feed_forward, ExpertsSpec)
    assert not layer.feed_forward.routing.renormalize
    assert isinstance(layer.mixer, LatentAttentionSpec)
    assert not layer.mixer.interleaved


def test_minimax_rotates_as_many_dimensions_as_it_says() -> None:
    assert rope_of(model_config(MINIMAX_M2)).rotary_dim == 64
    assert rope_of(model_config({**MINIMAX_M2, "rotary_dim": None})).rotary_dim == 128


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_registered_architecture_loads_under_its_own_name(name: str) -> None:
    known = (
        *PUBLISHED.values(),
        *OUR_OWN,
        *OF_TOKENS,
        *POOLED.values(),
        *encoder_decoder_configs.EVERY,
        *vision_configs.EVERY,
        *whisper_configs.EVERY.values(),
        *whisper_configs.HEARING,
    )
    config = next(config for config in known if config["architectures"] == [name])
    assert ARCHITECTURES[name].spec(config).architecture == name


def test_the_page_of_models_lists_what_is_registered() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = [
        f"| {families} | `{name}` | {what[0].upper()}{what[1:]} |" for name, (families, what) in descriptions().items()
    ]
    assert "\n".join(rows) in page
    endings = ("ForCausalLM", "Model", "HF_ColBERT", "Generation", "SequenceClassification")
    registered = page.partition("the twenty in most use\n")[0]
    assert sum(registered.count(f"{ending}` |") for ending in endings) == len(rows)


def test_the_twenty_models_of_pictures_and_sounds_load_or_are_refused_by_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    table = page.partition("the twenty in most use\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[2:4] for line in table.splitlines() if line.startswith("| ")][1:]
    loads, refused = ([re.findall("`(\\w+)`", row[column]) for row in rows] for column in (0, 1))
    assert len(rows) == 20
    assert all(loads)
    for name in chain(*loads):
        assert SAME.get(name, name) in ARCHITECTURES, name
    for name in chain(*refused):
        with pytest.raises(ModelLoadError, match=f"{name} does not run here: "):
            model_config({"architectures": [name]})


@pytest.mark.few(12)
@pytest.mark.parametrize("name", POOLED)
def test_models_that_pool_hold_exactly_the_tensors_transformers_would(name: str) -> None:
    config = POOLED[name]
    ours = model_config(config)
    with torch.device("meta"):
        theirs = getattr(transformers, config["architectures"][0])(transformers.AutoConfig.for_model(**config))
    views = checkpoint_views(empty_decoder(ours.spec), ours.weights)
    tensors = tiny_models.as_stored(theirs, theirs.state_dict())
    stored = {name: list(tensor.shape) for name, tensor in tensors.items()}
    base = ours.weights["embed.weight"][0].name.partition(".")[0] + "."
    if not any(name.startswith(base) for name in stored):  # saved without what would come before it
        stored = {base + name: shape for name, shape in stored.items()}
    spare = tuple(f"{prefix}{each}" for prefix in ("", base) for each in ours.spec.unused)
    wanted = {name: shape for name, shape in stored.items() if name in views or not name.startswith(spare)}
    assert {name: view.shape for name, view in views.items()} == wanted
    pooling = ours.spec.pooling
    assert pooling is not None
    if pooling.task == "classify":
        assert pooling.labels == tuple(config["id2label"].values())


def test_a_first_checkpoint_of_nomic_bert_is_the_same_model() -> None:
    assert model_config(pooled_configs.NOMIC_EMBED) == model_config(pooled_configs.NOMIC_BERT)
    for entry, told in (
        ({"activation_function": "gelu"}, "activation_function to 'gelu'; it must be 'swiglu'"),
        ({"moe_every_n_layers": 2}, "moe_every_n_layers to 2"),
        ({"rotary_scaling_factor": 2.0}, "rotary_scaling_factor to 2.0"),
    ):
        with pytest.raises(ModelLoadError, match=told):
            model_config({**pooled_configs.NOMIC_EMBED, **entry})


def test_a_cross_encoders_config_says_what_makes_probabilities() -> None:
    def activation(**entries: Any) -> str:
        config = {**POOLED["bert_classifier"], "sentence_transformers": None, **entries}
        pooling = model_config(config).spec.pooling
        assert pooling is not None
        return pooling.activation

    two = {"id2label": {"0": "a", "1": "b"}}
    assert (activation(), activation(**two)) == ("sigmoid", "softmax")
    assert activation(sbert_ce_default_activation_function="torch.nn.modules.linear.Identity") == "none"
    assert activation(**two, problem_type="multi_label_classification") == "sigmoid"
    for entries, told in (
        ({"problem_type": "ranking"}, "problem_type to 'ranking'; it must be one of regression"),
        ({"id2label": {"1": "a"}}, "keys are 0 to 0"),
        ({"sentence_transformers": {"activation_fn": "os.system"}}, "probabilities by 'os.system'"),
        ({"position_embedding_type": "relative_key"}, "only absolute positions"),
    ):
        with pytest.raises(ModelLoadError, match=told):
            activation(**entries)

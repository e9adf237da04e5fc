"""What the hub's config.json files of vision-language models say, shortened to what decides shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Values = dict[str, Any]
MEASURED = Path(__file__).parents[2] / "benchmarks" / "models"


def measured(name: str) -> Values:
    """Return the config of a model whose shape benchmarks have."""
    found: Values = json.loads((MEASURED / name / "config.json").read_text(encoding="utf-8"))
    return found


LLAVA_1_5_7B = measured("llava-1.5-7b")

LLAVA_1_6_MISTRAL_7B: Values = {
    **LLAVA_1_5_7B,
    "architectures": ["LlavaNextForConditionalGeneration"],
    "model_type": "llava_next",
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "text_config": {
        **{"intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral"},
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
        "vocab_size": 32064,
    },
}
LLAVA_ONEVISION_7B: Values = {
    "architectures": ["LlavaOnevisionForConditionalGeneration"],
    "model_type": "llava_onevision",
    **{"image_token_index": 151646, "video_token_index": 151647, "projector_hidden_act": "gelu"},
    **{"vision_aspect_ratio": "anyres_max_9", "tie_word_embeddings": False, "torch_dtype": "float16"},
    "text_config": {
        **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
        **{"num_key_value_heads": 4, "vocab_size": 152000, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
        **{"max_position_embeddings": 32768, "model_type": "qwen2"},
    },
    "vision_config": {
        **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16},
        **{"image_size": 384, "patch_size": 14, "model_type": "siglip_vision_model", "vision_use_head": False},
    },
    **{"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
}

_QWEN: Values = {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False}
_QWEN_TOWER: Values = {
    **{"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "in_chans": 3,
}
_QWEN2_7B: Values = {
    **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    **{"num_key_value_heads": 4, "vocab_size": 152064, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
QWEN2_VL_7B: Values = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "max_position_embeddings": 32768,
    **_QWEN,
    **_QWEN2_7B,
    "vision_config": {**_QWEN_TOWER, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4},
}
QWEN2_5_VL_7B = measured("qwen2.5-vl-7b")
GEMMA_3_4B: Values = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        **{"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27},
        **{"image_size": 896, "patch_size": 14, "model_type": "siglip_vision_model", "vision_use_head": False},
    },
}

PALIGEMMA_3B: Values = {
    "architectures": ["PaliGemmaForConditionalGeneration"],
    "model_type": "paligemma",
    **{"image_token_index": 257152, "projection_dim": 2048, "hidden_size": 2048, "vocab_size": 257216},
    "text_config": {
        **{"hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8, "num_hidden_layers": 18},
        **{"num_key_value_heads": 1, "vocab_size": 257216, "model_type": "gemma"},
    },
    "vision_config": {
        **{"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27},
        **{"patch_size": 14, "model_type": "siglip_vision_model", "vision_use_head": False},
    },
}

_QWEN3_TEXT: Values = {
    **{"num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936, "rope_theta": 5e6, "rms_norm_eps": 1e-6},
    **{"hidden_act": "silu", "max_position_embeddings": 262144},
    "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
}
_QWEN3_TOWER: Values = {
    **{"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16},
    **{"hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
    "in_channels": 3,
}
QWEN3_VL_8B = measured("qwen3-vl-8b")
QWEN3_VL_30B_A3B: Values = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "tie_word_embeddings": False,
    "text_config": {
        **_QWEN3_TEXT,
        **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_key_value_heads": 4},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "dtype": "bfloat16", "model_type": "qwen3_vl_moe_text"},
    },
    "vision_config": {**_QWEN3_TOWER, "out_hidden_size": 2048},
}

INTERNVL3_8B: Values = {
    "architectures": ["InternVLForConditionalGeneration"],
    "model_type": "internvl",
    **{"image_seq_length": 256, "image_token_id": 151667, "downsample_ratio": 0.5, "projector_hidden_act": "gelu"},
    **{"vision_feature_layer": -1, "vision_feature_select_strategy": "default", "tie_word_embeddings": False},
    "text_config": {
        **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
        **{"num_key_value_heads": 4, "vocab_size": 151674, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
        **{"max_position_embeddings": 32768, "hidden_act": "silu", "model_type": "qwen2", "dtype": "bfloat16"},
    },
    "vision_config": {
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"image_size": [448, 448], "patch_size": [14, 14], "attention_bias": True, "hidden_act": "gelu"},
    },
}

LLAMA_3_2_11B_VISION: Values = {
    "architectures": ["MllamaForConditionalGeneration"],
    "model_type": "mllama",
    "torch_dtype": "bfloat16",
    "image_token_index": 128256,
    "text_config": {
        **{"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38], "hidden_act": "silu", "hidden_size": 4096},
        **{"intermediate_size": 14336, "max_position_embeddings": 131072, "num_attention_heads": 32},
        **{"num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
        "rope_scaling": {
            **{"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
            **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
        },
        **{"tie_word_embeddings": False, "vocab_size": 128256},
    },
    "vision_config": {
        **{"attention_heads": 16, "hidden_act": "gelu", "hidden_size": 1280, "image_size": 560},
        **{"intermediate_layers_indices": [3, 7, 15, 23, 30], "intermediate_size": 5120, "max_num_tiles": 4},
        **{"norm_eps": 1e-5, "num_channels": 3, "num_global_layers": 8, "num_hidden_layers": 32, "patch_size": 14},
        "vision_output_dim": 7680,
    },
}

IDEFICS3_8B: Values = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "model_type": "idefics3",
    **{"image_token_id": 128257, "scale_factor": 2, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "text_config": {
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "vocab_size": 128259, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 10240, "model_type": "llama"},
    },
    "vision_config": {
        **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
        **{"image_size": 364, "patch_size": 14, "model_type": "idefics3"},
    },
}

PHI_4_MULTIMODAL: Values = {  # the tower's sizes are the defaults of transformers' class
    "architectures": ["Phi4MultimodalForCausalLM"],
    "model_type": "phi4_multimodal",
    **{"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 24},
    **{"num_key_value_heads": 8, "vocab_size": 200064, "rms_norm_eps": 1e-5, "sliding_window": 262144},
    **{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "tie_word_embeddings": True},
    **{"rope_theta": 10000.0, "partial_rotary_factor": 0.75, "torch_dtype": "bfloat16"},
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48},
    "vision_config": {"model_type": "phi4_multimodal_vision"},
    "audio_config": {"model_type": "phi4_multimodal_audio"},
}

PADDLEOCR_VL: Values = {
    "architectures": ["PaddleOCRVLForConditionalGeneration"],
    "model_type": "paddleocr_vl",
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16},
    **{"num_key_value_heads": 2, "head_dim": 128, "vocab_size": 103424, "rope_theta": 5e5, "rms_norm_eps": 1e-5},
    **{"hidden_act": "silu", "use_bias": False, "tie_word_embeddings": False, "max_position_embeddings": 131072},
    **{"image_token_id": 100295, "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default"}},
    "vision_config": {
        **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16},
        **{"image_size": 384, "patch_size": 14, "spatial_merge_size": 2, "hidden_act": "gelu_pytorch_tanh"},
    },
}

BLIP_2_OPT_2_7B: Values = {
    "architectures": ["Blip2ForConditionalGeneration"],
    "model_type": "blip-2",
    **{
        "image_token_index": 50265,
        "num_query_tokens": 32,
        "torch_dtype": "float32",
        "use_decoder_only_language_model": True,
    },
    "text_config": {
        **{"activation_function": "relu", "ffn_dim": 10240, "hidden_size": 2560, "max_position_embeddings": 2048},
        **{"model_type": "opt", "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 50304},
        "word_embed_proj_dim": 2560,
    },
    "vision_config": {"model_type": "blip_2_vision_model"},
    "qformer_config": {"model_type": "blip_2_qformer", "vocab_size": 30523},
}

INSTRUCTBLIP_VICUNA_7B: Values = {
    "architectures": ["InstructBlipForConditionalGeneration"],
    "model_type": "instructblip",
    **{"image_token_index": 32000, "num_query_tokens": 32, "torch_dtype": "float32"},
    "text_config": {
        **{"model_type": "llama", "vocab_size": 32001, "hidden_size": 4096, "intermediate_size": 11008},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048},
        **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    },
    "vision_config": {"model_type": "instructblip_vision_model"},
    "qformer_config": {"model_type": "instructblip_qformer", "vocab_size": 30523},
}

_OCR_TEXT: Values = {
    **{"vocab_size": 129280, "hidden_size": 1280, "intermediate_size": 6848, "num_hidden_layers": 12},
    **{"num_attention_heads": 10, "num_key_value_heads": 10, "max_position_embeddings": 8192},
    **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 896},
    **{"n_group": 1, "topk_group": 1, "topk_method": "greedy", "first_k_dense_replace": 1},
}
DEEPSEEK_OCR: Values = {
    "architectures": ["DeepseekOCRForCausalLM"],
    "model_type": "deepseek_vl_v2",
    **_OCR_TEXT,
    "language_config": {**_OCR_TEXT, "use_mla": False, "kv_lora_rank": None, "q_lora_rank": None},
    "projector_config": {"input_dim": 2048, "n_embed": 1280, "projector_type": "linear"},
    "vision_config": {
        "image_size": 1024,
        "model_type": "vision",
        "width": {
            "clip-l-14-224": {"heads": 16, "image_size": 224, "layers": 24, "patch_size": 14, "width": 1024},
            "sam_vit_b": {
                **{"downsample_channels": [512, 1024], "global_attn_indexes": [2, 5, 8, 11]},
                **{"heads": 12, "layers": 12, "width": 768},
            },
        },
    },
}
DEEPSEEK_OCR_2: Values = {
    "architectures": ["DeepseekOcr2ForConditionalGeneration"],
    "model_type": "deepseek_ocr2",
    "text_config": {
        **_OCR_TEXT,
        "model_type": "deepseek_ocr2_text",
        "mlp_layer_types": ["dense", *["sparse"] * 11],
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "sam_config": {"downsample_channels": [512, 896]},
        "encoder_config": {
            **{"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
            **{"num_key_value_heads": 2, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        },
    },
    "image_token_id": 128815,
}

_TOWER_3_5: Values = {**_QWEN3_TOWER, "deepstack_visual_indexes": []}
QWEN3_5_TEXT: Values = {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}
QWEN3_5_27B: Values = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": QWEN3_5_TEXT,
    "vision_config": {**_TOWER_3_5, "out_hidden_size": 5120},
    "tie_word_embeddings": False,
}
QWEN3_5_35B_A3B_TEXT: Values = {
    **{name: value for name, value in QWEN3_5_TEXT.items() if name != "intermediate_size"},
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "hidden_size": 2048,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "linear_num_value_heads": 32,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}
QWEN3_5_35B_A3B: Values = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {name: value for name, value in QWEN3_5_35B_A3B_TEXT.items() if name != "architectures"},
    "vision_config": {**_TOWER_3_5, "out_hidden_size": 2048},
}

MINICPM_V_4_6: Values = {  # the tower's sizes are the defaults of transformers' class
    "architectures": ["MiniCPMV4_6ForConditionalGeneration"],
    "model_type": "minicpmv4_6",
    **{"image_token_id": 248056, "insert_layer_id": 6, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
    "text_config": {
        **{"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8},
        **{"num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "rms_norm_eps": 1e-6},
        **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16},
        **{"linear_num_value_heads": 16, "max_position_embeddings": 262144, "model_type": "qwen3_5_text"},
        "tie_word_embeddings": True,
    },
    "vision_config": {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"image_size": 224, "patch_size": 16},
    },
}
_GLM_ROPE: Values = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
_GLM_TOWER: Values = {
    **{"depth": 24, "hidden_size": 1536, "num_heads": 12, "patch_size": 14, "image_size": 336, "in_channels": 3},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 4096, "hidden_act": "silu"},
    "rms_norm_eps": 1e-5,
}
GLM_4_1V_9B: Values = {
    "architectures": ["Glm4vForConditionalGeneration"],
    "model_type": "glm4v",
    "tie_word_embeddings": False,
    "text_config": {
        **{"hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32},
        **{"num_key_value_heads": 2, "vocab_size": 151552, "rms_norm_eps": 1e-5, "attention_bias": True},
        **{"max_position_embeddings": 65536, "model_type": "glm4v_text", "dtype": "bfloat16"},
        "rope_parameters": {**_GLM_ROPE, "mrope_section": [8, 12, 12]},
    },
    "vision_config": {**_GLM_TOWER, "intermediate_size": 13696},
}
GLM_4_5V: Values = {
    "architectures": ["Glm4vMoeForConditionalGeneration"],
    "model_type": "glm4v_moe",
    "tie_word_embeddings": False,
    "text_config": {
        **{"hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96},
        **{"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151552, "rms_norm_eps": 1e-5},
        **{"attention_bias": True, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "norm_topk_prob": True},
        **{"max_position_embeddings": 65536, "model_type": "glm4v_moe_text", "dtype": "bfloat16"},
        "rope_parameters": {**_GLM_ROPE, "mrope_section": [8, 12, 12]},
    },
    "vision_config": {**_GLM_TOWER, "intermediate_size": 10944},
}

CHAMELEON_7B: Values = {
    "architectures": ["ChameleonForConditionalGeneration"],
    "model_type": "chameleon",
    **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 32, "vocab_size": 65536, "rope_theta": 10000.0, "rms_norm_eps": 1e-5},
    **{"max_position_embeddings": 4096, "swin_norm": False, "tie_word_embeddings": False, "hidden_act": "silu"},
    "vocabulary_map": {
        "<image>": 8711,
        **{f"IMGIMG{str(n).translate(str.maketrans('0123456789', 'ABCDEFGHIJ'))}Z": 4 + n for n in range(8192)},
    },
    "vq_config": {
        **{"base_channels": 128, "channel_multiplier": [1, 1, 2, 2, 4], "embed_dim": 256, "num_embeddings": 8192},
        **{"latent_channels": 256, "num_res_blocks": 2, "resolution": 512, "double_latent": False},
    },
}

KIMI_VL_A3B: Values = {
    "architectures": ["KimiVLForConditionalGeneration"],
    "model_type": "kimi_vl",
    **{"torch_dtype": "bfloat16", "media_placeholder_token_id": 163605, "tie_word_embeddings": False},
    "text_config": {
        **{"model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 11264, "num_hidden_layers": 27},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 163840, "q_lora_rank": None},
        **{"kv_lora_rank": 512, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2},
        **{"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        **{"routed_scaling_factor": 2.446, "rope_theta": 800000.0, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 131072, "num_nextn_predict_layers": 0},
    },
    "vision_config": {
        **{"model_type": "moonvit", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27},
        **{"num_attention_heads": 16, "patch_size": 14, "merge_kernel_size": [2, 2]},
        **{"init_pos_emb_height": 64, "init_pos_emb_width": 64},
    },
}

GEMMA_4_E2B: Values = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    **{"torch_dtype": "bfloat16", "image_token_id": 258880, "tie_word_embeddings": True},
    "text_config": {
        **{"model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35},
        **{"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512},
        **{"vocab_size": 262144, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256},
        **{"num_kv_shared_layers": 20, "use_double_wide_mlp": True, "sliding_window": 512, "pad_token_id": 0},
        **{"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7, "final_logit_softcapping": 30.0},
        **{"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "max_position_embeddings": 131072},
    },
    "vision_config": {
        **{"model_type": "gemma4_vision", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16},
        **{"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64, "patch_size": 16},
        **{"pooling_kernel_size": 3, "position_embedding_size": 10240, "use_clipped_linears": True},
        **{"standardize": False, "rms_norm_eps": 1e-6},
    },
}

MISTRAL_SMALL_3_1: Values = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    **{"torch_dtype": "bfloat16", "tie_word_embeddings": False},
    "text_config": {
        **{"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072},
        **{"sliding_window": None, "rope_theta": 1e9, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
    },
    **{"spatial_merge_size": 2, "multimodal_projector_bias": False, "vision_feature_layer": -1},
    "vision_config": {
        **{"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
        **{"num_attention_heads": 16, "head_dim": 64, "image_size": 1540, "patch_size": 14, "rope_theta": 10000.0},
    },
}

EVERY = (
    MISTRAL_SMALL_3_1,
    GEMMA_4_E2B,
    KIMI_VL_A3B,
    CHAMELEON_7B,
    GLM_4_1V_9B,
    GLM_4_5V,
    QWEN3_5_27B,
    QWEN3_5_35B_A3B,
    MINICPM_V_4_6,
    BLIP_2_OPT_2_7B,
    INSTRUCTBLIP_VICUNA_7B,
    DEEPSEEK_OCR,
    DEEPSEEK_OCR_2,
    PADDLEOCR_VL,
    PHI_4_MULTIMODAL,
    IDEFICS3_8B,
    LLAVA_1_5_7B,
    LLAVA_1_6_MISTRAL_7B,
    LLAVA_ONEVISION_7B,
    QWEN2_VL_7B,
    QWEN2_5_VL_7B,
    QWEN3_VL_8B,
    QWEN3_VL_30B_A3B,
    INTERNVL3_8B,
    GEMMA_3_4B,
    PALIGEMMA_3B,
    LLAMA_3_2_11B_VISION,
)

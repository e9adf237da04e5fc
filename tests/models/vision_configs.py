"""What the hub's config.json files of vision-language models say, shortened to what decides shapes."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

LLAVA_1_5_7B: Values = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "torch_dtype": "float16",
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "tie_word_embeddings": False,
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "vocab_size": 32064,
    },
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}

EVERY = (LLAVA_1_5_7B,)

"""Families of Gemma, tiny."""

from __future__ import annotations

from typing import Any

from ridgeline.kernels.pictures.views import Patching
from tests.vision.families.family import IMAGE, TEXT, VOCAB, Family

_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 4,
}
_GEMMA: dict[str, Any] = {**TEXT, "num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 16}
FAMILIES = {
    "gemma3": Family(
        "Gemma3",
        {
            # Of a picture's nine tokens a window shows seven before, and all behind
            "text_config": {**_GEMMA, "sliding_window": 8, "sliding_window_pattern": 2},
            "vision_config": _SIGLIP,
            "image_token_id": IMAGE,
            "mm_tokens_per_image": 9,
        },
        Patching("bilinear", 1 / 255, (0.5,) * 3, (0.5,) * 3, 4, 4, merge=2),
        ((24, 24),),
        padded=True,
        chunk=12,
    ),
    "gemma4": Family(
        "Gemma4",
        {
            "text_config": {
                **{**TEXT, "hidden_size_per_layer_input": 0, "num_hidden_layers": 4, "head_dim": 16},
                **{"global_head_dim": 32, "sliding_window": 8, "use_bidirectional_attention": "vision"},
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "vision_config": {
                **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2},
                **{"num_key_value_heads": 1, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2},
                **{"position_embedding_size": 64, "standardize": True},
            },
            "audio_config": None,
            "image_token_id": IMAGE,
        },
        Patching("bicubic", 1 / 255, (0.5,) * 3, (0.5,) * 3, 4, 4, merge=2, channels_last=True),
        ((16, 24), (24, 40), (8, 8)),
        padded=True,
        chunk=18,
    ),
    "gemma4_e2b": Family(
        "Gemma4",
        {
            "text_config": {
                **{**TEXT, "hidden_size_per_layer_input": 16, "num_hidden_layers": 4, "head_dim": 16},
                **{"vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
                **{"global_head_dim": 32, "sliding_window": 8, "pad_token_id": 5},
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            "vision_config": {
                **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2},
                **{"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2},
                **{"position_embedding_size": 64, "use_clipped_linears": True},
            },
            "audio_config": None,
            "image_token_id": IMAGE,
        },
        Patching("bicubic", 1 / 255, (0.5,) * 3, (0.5,) * 3, 4, 4, merge=2, channels_last=True),
        ((16, 24), (24, 40), (8, 8)),
        padded=True,
    ),
    "paligemma": Family(
        "PaliGemma",
        {
            "text_config": {**TEXT, "model_type": "gemma", "head_dim": 16},
            "vision_config": {**_SIGLIP, "image_size": 12},
            "image_token_index": IMAGE,
            "projection_dim": 64,
        },
        Patching("bicubic", 1 / 255, (0.5,) * 3, (0.5,) * 3, 4, 4),
        ((12, 12),),
        chunk=100,
    ),
    "paligemma_2": Family(
        "PaliGemma",
        {
            "text_config": {**_GEMMA, "model_type": "gemma2", "sliding_window": 92},
            "vision_config": {**_SIGLIP, "image_size": 12},
            "image_token_index": IMAGE,
            "projection_dim": 64,
        },
        Patching("bicubic", 1 / 255, (0.5,) * 3, (0.5,) * 3, 4, 4),
        ((12, 12),),
        chunk=100,
    ),
}

"""LLaVA's kinds, InternVL, Idefics 3 and Mistral 3, tiny."""

from __future__ import annotations

from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from ridgeline.kernels.pictures.views import Patching
from tests.vision.families.family import IMAGE, MEAN, PIXTRAL, STD, TEXT, TILES, VIT, Family

FAMILIES = {
    "llava": Family(
        "Llava",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 7,
            },
            "image_token_index": IMAGE,
        },
        Patching("bicubic", 1 / 255, MEAN, STD, 7, 7),
        ((28, 28),),
    ),
    "internvl": Family(
        "InternVL",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "image_size": [24, 24],
                "patch_size": [4, 4],
                "attention_bias": True,
            },
            "image_token_id": IMAGE,
            "image_seq_length": 9,
            "tie_word_embeddings": False,
        },
        Patching("bicubic", 1 / 255, MEAN, STD, 4, 4, merge=2),
        ((24, 24),),
        padded=True,
    ),
    "idefics3": Family(
        "Idefics3",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**VIT, "image_size": 32, "patch_size": 4},
            "image_token_id": IMAGE,
            "scale_factor": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
        Patching("lanczos", 1 / 255, MEAN, STD, 4, 4, merge=2),
        ((32, 32),),
        padded=True,
    ),
    "llava_next": Family(
        "LlavaNext",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None, "head_dim": 16},
            "vision_config": {**VIT, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 7},
            "image_token_index": IMAGE,
            "image_grid_pinpoints": [[28, 56], [56, 28]],
        },
        Patching("bicubic", 1 / 255, MEAN, STD, 7, 7),
        ((20, 30), (41, 16), (50, 100)),
        processor=(
            LlavaNextImageProcessorPil,
            {
                "size": {"shortest_edge": 28},
                "crop_size": {"height": 28, "width": 28},
                "image_grid_pinpoints": [[28, 56], [56, 28]],
            },
        ),
    ),
    "llava_onevision": Family(
        "LlavaOnevision",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**VIT, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8},
            "image_token_index": IMAGE,
            "video_token_index": 301,
            "image_grid_pinpoints": TILES["image_grid_pinpoints"],
            "vision_aspect_ratio": "anyres_max_1",
        },
        Patching("bicubic", 1 / 255, MEAN, STD, 8, 8),
        ((32, 32),),
    ),
    "llava_pixtral": Family(
        "Llava",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None, "head_dim": 16},
            "vision_config": {**PIXTRAL, "patch_size": 8},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        Patching("bicubic", 1 / 255, MEAN, STD, 8, 8),
        ((24, 16), (8, 40), (32, 24)),
        padded=True,
    ),
    "mistral3": Family(
        "Mistral3",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None, "head_dim": 16},
            "vision_config": {**PIXTRAL, "patch_size": 4},
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
        },
        Patching("bicubic", 1 / 255, MEAN, STD, 4, 4, merge=2),
        ((24, 16), (8, 40), (32, 24)),
        padded=True,
    ),
}

"""MiniCPM-V 4.6, and families whose positions have three axes, tiny."""

from __future__ import annotations

from typing import Any

from ridgeline.kernels.pictures.views import Patching
from tests.vision.families.family import IMAGE, MEAN, STD, TEXT, VIT, Family

FAMILIES: dict[str, Family] = {}
FAMILIES["minicpmv4_6"] = Family(
    "MiniCPMV4_6",
    {
        "text_config": {
            **TEXT,
            "model_type": "qwen3_5_text",
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        "vision_config": {**VIT, "image_size": 40, "patch_size": 4},
        "insert_layer_id": 1,
        "image_token_id": IMAGE,
    },
    Patching("bicubic", 1 / 255, MEAN, STD, 4, 4, merge=4),
    ((32, 48),),  # transformers' class takes several pictures of one size alone
    padded=True,
)

_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_IDS = {"image_token_id": IMAGE, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
_SQUARES = Patching("bicubic", 1 / 255, MEAN, STD, 4, 4, frames=2, merge=2)
_SIZES = ((16, 24), (24, 40), (8, 8))
_QWEN2: dict[str, Any] = {**TEXT, "rope_parameters": _ROPE}
_QWEN3: dict[str, Any] = {**TEXT, "head_dim": 16, "rope_parameters": {**_ROPE, "mrope_interleaved": True}}
_TOWER_3 = {
    "depth": 4,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "deepstack_visual_indexes": [0, 2],
    "num_position_embeddings": 36,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_DELTA: dict[str, Any] = {  # two gated delta rules around attention, a quarter of whose heads rotates
    **TEXT,
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {**_ROPE, "mrope_interleaved": True, "partial_rotary_factor": 0.25},
}
_GLM: dict[str, Any] = {
    **TEXT,
    "rope_parameters": {**_ROPE, "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5},
}
_TOWER_GLM = {
    "depth": 3,
    "hidden_size": 32,
    "out_hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 48,
    "image_size": 20,
    "patch_size": 4,
}
_TOWER_3_5 = {name: value for name, value in _TOWER_3.items() if name != "deepstack_visual_indexes"}
FAMILIES |= {
    "qwen2_vl": Family(
        "Qwen2VL",
        {
            **_IDS,
            "text_config": _QWEN2,
            "vision_config": {
                "depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
            },
        },
        _SQUARES,
        _SIZES,
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VL",
        {
            **_IDS,
            "text_config": _QWEN2,
            "vision_config": {
                "depth": 3,
                "hidden_size": 32,
                "out_hidden_size": 64,
                "num_heads": 2,
                "intermediate_size": 48,
                "patch_size": 4,
                "window_size": 16,
                "fullatt_block_indexes": [1],
                "tokens_per_second": 2,
            },
        },
        _SQUARES,
        _SIZES,
    ),
    "paddleocr_vl": Family(
        "PaddleOCRVL",
        {
            **_IDS,
            "text_config": {**_QWEN2, "head_dim": 16, "tie_word_embeddings": False},
            "vision_config": {**VIT, "image_size": 24, "patch_size": 4},
            "tie_word_embeddings": False,
        },
        _SQUARES._replace(frames=1),
        _SIZES,
    ),
    "qwen3_vl": Family("Qwen3VL", {**_IDS, "text_config": _QWEN3, "vision_config": _TOWER_3}, _SQUARES, _SIZES),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoe",
        {**_IDS, "text_config": {**_QWEN3, **_EXPERTS}, "vision_config": _TOWER_3},
        _SQUARES,
        _SIZES,
    ),
    "glm4v": Family("Glm4v", {**_IDS, "text_config": _GLM, "vision_config": _TOWER_GLM}, _SQUARES, _SIZES),
    "glm4v_moe": Family(
        "Glm4vMoe",
        {
            **_IDS,
            "text_config": {
                **_GLM,
                **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            },
            "vision_config": _TOWER_GLM,
        },
        _SQUARES,
        _SIZES,
    ),
    "qwen3_5": Family("Qwen3_5", {**_IDS, "text_config": _DELTA, "vision_config": _TOWER_3_5}, _SQUARES, _SIZES),
    "qwen3_5_moe": Family(
        "Qwen3_5Moe",
        {
            **_IDS,
            "text_config": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 40},
            "vision_config": _TOWER_3_5,
        },
        _SQUARES,
        _SIZES,
    ),
}  # fmt: skip

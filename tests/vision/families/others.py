"""Families that have a way of their own from pictures to tokens, tiny."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from ridgeline.kernels.pictures.views import Patching
from tests.vision.families.family import IMAGE, MEAN, STD, TEXT, VIT, Family
from tests.vision.phi4 import Phi4Pictures

FAMILIES: dict[str, Family] = {}
FAMILIES["blip-2"] = Family(
    "Blip2",
    {
        "text_config": {
            **{key: TEXT[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")},
            **{"model_type": "opt", "ffn_dim": 112, "max_position_embeddings": 256, "word_embed_proj_dim": 64},
        },
        "vision_config": {
            **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": 28, "patch_size": 7},
        },
        "qformer_config": {
            **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2},
            "encoder_hidden_size": 32,
        },
        "num_query_tokens": 6,
        "image_token_index": IMAGE,
    },
    Patching("bicubic", 1 / 255, MEAN, STD, 7, 7),
    ((28, 28), (20, 35)),
    processor=(BlipImageProcessorPil, {"size": {"height": 28, "width": 28}, "do_convert_rgb": False}),
)

FAMILIES["instructblip"] = replace(
    FAMILIES["blip-2"],
    name="InstructBlip",
    config={
        **FAMILIES["blip-2"].config,
        "text_config": {**TEXT, "model_type": "llama"},
        "qformer_config": {
            **FAMILIES["blip-2"].config["qformer_config"],
            **{"vocab_size": 50, "max_position_embeddings": 24},
        },
    },
)

FAMILIES["phi4_multimodal"] = Family(
    "Phi4Multimodal",
    {
        **{**TEXT, "original_max_position_embeddings": 256, "tie_word_embeddings": False},
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
            **{"short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5], "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0]},
        },
        "vision_config": {**VIT, "image_size": 16, "crop_size": 16, "patch_size": 4, "image_token_id": IMAGE},
        "audio_config": {
            **{"hidden_size": 16, "intermediate_size": 24, "num_blocks": 1, "num_attention_heads": 2},
            **{"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16},
            "audio_token_id": 301,
        },
    },
    Patching("bilinear", 1 / 255, (0.5,) * 3, (0.5,) * 3, 4, 4, merge=2),
    ((17, 30), (41, 16), (30, 70)),  # of their tiles some have an odd number of patches to a side
    padded=True,
    processor=(Phi4Pictures, {"size": {"height": 16, "width": 16}, "patch_size": 4, "dynamic_hd": 4}),
)

_MOONLIGHT: dict[str, Any] = {
    **{**TEXT, "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_nextn_predict_layers": 0},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "tie_word_embeddings": False},
}
FAMILIES["kimi_k25"] = Family(
    "Kimi_K25",
    {
        "text_config": _MOONLIGHT,
        "vision_config": {**VIT, "patch_size": 4, "pos_emb_height": 6, "pos_emb_width": 6},
        **{"projection_hidden_size": 32, "image_token_id": IMAGE, "tie_word_embeddings": False},
    },
    Patching("bicubic", 1 / 255, (0.5,) * 3, (0.5,) * 3, 4, 4, merge=2),
    ((16, 24), (24, 40), (24, 24)),
    padded=True,
)
FAMILIES["kimi_vl"] = FAMILIES["kimi_k25"]  # the same network, by the formulas of its own code (test_kimi.py)

CODES = 16
FAMILIES["chameleon"] = Family(
    "Chameleon",
    {
        **TEXT,
        "vocabulary_map": {
            "<image>": IMAGE,
            **{
                f"IMGIMG{'ABCDEFGHIJ'[code // 10]}{'ABCDEFGHIJ'[code % 10]}Z": IMAGE + CODES - code
                for code in range(CODES)
            },
        },
        "vq_config": {
            **{"embed_dim": 8, "num_embeddings": CODES, "latent_channels": 8, "resolution": 16, "base_channels": 32},
            **{"channel_multiplier": [1, 2, 2], "num_res_blocks": 1, "attn_resolutions": [8]},
        },
    },
    Patching("lanczos", 0.0078, (1.0,) * 3, (1.0,) * 3, 4, 4),
    ((16, 16),),
)
FAMILIES["chameleon_swin"] = replace(
    FAMILIES["chameleon"],
    config={**FAMILIES["chameleon"].config, "swin_norm": True, "num_key_value_heads": 4, "attention_bias": True},
)

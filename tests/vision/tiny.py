"""Tiny random vision-language models of transformers, as folders, and what they write: the oracle of these tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.pictures import Pixels, ShownPictures
from ridgeline.core.plan.request import Request
from ridgeline.kernels.pictures.views import Box, Patching, View
from ridgeline.media.items import picture
from ridgeline.media.processors import processor_of
from tests.driving import ask_with, likeliest
from tests.vision.kimi import as_on_the_hub
from tests.vision.phi4 import Phi4Pictures

VOCAB = 320
IMAGE = 300  # the token in the place of a vector
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)

MADE = ("pixel_values", "image_sizes", "image_pixel_values", "image_attention_mask")  # by processors of tiles
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "num_hidden_layers": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

VIT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 64,
    "hidden_act": "silu",
}


TILES: dict[str, Any] = {
    "size": {"height": 32, "width": 32},
    "image_grid_pinpoints": [[32 * rows, 32 * columns] for rows in (1, 2) for columns in (1, 2, 3)],
}


@dataclass(frozen=True)
class Family:
    """config: of the whole model. patching: of its processor. sizes: of pictures that it takes, in pixels.

    padded: transformers takes pictures of several sizes as a padded batch, with their sizes.
    processor: transformers' processor of pixels and its settings, of a family that cuts pictures into tiles.
    chunk: the fewest tokens of a step beside three rows that decode.
    """

    name: str
    config: dict[str, Any]
    patching: Patching
    sizes: tuple[tuple[int, int], ...]
    padded: bool = False
    processor: tuple[type[Any], dict[str, Any]] | None = None
    chunk: int = 0

    @property
    def grids(self) -> bool:
        """True if positions have three axes."""
        return self.patching.merge > 1 and not self.padded


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
FAMILIES |= {
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

# Other ways of attention leave caps of logits out, and let the patches of Phi-4's tower see those before them alone
# if all of its tiles are full
PLAIN = "paligemma_2", "phi4_multimodal"

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


@cache
def build(name: str) -> Any:
    """Return the oracle in float32. The same numbers on every call."""
    family = FAMILIES[name]
    config = getattr(transformers, f"{family.name}Config")(**family.config)
    how = {"attn_implementation": "eager"} if name in PLAIN else {}
    kind = "ForCausalLM" if name == "phi4_multimodal" else "ForConditionalGeneration"
    model = getattr(transformers, f"{family.name}{kind}")._from_config(config, **how).eval()
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            mean = 1.0 if parameter.ndim == 1 and key.endswith("weight") else 0.0
            std = 0.3 if parameter.ndim >= 2 and "layers." in key and "vision" not in key else 0.2
            parameter.normal_(mean, std, generator=generator)
        for key, buffer in model.named_buffers():
            if key.endswith(("put_min", "put_max")):  # the bounds of clipped maps cut a third of the numbers
                bound = 1 + torch.rand((), generator=generator)
                buffer.copy_(bound if key.endswith("max") else -bound)
            if ".std_" in key:
                buffer.normal_(0.5, 0.2, generator=generator)
        model.get_output_embeddings().weight[IMAGE] = 0  # so that it writes no placeholder of a picture
    return model


def save(name: str, folder: Path) -> Path:
    """Save `build(name)` as the hub would hold it."""
    build(name).save_pretrained(folder)
    if name.startswith("kimi"):
        as_on_the_hub(name, folder)
    return folder


def drawn(name: str, number: int) -> np.ndarray:
    """Return a picture of a size that the family takes."""
    sizes = FAMILIES[name].sizes
    height, width = sizes[number % len(sizes)]
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def shown(name: str, pixels: np.ndarray) -> ShownPictures:
    height, width, _ = pixels.shape
    own = Pixels(height, width, pixels.tobytes())
    if (processor := FAMILIES[name].processor) is not None:
        config = {**FAMILIES[name].config, "model_type": name}
        ours = processor_of({"config.json": config, "preprocessor_config.json": processor[1]}, lambda text: ())
        layout = ours.layout(height, width)
        return ShownPictures((own,), layout.views, ours.patching, layout.order, layout.shrunk)
    view = View(height, width, Box(0, 0, height, width))
    return ShownPictures((own,), (view,), FAMILIES[name].patching)


def asked(name: str, request_id: str, *parts: list[int] | np.ndarray, max_tokens: int = 8, **params: Any) -> Request:
    """Return a request whose prompt is made of tokens and pictures."""
    merge = FAMILIES[name].patching.merge

    def placed(part: np.ndarray, start: int) -> tuple[list[int], list[Inserted]]:
        own, key = shown(name, part), picture(part).digest[:16]
        rows, columns = own.grids[0]
        grid = (1, rows // merge, columns // merge) if FAMILIES[name].grids else None
        vectors = Inserted(start=start, count=own.vectors, key=key, name=key.hex(), shown=own, grid=grid)
        return [IMAGE] * own.vectors, [vectors]

    return ask_with(request_id, parts, placed, max_tokens=max_tokens, **params)


def patches(name: str, pixels: np.ndarray) -> Tensor:
    """Return a picture's patches as transformers' processors make them: [T, X]."""
    how = FAMILIES[name].patching
    x = (torch.from_numpy(pixels).float() * how.scale - torch.tensor(how.mean)) / torch.tensor(how.std)
    x = x.permute(2, 0, 1)[None].repeat(how.frames, 1, 1, 1)
    merge, side = how.merge, how.rows
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    if name == "paddleocr_vl":  # its projector merges lines
        return x.reshape(3, rows, side, columns, side).permute(1, 3, 0, 2, 4).reshape(rows * columns, 3, side, side)
    x = x.reshape(how.frames, 3, rows // merge, merge, side, columns // merge, merge, side)
    return x.permute(2, 5, 3, 6, 1, 0, 4, 7).reshape(rows * columns, -1)


def inputs(name: str, pictures: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return what transformers' model takes of pictures."""
    if not pictures:
        return {}
    how = FAMILIES[name].patching
    if (processor := FAMILIES[name].processor) is not None:
        kind, settings = processor
        found = kind(**settings)(list(pictures), input_data_format="channels_last", return_tensors="pt")
        return {key: found[key] for key in MADE if key in found}
    if name.startswith("gemma4"):
        return packed(how, pictures)
    if name.startswith("kimi"):
        return lines(how, pictures)
    if FAMILIES[name].padded:
        return padded(name, how, pictures)
    if not FAMILIES[name].grids:
        x = (torch.from_numpy(np.stack(pictures)).float() * how.scale - torch.tensor(how.mean)) / torch.tensor(how.std)
        return {"pixel_values": x.permute(0, 3, 1, 2)}
    grids = [[1, each.shape[0] // how.rows, each.shape[1] // how.columns] for each in pictures]
    return {
        "pixel_values": torch.cat([patches(name, each) for each in pictures]),
        "image_grid_thw": torch.tensor(grids),
    }


def packed(how: Patching, pictures: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return Gemma 4's patches, line by line, with columns and lines, as a batch that is filled up with zeros."""
    side, most = how.rows, max(each.shape[0] * each.shape[1] for each in pictures) // how.rows**2
    batch, places = torch.zeros(len(pictures), most, 3 * side**2), torch.full((len(pictures), most, 2), -1)
    for index, each in enumerate(pictures):
        rows, columns = each.shape[0] // side, each.shape[1] // side
        x = torch.from_numpy(each).float().view(rows, side, columns, side, 3).transpose(1, 2) * how.scale
        batch[index, : rows * columns] = x.reshape(rows * columns, -1)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        places[index, : rows * columns] = torch.stack([column.flatten(), row.flatten()], 1)
    return {"pixel_values": batch, "image_position_ids": places}


def lines(how: Patching, pictures: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return the patches of pictures line by line, as MoonViT takes them: [T, 3, side, side], and the pictures' lines
    and columns."""
    side, found, grids = how.rows, [], []
    for each in pictures:
        x = (torch.from_numpy(each).float() * how.scale - torch.tensor(how.mean)) / torch.tensor(how.std)
        x = x.unflatten(0, (-1, side)).unflatten(2, (-1, side)).permute(0, 2, 4, 1, 3)
        grids.append([1, *x.shape[:2]])
        found.append(x.flatten(0, 1))
    return {"pixel_values": torch.cat(found), "image_grid_thw": torch.tensor(grids)}


def padded(name: str, how: Patching, pictures: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Return a batch of pictures of several sizes, with zeros below and to the right."""
    most = np.max([each.shape for each in pictures], axis=0)
    batch = torch.zeros(len(pictures), 3, int(most[0]), int(most[1]))
    for index, each in enumerate(pictures):
        x = (torch.from_numpy(each).float() * how.scale - torch.tensor(how.mean)) / torch.tensor(how.std)
        batch[index, :, : each.shape[0], : each.shape[1]] = x.permute(2, 0, 1)
    sizes = torch.tensor([each.shape[:2] for each in pictures])
    if name == "minicpmv4_6":
        _, _, height, width = batch.shape
        rows = batch.unflatten(2, (-1, how.rows)).permute(1, 3, 0, 2, 4).flatten(2)[None]
        return {"pixel_values": rows, "target_sizes": torch.tensor([[height // 4, width // 4]] * len(batch))}
    if name == "idefics3":
        return {"pixel_values": batch[None]}
    return {"pixel_values": batch} | ({"image_sizes": sizes} if name in ("mistral3", "llava_pixtral") else {})


_WRITTEN: dict[tuple[object, ...], list[int]] = {}  # by what was asked


def by_transformers(name: str, request: Request, pictures: Sequence[np.ndarray], tokens: int = 8) -> list[int]:
    """Return the likeliest tokens by transformers' model, which runs anew for each of them: with its cache, tokens
    behind a picture that ends a prompt count as the picture's."""
    known = name, request.prompt_token_ids, tuple(picture(each).digest for each in pictures), tokens
    if known not in _WRITTEN:
        model, prompt = build(name), request.prompt_token_ids
        _WRITTEN[known] = likeliest(prompt, tokens, lambda ids: scores(model, name, ids, pictures, len(prompt)))
    return _WRITTEN[known]


def types(name: str, row: Tensor, prompt: int | None = None) -> dict[str, Tensor]:
    """Return what tells transformers' model which of a row's tokens see each other both ways: pictures, or so many of
    the prompt (None: all)."""
    if name.startswith("paligemma"):
        return {"token_type_ids": (torch.arange(row.shape[1]) >= (prompt or row.shape[1]))[None].int()}
    kind = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}.get(name)
    return {} if kind is None else {kind: (row == IMAGE).int()}


def scores(
    model: Any, name: str, ids: Sequence[int], pictures: Sequence[np.ndarray], prompt: int | None = None
) -> Tensor:
    """Return the scores of all tokens by a model of transformers: [T, V]. prompt: so many belong to it (None: all)."""
    row = torch.tensor([list(ids)])
    given = inputs(name, pictures)
    if name == "blip-2" and not given:
        model = model.language_model  # as a whole it wants pictures
    if FAMILIES[name].grids:
        model.model.rope_deltas = None
        if given:
            given["mm_token_type_ids"] = (row == IMAGE).int()
    given |= types(name, row, prompt)
    given = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in given.items()}
    with torch.inference_mode():
        found: Tensor = model(input_ids=row, attention_mask=torch.ones_like(row), **given).logits[0]
    return found

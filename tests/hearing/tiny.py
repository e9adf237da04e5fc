"""Tiny random models of transformers that hear, as folders, and what they write: the oracle of these tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.octets import SharedOctets
from ridgeline.core.plan.request import Request
from ridgeline.core.plan.sounds import HeardSound
from ridgeline.media.items import sound
from tests.driving import ask_with, likeliest
from tests.vision.families.family import IMAGE, TEXT

RATE = 16_000
AUDIO = 301  # the token in the place of a vector
LISTENER: dict[str, Any] = {
    "num_mel_bins": 80,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2_5OmniThinker": {
        "text_config": {
            **TEXT,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        "audio_config": {**LISTENER, "output_dim": 64, "n_window": 30},
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "image_token_index": IMAGE,
        "audio_token_index": AUDIO,
        "audio_start_token_id": 302,
        "audio_end_token_id": 303,
        "vision_start_token_id": 305,
        "video_token_index": 304,
        "tie_word_embeddings": False,
    },
    "Qwen3OmniMoeThinker": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "max_position_embeddings": 2048,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "default",
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
        },
        "audio_config": {
            **LISTENER,
            "output_dim": 64,
            "n_window": 50,
            "n_window_infer": 200,
            "downsample_hidden_size": 8,
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 1],
        },
        "image_token_id": IMAGE,
        "audio_token_id": AUDIO,
        "audio_start_token_id": 302,
        "vision_start_token_id": 305,
        "video_token_id": 304,
        "tie_word_embeddings": False,
    },
    "Qwen2Audio": {
        "text_config": {**TEXT, "max_position_embeddings": 2048, "model_type": "qwen2", "tie_word_embeddings": False},
        "audio_config": {**LISTENER, "model_type": "qwen2_audio_encoder"},
        "audio_token_index": AUDIO,
    },
}


def sounds() -> list[np.ndarray]:
    """Return sounds of several lengths, of which some lie between frames, and one fills a window."""
    draw = np.random.default_rng(5)
    lengths = (7 * RATE // 10 + 33, 2 * RATE, 3 * RATE + 161, 480)
    return [
        (draw.uniform(0.05, 0.9) * np.sin(np.arange(n) * draw.uniform(0.02, 0.5)) + 0.01 * draw.standard_normal(n))
        .astype(np.float32)
        for n in lengths
    ]  # fmt: skip


@cache
def build(name: str) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval().float()
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3 if "embed" in key else parameter[0].numel() ** -0.5 * 1.3)
        elif "bias" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def save(name: str, folder: Path) -> Path:
    build(name).save_pretrained(folder)
    return folder


def frames(samples: np.ndarray) -> int:
    return -(-len(samples) // 160)


def vectors(name: str, samples: np.ndarray) -> int:
    if name != "Qwen3OmniMoeThinker":
        return -(-frames(samples) // 2) // 2
    whole, rest = divmod(frames(samples), 100)
    for _ in range(3):
        rest = -(-rest // 2)
    return 13 * whole + rest


def asked(name: str, request_id: str, *parts: list[int] | np.ndarray, max_tokens: int = 8, **params: Any) -> Request:
    """Return a request whose prompt is made of tokens and sounds."""

    def placed(part: np.ndarray, start: int) -> tuple[list[int], list[Inserted]]:
        key, count = sound(part, RATE).digest[:16], vectors(name, part)
        heard = HeardSound(samples=SharedOctets(part), frames=frames(part), vectors=count)
        return [AUDIO] * count, [Inserted(start=start, count=count, key=key, name=key.hex(), heard=heard)]

    return ask_with(request_id, parts, placed, max_tokens=max_tokens, **params)


def inputs(name: str, given: Sequence[np.ndarray]) -> dict[str, Tensor]:
    if not given:
        return {}
    extractor = transformers.WhisperFeatureExtractor(feature_size=LISTENER["num_mel_bins"])
    found = extractor(
        list(given), sampling_rate=RATE, return_attention_mask=True, padding="max_length", return_tensors="pt"
    )
    return {"input_features": found.input_features, "feature_attention_mask": found.attention_mask}


def by_transformers(name: str, request: Request, given: Sequence[np.ndarray], tokens: int = 8) -> list[int]:
    """Return the likeliest tokens by transformers' model, which runs anew for each of them."""
    model = build(name)
    return likeliest(request.prompt_token_ids, tokens, lambda ids: scores(model, name, ids, given))


def scores(model: Any, name: str, ids: Sequence[int], given: Sequence[np.ndarray]) -> Tensor:
    """Return the scores of all tokens by a model of transformers: [T, V]."""
    row = torch.tensor([list(ids)])
    with torch.inference_mode():
        found: Tensor = model(input_ids=row, attention_mask=torch.ones_like(row), **inputs(name, given)).logits[0]
    return found

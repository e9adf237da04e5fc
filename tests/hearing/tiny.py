"""Tiny random models of transformers that hear, as folders, and what they write: the oracle of these tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

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
from tests.vision.families import FAMILIES
from tests.vision.families.family import IMAGE, TEXT

RATE = 16_000
CONFORMERS = "Phi4Multimodal", "Gemma3n", "Gemma4"
EOA = 308  # the token behind a sound in Gemma 3n
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
    "Phi4Multimodal": {
        **FAMILIES["phi4_multimodal"].config,
        **{"max_position_embeddings": 2048, "original_max_position_embeddings": 2048},
        "audio_config": {
            **{"hidden_size": 32, "intermediate_size": 24, "num_blocks": 2, "num_attention_heads": 2},
            **{"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8},
            **{"bias_max_distance": 30, "audio_token_id": AUDIO},
        },
    },
    "Gemma3n": {
        "text_config": {
            **{**TEXT, "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 8, "laurel_rank": 6},
            **{"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 304, "num_kv_shared_layers": 2},
            **{"layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"], "altup_num_inputs": 3},
            **{"activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.5], "intermediate_size": [112] * 5},
            "max_position_embeddings": 2048,
        },
        "vision_config": {"hidden_size": 16, "vocab_size": 4, "vocab_offset": 304},
        "audio_config": {
            **{"hidden_size": 32, "conf_num_hidden_layers": 2, "conf_num_attention_heads": 2},
            **{"vocab_size": 12, "vocab_offset": 308, "conf_conv_kernel_size": 3},
            **{"sscp_conv_channel_size": [8, 4], "conf_attention_chunk_size": 6, "conf_attention_context_left": 7},
        },
        **{"audio_token_id": AUDIO, "eoa_token_id": EOA, "image_token_id": IMAGE, "audio_soft_tokens_per_image": 188},
    },
    "Gemma4": {
        **FAMILIES["gemma4_e2b"].config,
        "text_config": {**FAMILIES["gemma4_e2b"].config["text_config"], "max_position_embeddings": 2048},
        "audio_config": {
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 24},
            **{"subsampling_conv_channels": [128, 4], "conv_kernel_size": 3},
            **{"attention_chunk_size": 6, "attention_context_left": 7},
        },
        "audio_token_id": AUDIO,
    },
}


def sounds(name: str = "") -> list[np.ndarray]:
    """Return sounds of several lengths, of which some lie between frames, and one has few."""
    draw = np.random.default_rng(5)
    lengths = (7 * RATE // 10 + 33, 2 * RATE, 3 * RATE + 161, 640 if name == "Gemma3n" else 480)
    return [
        (draw.uniform(0.05, 0.9) * np.sin(np.arange(n) * draw.uniform(0.02, 0.5)) + 0.01 * draw.standard_normal(n))
        .astype(np.float32)
        for n in lengths
    ]  # fmt: skip


@contextmanager
def without_pictures() -> Iterator[None]:
    """Let Gemma 3n be built without timm, which has its tower."""
    own = transformers.AutoModel.from_config

    def made(config: Any, **settings: Any) -> Any:
        if getattr(config, "model_type", "") == "gemma3n_vision":
            return torch.nn.Identity()
        return own(config, **settings)

    with patch("transformers.models.gemma3n.modeling_gemma3n.AutoModel.from_config", made):
        yield


@cache
def build(name: str) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    kind = "ForCausalLM" if name == "Phi4Multimodal" else "ForConditionalGeneration"
    with without_pictures():
        model = getattr(transformers, f"{name}{kind}")(config).eval().float()
    for key, buffer in model.named_buffers():
        if "audio" in key and key.endswith(("put_min", "put_max")):  # the bounds of clipped maps cut some numbers
            buffer.copy_((1 + torch.rand(())) * (2 if key.endswith("max") else -2))
        if "global_" in key:
            torch.nn.init.normal_(buffer, mean=5.0 if "mean" in key else 0.3, std=0.1)
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3 if "embed" in key else parameter[0].numel() ** -0.5 * 1.3)
        elif "bias" in key:
            torch.nn.init.normal_(parameter, std=0.1)
        elif "audio" in key and name in CONFORMERS:
            torch.nn.init.normal_(parameter, mean=float("norm" in key), std=0.2)
    if name == "Gemma3n":  # which writes no tokens of sounds: their embeddings are others
        with torch.no_grad():
            model.get_input_embeddings().weight[[AUDIO, *range(304, 320)]] = 0
    return model


def save(name: str, folder: Path) -> Path:
    build(name).save_pretrained(folder)
    return folder


def frames(samples: np.ndarray) -> int:
    return -(-len(samples) // 160)


def vectors(name: str, samples: np.ndarray) -> int:
    if name == "Phi4Multimodal":
        return -(-((len(samples) - 400) // 160 + 1) // 8)
    if name == "Gemma3n":
        return 189
    if name == "Gemma4":
        heard = len(samples) - 160
        return -(-heard // 640)
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
    if name == "Gemma4":
        return dict(transformers.Gemma4AudioFeatureExtractor()(list(given), return_tensors="pt"))
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
    if name == "Phi4Multimodal" and given:
        with torch.inference_mode():
            return model(inputs_embeds=embedded_by_phi(model, row, given)).logits[0]  # type: ignore[no-any-return]
    if name == "Gemma3n" and given:
        return heard_by_gemma3n(model, row, given)
    with torch.inference_mode():
        found: Tensor = model(input_ids=row, attention_mask=torch.ones_like(row), **inputs(name, given)).logits[0]
    return found


def embedded_by_phi(model: Any, row: Tensor, given: Sequence[np.ndarray], mode: str = "speech") -> Tensor:
    """Return a prompt's tokens and sounds as vectors: [1, T, M]. Each sound runs by itself: in a batch transformers
    adds 1 to the scores of positions that are there, and does not hide those that fill up."""
    extractor, part = transformers.Phi4MultimodalFeatureExtractor(), model.model.embed_tokens_extend.audio_embed
    x = model.model.embed_tokens(row).clone()
    vectors = []
    for each in given:
        found = extractor(each, sampling_rate=RATE, return_tensors="pt")
        count = int(found.audio_embed_sizes)
        places = torch.full((1, count), AUDIO), torch.zeros(1, count, x.shape[2], dtype=x.dtype)
        heard = part(*places, found.audio_input_features, [count], None, mode)
        vectors.append(heard[0])
    x[row == AUDIO] = torch.cat(vectors)
    return x


def heard_by_gemma3n(model: Any, row: Tensor, given: Sequence[np.ndarray]) -> Tensor:
    """Return the scores of all tokens: [T, V]. Each sound is heard by itself: convolutions read frames behind their
    own, which a longer sound of the batch would change. The last vector of each is the token that ends it."""
    own, filled = model.model.get_audio_features, []
    extractor = transformers.Gemma3nAudioFeatureExtractor()
    with torch.inference_mode():
        filler = model.model.embed_audio(input_ids=torch.tensor([[319]]))
        for each in given:
            features = extractor([each], return_tensors="pt")
            mask = ~features["input_features_mask"]
            vectors = own(features["input_features"].to(model.dtype), mask, return_dict=True).pooler_output
            filled.append(torch.cat((vectors, filler.expand(1, 188 - vectors.shape[1], -1)), 1))
        heard = SimpleNamespace(pooler_output=torch.cat(filled), audio_mel_mask=torch.zeros(len(filled), 188).bool())
        ends = (row == AUDIO).cumsum(1) * (row == AUDIO) % 189 == 0
        row = torch.where((row == AUDIO) & ends, EOA, row)
        silent = torch.ones(1, 1, dtype=torch.bool)
        with patch.object(model.model, "get_audio_features", lambda *_, **__: heard):
            found: Tensor = model(
                input_ids=row, attention_mask=torch.ones_like(row), input_features=silent, input_features_mask=silent
            ).logits[0]
    return found

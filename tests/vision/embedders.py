"""Tiny random models that embed pictures and texts, as folders, and transformers' vectors: the oracle of the tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

WORDS = ["a", "photo", "of", "the", "cat", "dog", "car", "red", "blue", "one", "two"]
LETTERS = {"<pad>": 0, "<unk>": 1, "<s>": 2, "</s>": 3, **{word: place for place, word in enumerate(WORDS, 4)}}
POSITIONS = 12

_TEXT: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
_PICTURES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 7,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "CLIP": {
        "text_config": _TEXT,
        "vision_config": {**_PICTURES, "image_size": 28},
        "projection_dim": 24,
    },
    "Siglip": {
        "text_config": {**_TEXT, "projection_size": 32, "pad_token_id": 1},
        "vision_config": {**_PICTURES, "image_size": 28},
    },
    "Siglip2": {
        "text_config": {**_TEXT, "projection_size": 32, "pad_token_id": 1},
        "vision_config": {**_PICTURES, "num_patches": 16, "patch_size": 8},
    },
}
CLIP_SETTINGS = {
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
    "image_processor_type": "CLIPImageProcessor",
}
SETTINGS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "CLIP": (CLIPImageProcessorPil, CLIP_SETTINGS),
    "Siglip": (SiglipImageProcessorPil, {"size": {"height": 28, "width": 28}}),
    "Siglip2": (Siglip2ImageProcessorPil, {"patch_size": 8, "max_num_patches": 24}),
}


@cache
def build(family: str) -> Any:
    """Return the oracle in float32, the same numbers on every call."""
    model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**CONFIGS[family])).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = parameter.ndim == 1 and "norm" in name and name.endswith("weight")
            parameter.normal_(1.0 if norm else 0.0, 0.2, generator=generator)
    return model


def save(family: str, folder: Path) -> Path:
    """Save the model as the hub would hold it, with a tokenizer of words and its processor's files."""
    build(family).save_pretrained(folder)
    backend = tokenizers.Tokenizer(models.WordLevel(LETTERS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    frame = "<s> $A </s>" if family == "CLIP" else "$A </s>"
    backend.post_processor = processors.TemplateProcessing(single=frame, special_tokens=[("<s>", 2), ("</s>", 3)])
    backend.add_special_tokens(["<pad>", "<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    kind = {"CLIP": "PreTrainedTokenizerFast"}.get(family, f"{family}Tokenizer")
    settings = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "<pad>"}))
    _, given = SETTINGS[family]
    own = {"processor_class": f"{family}Processor", "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    (folder / "preprocessor_config.json").write_text(json.dumps({**own, **given}))
    return folder


def unit(x: Tensor) -> np.ndarray:
    """Return vectors of length 1."""
    found: np.ndarray = (x / x.norm(dim=-1, keepdim=True)).numpy()
    return found


def of_text(family: str, text: str) -> np.ndarray:
    """Return transformers' vector of a text."""
    if family != "CLIP":
        text = text.lower().replace("," if family == "Siglip" else "\0", "")
    ids = [LETTERS.get(word, 1) for word in text.split()] + [3]
    ids = [2, *ids] if family == "CLIP" else ids + [0] * (POSITIONS - len(ids))
    with torch.inference_mode():
        return unit(build(family).get_text_features(input_ids=torch.tensor([ids])).pooler_output[0])


def of_picture(family: str, pixels: np.ndarray) -> np.ndarray:
    """Return transformers' vector of a picture, by its own processor."""
    kind, given = SETTINGS[family]
    normal = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    made = kind(**normal, **given)(pixels, input_data_format="channels_last", return_tensors="pt")
    inputs = {name: made[name] for name in ("pixel_values", "pixel_attention_mask", "spatial_shapes") if name in made}
    with torch.inference_mode():
        return unit(build(family).get_image_features(**inputs).pooler_output[0])


def drawn(sizes: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Return a picture of each size."""
    draw = np.random.default_rng(5)
    return [draw.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]

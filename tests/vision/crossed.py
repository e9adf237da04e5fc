"""A tiny Llama 3.2 Vision of transformers, and what it writes: the oracle of tests of cross attention to pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import MllamaConfig, MllamaForConditionalGeneration
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.pictures import Pixels, ShownPictures
from ridgeline.core.plan.request import Request
from ridgeline.media.items import picture
from ridgeline.media.processors import processor_of
from tests.driving import ask_with, likeliest
from tests.vision.families.family import IMAGE, TEXT

TILES = 4
CONFIG: dict[str, Any] = {
    "text_config": {**TEXT, "num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_global_layers": 2,
        "attention_heads": 2,
        "image_size": 12,
        "patch_size": 4,
        "max_num_tiles": TILES,
        "intermediate_layers_indices": [0, 2],
        "vision_output_dim": 96,
    },
    "image_token_index": IMAGE,
}
PREPROCESSOR = {"size": {"height": 12, "width": 12}, "max_image_tiles": TILES}


@cache
def build() -> Any:
    """Return the oracle in float32. The same numbers on every call."""
    model = MllamaForConditionalGeneration(MllamaConfig(**CONFIG)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            mean = 1.0 if parameter.ndim == 1 and key.endswith("weight") else 0.7 if "gate" in key else 0.0
            std = 0.3 if parameter.ndim >= 2 and "language_model.layers." in key else 0.2
            parameter.normal_(mean, std, generator=generator)
    pass_rows_through(model)
    return model


def rounded(dtype: torch.dtype) -> Any:
    """Return the oracle in another dtype."""
    model = MllamaForConditionalGeneration(MllamaConfig(**CONFIG)).eval()
    model.load_state_dict(build().state_dict())
    pass_rows_through(model)
    return model.to(dtype)


def pass_rows_through(model: Any) -> None:
    """Let rows that see no picture add nothing in attention, as in the feed-forward behind it. Transformers 5.17 lets
    such rows attend to all keys alike, those of padding included; the model's own code, and vLLM's, multiply what they
    attend to by the same mask."""
    masks: dict[str, Tensor | None] = {}

    def note(module: Any, args: Any, kwargs: Any) -> None:
        masks["rows"] = kwargs["full_text_row_masked_out_mask"]

    def mask(module: Any, args: Any, output: Any) -> Any:
        rows = masks["rows"]
        return output if rows is None else (output[0] * rows[:, 0], *output[1:])

    for layer in model.model.language_model.layers:
        if hasattr(layer, "cross_attn"):
            layer.register_forward_pre_hook(note, with_kwargs=True)
            layer.cross_attn.register_forward_hook(mask)


def save(folder: Path) -> Path:
    build().save_pretrained(folder)
    return folder


def drawn(number: int) -> np.ndarray:
    """Return a picture, of one tile or of several."""
    height, width = ((12, 12), (20, 30), (40, 11), (9, 25), (24, 24))[number % 5]
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def asked(request_id: str, *parts: list[int] | np.ndarray, max_tokens: int = 8, **params: Any) -> Request:
    """Return a request whose prompt is made of tokens and pictures."""
    files = {"config.json": {**CONFIG, "model_type": "mllama"}, "preprocessor_config.json": PREPROCESSOR}
    processor = processor_of(files, lambda text: [IMAGE])

    def placed(part: np.ndarray, start: int) -> tuple[list[int], list[Inserted]]:
        height, width, _ = part.shape
        layout = processor.layout(height, width)
        assert layout.pieces == (1,)
        shown = ShownPictures((Pixels(height, width, part.tobytes()),), layout.views, processor.patching)
        key = picture(part).digest[:16]
        own = Inserted(start=start, count=1, key=key, name=key.hex(), shown=shown, across=layout.across)
        return [IMAGE], [own]

    return ask_with(request_id, parts, placed, max_tokens=max_tokens, **params)


def scores(model: Any, ids: Sequence[int], pictures: Sequence[np.ndarray], prompt: int) -> Tensor:
    """Return the scores of all tokens by transformers' model: [T, V]. prompt: so many of them are the prompt's, and
    those behind see what its last one sees."""
    row = torch.tensor([list(ids)])
    given: dict[str, Any] = {}
    if pictures:
        processor = MllamaImageProcessorPil(**PREPROCESSOR)
        made = processor([[*pictures]], input_data_format="channels_last", return_tensors="pt")
        counts = made.pop("num_tiles")
        seen = get_cross_attention_token_mask(list(ids[:prompt]), IMAGE)
        mask = convert_sparse_cross_attention_mask_to_dense([seen], counts, max_num_tiles=TILES, length=prompt)
        mask = torch.from_numpy(np.concatenate([mask, mask[:, -1:].repeat(len(ids) - prompt, 1)], axis=1))
        given = {**made, "cross_attention_mask": mask}
        given["pixel_values"] = given["pixel_values"].to(model.dtype)
    with torch.inference_mode():
        found: Tensor = model(input_ids=row, attention_mask=torch.ones_like(row), **given).logits[0]
    return found


_WRITTEN: dict[object, list[int]] = {}


def by_transformers(request: Request, pictures: Sequence[np.ndarray], tokens: int = 8) -> list[int]:
    """Return the likeliest tokens by transformers' model, which runs anew for each of them."""
    known = request.prompt_token_ids, tuple(picture(each).digest for each in pictures), tokens
    if known not in _WRITTEN:
        prompt = request.prompt_token_ids
        _WRITTEN[known] = likeliest(prompt, tokens, lambda ids: scores(build(), ids, pictures, len(prompt)))
    return _WRITTEN[known]

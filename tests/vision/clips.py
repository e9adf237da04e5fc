"""Prompts with videos for tiny models, by the real processors, and what transformers' models write behind them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ridgeline.core.plan.embeds import Inserted
from ridgeline.core.plan.request import Request
from ridgeline.media.items import Clip, clip, picture
from ridgeline.media.layout import VideoProcessor
from ridgeline.media.processors import processor_of
from ridgeline.text.media_prompt import placed_items
from tests.driving import ask_with, likeliest
from tests.vision import tiny
from tests.vision.families.family import IMAGE

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe")
VIDEO = 301
BOUNDS = {"min_pixels": 64, "max_pixels": 16384}
Part = list[int] | np.ndarray | Clip


@cache
def processor(family: str) -> VideoProcessor:
    """Return the processor of a tiny model. Each letter of a text is a token of its own."""
    how = tiny.FAMILIES[family].patching
    files = {
        "config.json": {
            "model_type": family,
            "vision_config": tiny.FAMILIES[family].config["vision_config"],
        },
        "preprocessor_config.json": {
            **BOUNDS,
            "patch_size": how.rows,
            "image_mean": how.mean,
            "image_std": how.std,
        },
    }
    found = processor_of(files, letters)
    assert isinstance(found, VideoProcessor)
    return found


def letters(text: str) -> list[int]:
    special = {"<|vision_start|>": 302, "<|vision_end|>": 303, "<|begin_of_image|>": 302, "<|end_of_image|>": 303}
    for spelled, token in special.items():
        text = text.replace(spelled, chr(token))
    return [ord(letter) if ord(letter) >= 302 else 3 + ord(letter) % 250 for letter in text]


def filmed(number: int, frames: int = 5, rate: float = 2.0, height: int = 21, width: int = 37) -> Clip:
    """Return a clip of so many frames, as many a second as are seen."""
    pixels = np.random.default_rng(number).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return clip(pixels, np.arange(frames) / rate, rate)


def asked(family: str, name: str, *parts: Part, max_tokens: int = 8, **params: Any) -> Request:
    """Return a request whose prompt is made of tokens, pictures and videos."""
    rules = processor(family)

    def placed(part: np.ndarray | Clip, start: int) -> tuple[list[int], list[Inserted]]:
        [own] = placed_items(rules, [part if isinstance(part, Clip) else picture(part)])
        tokens, inserted = list[int](), list[Inserted]()
        for piece in own.layout.pieces:
            if isinstance(piece, str):
                tokens += letters(piece)
                continue
            inserted.append(own.inserted(len(inserted), start + len(tokens)))
            tokens += [VIDEO if isinstance(part, Clip) and not family.startswith("glm") else IMAGE] * piece
        return tokens, inserted

    return ask_with(name, parts, placed, max_tokens=max_tokens, **params)


def resized(frames_FHWC: np.ndarray, side: int) -> np.ndarray:
    """Return frames at the nearest size of whole squares, within the bounds that these tests keep to."""
    _, height, width, _ = frames_FHWC.shape
    size = round(width / side) * side, round(height / side) * side
    assert BOUNDS["min_pixels"] <= size[0] * size[1] <= BOUNDS["max_pixels"]
    return np.stack([np.asarray(Image.fromarray(each).resize(size, Image.Resampling.BICUBIC)) for each in frames_FHWC])


def patches(family: str, frames_FHWC: np.ndarray) -> tuple[Tensor, list[int]]:
    """Return the patches of a video as transformers' processors of videos cut them, and its grid."""
    how = tiny.FAMILIES[family].patching
    span, side, merge = how.frames, how.rows, how.merge
    frames = resized(frames_FHWC, side * merge)
    if len(frames) % span:
        frames = np.concatenate([frames, frames[-1:].repeat(span - len(frames) % span, 0)])
    x = (torch.from_numpy(frames).float() * how.scale - torch.tensor(how.mean)) / torch.tensor(how.std)
    grid = [len(frames) // span, frames.shape[1] // side, frames.shape[2] // side]
    x = x.permute(0, 3, 1, 2).reshape(grid[0], span, 3, grid[1] // merge, merge, side, grid[2] // merge, merge, side)
    return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(grid[0] * grid[1] * grid[2], -1), grid


def scores(model: Any, family: str, ids: Sequence[int], parts: Sequence[Part]) -> Tensor:
    """Return the scores of all tokens by a model of transformers: [T, V]."""
    row = torch.tensor([list(ids)])
    given: dict[str, Any] = {}
    for kind, suffix, own in (
        ("image", "", [part[None] for part in parts if isinstance(part, np.ndarray)]),
        ("video", "_videos", [part.frames_FHWC for part in parts if isinstance(part, Clip)]),
    ):
        if own:
            made = [patches(family, each) for each in own]
            given[f"pixel_values{suffix}"] = torch.cat([each for each, _ in made]).to(model.dtype)
            given[f"{kind}_grid_thw"] = torch.tensor([grid for _, grid in made])
    if family == "qwen2_5_vl":
        given["second_per_grid_ts"] = torch.tensor([2 / part.rate for part in parts if isinstance(part, Clip)])
    if given:
        given["mm_token_type_ids"] = (row == IMAGE).int() + 2 * (row == VIDEO).int()
        if family.startswith("glm"):
            given["mm_token_type_ids"] = (row == IMAGE).int() * (2 if "video_grid_thw" in given else 1)
    model.model.rope_deltas = None
    with torch.inference_mode():
        found: Tensor = model(input_ids=row, attention_mask=torch.ones_like(row), **given).logits[0]
    return found


_WRITTEN: dict[tuple[object, ...], list[int]] = {}  # by what was asked


def by_transformers(family: str, request: Request, parts: Sequence[Part], tokens: int = 8) -> list[int]:
    """Return the likeliest tokens by transformers' model, which runs anew for each of them."""
    seen = [part if isinstance(part, Clip) else picture(part) for part in parts if not isinstance(part, list)]
    known = family, request.prompt_token_ids, tuple(each.digest for each in seen), tokens
    if known not in _WRITTEN:
        model = tiny.build(family)
        _WRITTEN[known] = likeliest(request.prompt_token_ids, tokens, lambda ids: scores(model, family, ids, parts))
    return _WRITTEN[known]

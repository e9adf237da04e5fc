"""Prompts, pictures and sounds as vectors, from a caller's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.embeds import Embeds
from ridgeline.media.items import HeardVectors, SeenVectors
from ridgeline.media.vectors import GRID, MOST_SIDE, SIZE, given
from ridgeline.media.vectors import NAMES as EMBEDS

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def is_vectors(kind: str, value: object) -> bool:
    """Return True for a picture or a sound that comes as vectors: a tensor [1, vectors, width] of floating-point
    numbers, of a picture also without the 1, or an object that has one as `image_embeds` or `audio_embeds`."""
    if isinstance(value, Mapping):
        return EMBEDS.get(kind) in value
    if kind not in EMBEDS or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    return (value.ndim == 3 and len(value) == 1) or (value.ndim == 2 and kind == "image")


def vectors_given(kind: str, value: Any) -> SeenVectors | HeardVectors:
    """Return a picture or a sound that came as vectors (`is_vectors`). Beside `image_embeds` may stand `image_size`,
    the picture's height and width, or `image_grid_thw`. Raise InvalidRequest."""
    name = EMBEDS[kind]
    told = dict(value) if isinstance(value, Mapping) else {name: value}
    tensor = told.pop(name, None)
    size, grid = (_numbers(each, told.pop(each, None), count) for each, count in ((SIZE, 2), (GRID, 3)))
    if tensor is None or told:
        odd = min(map(str, told), default=name)
        raise InvalidRequest(f"vectors of {kind} are {name}, and no {odd[:80]}; give those.", param="multi_modal_data")
    return given(kind, embeds_of(tensor, name), size or (0, 0), grid)


def _numbers(name: str, value: Any, count: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        found = tuple(torch.as_tensor(value).flatten().tolist())
    except (TypeError, ValueError, RuntimeError):
        found = ()
    if len(found) != count or any(type(each) is not int or not 0 < each <= MOST_SIDE for each in found):
        raise InvalidRequest(f"{name} is {count} whole numbers from 1 to {MOST_SIDE}.", param="multi_modal_data")
    return found


def embeds_of(value: object, name: str = "prompt_embeds") -> Embeds:
    """Return a tensor [tokens, width], or an array, as vectors. name: what they are called. Raise InvalidRequest."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.empty(0)
    if tensor.ndim == 3 and len(tensor) == 1:
        tensor = tensor[0]
    if tensor.dtype is torch.float64:
        tensor = tensor.float()
    if tensor.ndim != 2 or not tensor.numel() or tensor.dtype not in NAMES:
        told = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InvalidRequest(f"{name} is a tensor [tokens, width] of floating-point numbers, got {told}.", param=name)
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    embeds = Embeds(NAMES[tensor.dtype], tensor.shape[1], data)
    if fault := embeds.fault:
        raise InvalidRequest(f"{name} {fault}", param=name)
    return embeds

"""Prompts as vectors, from a caller's tensor."""

from __future__ import annotations

import torch

from ridgeline.core.errors import InvalidRequest
from ridgeline.core.plan.embeds import Embeds

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def embeds_of(value: object) -> Embeds:
    """Return a tensor [tokens, width], or an array, as a prompt's vectors. Raise InvalidRequest."""
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
        raise InvalidRequest(
            f"prompt_embeds is a tensor [tokens, width] of floating-point numbers, got {told}.", param="prompt_embeds"
        )
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    embeds = Embeds(NAMES[tensor.dtype], tensor.shape[1], data)
    if not embeds.is_finite:
        raise InvalidRequest("prompt_embeds has entries that are not finite numbers.", param="prompt_embeds")
    return embeds

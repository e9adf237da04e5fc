"""Where the host writes what goes to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def staging(size: int, device: torch.device) -> Tensor:
    """`size` int32 on the host; page-locked if `device` is a GPU, so that nobody waits for its copy. Torch keeps the
    memory until the copies that read it are done, then recycles it."""
    return torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")

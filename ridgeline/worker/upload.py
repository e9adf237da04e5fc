"""Copies to the device and back for which the host does not wait, through page-locked memory, in the order of the
stream.

A copy from or to ordinary memory would hold the host until the device has done all that was queued before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def staging(size: int, device: torch.device) -> Tensor:
    """Return `size` int32 on the host, page-locked if `device` is a GPU, so that the host does not wait for a copy of
    them. Torch keeps the memory until the copies that read it are done, then recycles it."""
    return torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Return the values on the device. They are there once the work that was queued before has run."""
    source = torch.from_numpy(values)
    staged = torch.empty(source.shape, dtype=source.dtype, pin_memory=device.type == "cuda")
    return staged.copy_(source).to(device, non_blocking=True)


def upload_sounds(sounds: Sequence[np.ndarray], size: int, device: torch.device) -> Tensor:
    """Return sounds on the device, cut or with silence behind them: [sounds, size]. They come as octets of float32
    samples, little-endian."""
    rows = np.zeros((len(sounds), size), np.float32)
    for row, sound in zip(rows, sounds, strict=True):
        given = np.frombuffer(sound, "<f4")[:size]
        row[: len(given)] = given
    return upload(rows, device)


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind all that is queued on a GPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class Download:
    """Tensors on their way to the host, those of wide types first. On a GPU they travel as one copy, queued behind the
    work that is in the stream when this object is made."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        if tensors[0].is_cuda:
            packed = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
            host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True).copy_(packed, non_blocking=True)
            parts = host.split([tensor.nbytes for tensor in tensors])
            self._tensors = [part.view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def arrays(self) -> list[np.ndarray]:
        """Return the values. The device must have passed an event that was recorded after this object was made."""
        return [tensor.numpy() for tensor in self._tensors]

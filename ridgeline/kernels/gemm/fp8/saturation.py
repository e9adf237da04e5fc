"""The count of activations that static scales cut off, on each device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_COUNTERS: dict[torch.device, Tensor] = {}


def saturations(device: torch.device) -> Tensor:
    """Return the device's counter: int64 []. It is made by the first eager launch, before any graph is captured."""
    if device not in _COUNTERS:
        _COUNTERS[device] = torch.zeros((), dtype=torch.int64, device=device)
    return _COUNTERS[device]


def total_saturations() -> int:
    """Return the number of activations that were cut off in this process so far. It does not wait for running kernels:
    the copy has a stream of its own."""
    return sum(_read(counter) for counter in _COUNTERS.values())


def _read(counter: Tensor) -> int:
    if counter.device.type != "cuda":
        return int(counter)
    with torch.cuda.stream(_side_stream(counter.device)):
        return int(counter)  # waits for this stream alone


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

"""Counters by which the programs of one launch tell each other that they have arrived, each 0 between launches.

No program waits for another unless the launch is cooperative: two programs of a GPU share it, and one that spins would
keep the place of the one that it waits for. So the last program to arrive does what is left to do, and sets the counter
back to 0.

Launches of one stream come one after the other and share their counters. Launches of different streams may run at the
same time, so each stream has its own. A captured graph has those of the stream in which it was captured: graphs that
may run at the same time must be captured in different streams.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

STREAMS = 128  # for which there are counters: torch takes its streams in turn from 32 of each priority
COUNTERS = 1024  # of a launch

_LOCK = threading.Lock()
_rooms: dict[tuple[str, torch.device], tuple[Tensor, dict[int, int]]] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """Return at least so many counters for launches of the current stream: int32, 0 between launches.

    Raises ValueError for more than `COUNTERS`, and what `zeros` raises.
    """
    if count > COUNTERS:
        raise ValueError(f"{count} counters of arrivals, of {COUNTERS} that a launch may have: use larger tiles.")
    return zeros("counters", device, COUNTERS, torch.int32)


def zeros(name: str, device: torch.device, count: int, dtype: torch.dtype) -> Tensor:
    """Return memory of this name for launches of the current stream, [count], all 0 between launches.

    All streams' memory is made by the first launch on the device, which must come before any graph is captured.

    Raises RuntimeError if that launch is captured, or for more than `STREAMS` streams.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    room = _rooms.get((name, device))
    if room is None:
        with _LOCK:
            room = _rooms.get((name, device))
            if room is None:
                room = _rooms[name, device] = _made(device, count, dtype), {}
    memory_SN, places = room
    place = places.get(stream)
    if place is None:
        with _LOCK:
            place = places.setdefault(stream, len(places))
    if place >= STREAMS:
        raise RuntimeError(f"more than {STREAMS} streams of {device} launch kernels that count arrivals: use fewer.")
    return memory_SN[place]


def _made(device: torch.device, count: int, dtype: torch.dtype) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"counters of {device} would be made within a graph: launch once before you capture.")
    memory_SN = torch.zeros(STREAMS, count, dtype=dtype, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams' launches do not wait for this one's zeros
    return memory_SN

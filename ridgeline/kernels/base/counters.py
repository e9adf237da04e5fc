"""Counters by which the programs of one launch tell each other that they have arrived, each 0 between launches.

No program waits for another unless the launch is cooperative: two programs of a GPU share it, and one that spins would
keep the place of the one that it waits for. So the last program to arrive does what is left to do, and leaves the
counter at 0.

Launches behind each other share their counters; launches that may run at the same time must not. So each stream has
its own, and so has each captured graph, whichever stream it was captured in: torch captures in a stream of its own, and
graphs that were captured there may be replayed in several streams at once. A graph's counters lie in its pool of
memory, and a node of the graph, in front of the first launch that counts, sets them to 0. So a replay does not depend
on what a pool's other graphs have left there.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

COUNTERS = 1024  # of tiles of a launch
ROUTE_BITS, ROUTE_COUNTERS = 4096, 512  # words of 64 bits, and numbers of 32, in which the programs of route meet
TICKETS = 32  # of which the first is used: what comes next stays aligned

_LOCK = threading.Lock()


class MeetingMemory(NamedTuple):
    """Memory of zeros in which the programs of a launch meet.

    tiles: int32 [COUNTERS]. ticket: int32 [TICKETS]. route: int32 [ROUTE_COUNTERS]. bits: int64 [ROUTE_BITS].
    """

    tiles: Tensor
    ticket: Tensor
    route: Tensor
    bits: Tensor

    @staticmethod
    def made(device: torch.device) -> MeetingMemory:
        sizes = COUNTERS, TICKETS, ROUTE_COUNTERS, 2 * ROUTE_BITS
        tiles, ticket, route, bits = torch.zeros(sum(sizes), dtype=torch.int32, device=device).split(sizes)
        return MeetingMemory(tiles, ticket, route, bits.view(torch.int64))


_kept: dict[tuple[torch.device, int, bool], tuple[int, MeetingMemory]] = {}  # a stream's, and those of its last capture


def counters(device: torch.device, count: int) -> Tensor:
    """Return at least so many counters for a launch on the current stream: int32, 0 between launches.

    Raises ValueError for more than `COUNTERS`.
    """
    if count > COUNTERS:
        raise ValueError(f"{count} counters of arrivals, of {COUNTERS} that a launch may have: use larger tiles.")
    return meeting(device).tiles


def meeting(device: torch.device) -> MeetingMemory:
    """Return the memory for a launch on the current stream, or in the graph that is captured in it."""
    stream, capture = _place(device)
    key = device, stream, capture > 0
    with _LOCK:
        kept = _kept.get(key)
        if kept is None or kept[0] != capture:
            # What a graph before has is free again with its capture, as all of a graph's memory between two launches
            kept = _kept[key] = capture, MeetingMemory.made(device)
    return kept[1]


def _place(device: torch.device) -> tuple[int, int]:
    """Return the current stream, and a number of its capture, 0 if it captures nothing."""
    if device.type != "cuda":
        return 0, 0
    stream = torch.cuda.current_stream(device).cuda_stream
    return stream, _capture(stream) if torch.cuda.is_current_stream_capturing() else 0


def _capture(stream: int) -> int:
    """Return the number of the capture that is under way in a stream. No other one of the process has it.

    Raises RuntimeError where the driver does not tell it.
    """
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    error = _capture_info()(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number))
    if error or not number.value:
        raise RuntimeError(f"the driver does not tell which graph a stream captures: its error {error}.")
    return number.value


@cache
def _capture_info() -> Any:
    if torch.version.hip is not None:
        return ctypes.CDLL("libamdhip64.so").hipStreamGetCaptureInfo
    return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo  # its first form, without edges

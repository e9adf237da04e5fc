"""Notes of when a rank comes to a collective and when it leaves it. They are taken only if a setting asks for them.

A note is two numbers: a time in nanoseconds by the rank's own clock, and what happened (`what`). On a GPU a launch of
one thread writes it, in a graph too, so it says when the device got there and not when the host did.

Legend:
    K  notes of a step
    N  notes that memory has room for
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ridgeline.core.errors import InvalidConfig

A = TypeVar("A")
# What a note may be of. A segment is a part of a step, the others are methods of what ranks of an axis talk through.
# In the first of them all ranks take part, in a receive one waits for another, and no rank waits to send.
TOGETHER = (
    "all_reduce", "all_reduce_norm", "all_gather", "gather_rows", "reduce_scatter", "all_to_all", "dispatch", "combine",
    "exchanged", "stacked",
)  # fmt: skip
RECEIVED = ("receive", "hear")
KINDS = ("segment", *TOGETHER, *RECEIVED, "send", "tell")
SEGMENT = KINDS.index("segment")
ROOM = 4096  # notes, of more collectives than a step of any model has


def what(kind: int, nbytes: int = 0, *, end: bool) -> int:
    """Return a note's second number."""
    return nbytes << 16 | kind << 1 | end


Arrived = Callable[[], NDArray[np.int64]]


class Stamps(Protocol):
    """A rank's notes."""

    def stamp(self, what: int) -> None:
        """Note that the device comes here."""

    def take(self) -> Arrived:
        """Return a function that returns the notes since the last take, [K, 2], once the device has come here."""

    def now(self) -> int:
        """Return the time of the clock that notes are made by, in nanoseconds."""


def stamps_of(device: torch.device) -> Stamps:
    """Return the notes of a device. Raise InvalidConfig if it cannot make any."""
    if device.type == "cpu":
        return HostStamps()
    if torch.version.hip is not None:
        raise InvalidConfig("rank_trace_dir reads NVIDIA's clock, which this GPU lacks; leave it out.")
    return DeviceStamps(device)


class HostStamps:
    """Notes of the thread that computes."""

    def __init__(self) -> None:
        self._notes: list[tuple[int, int]] = []

    def stamp(self, what: int) -> None:
        self._notes.append((time.monotonic_ns(), what))

    def take(self) -> Arrived:
        notes, self._notes = self._notes, []
        return lambda: np.array(notes, np.int64).reshape(-1, 2)

    def now(self) -> int:
        return time.monotonic_ns()


class DeviceStamps:
    """Notes that a GPU makes as it comes to them."""

    def __init__(self, device: torch.device) -> None:
        self._notes_N2 = torch.zeros(ROOM, 2, dtype=torch.int64, device=device)
        self._count_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self._taken = 0  # notes that were returned so far; takes are read in order

    def stamp(self, what: int) -> None:
        from ridgeline.kernels.ranks.all_reduce.stamp import stamp  # here, because it needs Triton

        stamp(self._notes_N2, self._count_1, what)

    def take(self) -> Arrived:
        packed = torch.cat([self._notes_N2.view(-1), self._count_1])
        host = torch.empty(packed.shape, dtype=torch.int64, pin_memory=packed.is_cuda)
        host.copy_(packed, non_blocking=True)

        def arrived() -> NDArray[np.int64]:
            *_, count = values = host.numpy()
            at_K = np.arange(max(self._taken, count - ROOM), count) % ROOM
            self._taken = int(count)
            return np.array(values[:-1].reshape(-1, 2)[at_K])

        return arrived

    def now(self) -> int:
        """Make a note, and wait for it. No step may be under way."""
        self.stamp(what(SEGMENT, end=True))
        notes_K2 = self._after(self.take())
        return int(notes_K2[-1, 0])

    def _after(self, arrived: Arrived) -> NDArray[np.int64]:
        if self._notes_N2.is_cuda:
            torch.cuda.synchronize(self._notes_N2.device)
        return arrived()


class _Watched:
    """An axis that notes when its collectives begin and end, and is the axis itself in everything else."""

    def __init__(self, axis: Any, stamps: Stamps) -> None:
        self._axis, self._stamps = axis, stamps

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._axis, name)
        if name not in KINDS:
            return found
        kind, stamp = KINDS.index(name), self._stamps.stamp

        def noted(*arguments: Any, **options: Any) -> Any:
            nbytes = next((value.nbytes for value in arguments if isinstance(value, Tensor)), 0)
            stamp(what(kind, nbytes, end=False))
            result = found(*arguments, **options)
            stamp(what(kind, nbytes, end=True))
            return result

        setattr(self, name, noted)
        return noted


def watched(axis: A, stamps: Stamps) -> A:
    """Return the axis, which from now on notes when its collectives begin and end."""
    return cast("A", _Watched(axis, stamps))

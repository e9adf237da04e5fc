"""Octets of pictures and sounds in messages: these say where they lie in memory that processes share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ridgeline.core.shared import MemoryPlace, SharedMemory, place_of


class SharedOctets:
    """Octets, which are not copied into messages where they lie in memory that processes share: messages then say where
    it lies, and `data` is read there.

    data: bytes, an array, or a place.
    """

    __slots__ = ("_array", "_place", "num_bytes")

    def __init__(self, data: bytes | np.ndarray | MemoryPlace) -> None:
        self._place = data if isinstance(data, MemoryPlace) else None
        self._array = None if isinstance(data, MemoryPlace) else _flat(data)
        self.num_bytes: int = data.size if isinstance(data, MemoryPlace) else len(_flat(data))

    @property
    def data(self) -> np.ndarray:
        """The octets: uint8, read-only. Raise NoSuchMemory if another process had them, and has closed them."""
        return self.opened({})

    def opened(self, known: dict[tuple[int, int, int], SharedMemory]) -> np.ndarray:
        """Return `data`. known: files of memory that are open here already, to which this one's is added: all frames of
        a video lie in one, which would be open once for each otherwise."""
        if self._array is None:
            assert self._place is not None
            if (memory := known.get(self._place.file)) is None or not self._place.fits(len(memory)):
                memory = known[self._place.file] = SharedMemory.opened(self._place)
            self._array = np.frombuffer(memory, np.uint8, self._place.size, self._place.start)
        return self._array

    @property
    def sent_bytes(self) -> int:
        """The bytes that a message takes for them, besides a few."""
        return 0 if self._array is None or place_of(self._array) is not None else self.num_bytes

    def sent(self) -> Any:
        """Return the octets or their place, for a message."""
        if self._array is None:
            assert self._place is not None
            return self._place
        return place_of(self._array) or self._array.data

    @classmethod
    def received(cls, told: Any) -> SharedOctets:
        """Return the octets that `sent` told of. Raise ValueError if they are none of ours."""
        return cls(told_octets(told))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and np.array_equal(self.data, other.data)

    def __hash__(self) -> int:
        return hash(self.num_bytes)


def told_octets(told: Any) -> bytes | MemoryPlace:
    """Return a message's octets, or their place. Raise ValueError if they are none of ours."""
    if not isinstance(told, (bytes, list, tuple)):
        raise ValueError(f"octets are bytes or their place, got {type(told).__name__}.")
    return told if isinstance(told, bytes) else MemoryPlace(*map(int, told))


def open_all(octets: Iterable[SharedOctets]) -> None:
    """Hold the memory of octets from now on, wherever it lies. Raise NoSuchMemory."""
    known = dict[tuple[int, int, int], SharedMemory]()
    for each in octets:
        each.opened(known)


def _flat(data: bytes | np.ndarray) -> np.ndarray:
    if not isinstance(data, np.ndarray):
        return np.frombuffer(data, np.uint8)
    found = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    found.flags.writeable = False
    return found


def plain_octets(value: Any) -> Any:
    """Return the message's form of octets, as msgspec's `enc_hook`."""
    if isinstance(value, SharedOctets):
        return value.sent()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def octets_received(kind: type, value: Any) -> Any:
    """Return octets of a message, as msgspec's `dec_hook`."""
    if issubclass(kind, SharedOctets):
        return kind.received(value)
    raise NotImplementedError(f"{kind.__name__} cannot be received")

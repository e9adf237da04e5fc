"""Segments: files of slots of one size, with a table of their records in front.

    0            a header: magic, version, slot bytes, number of slots, seal
    4096         the table: one record for each slot (`sealed`); zeros where a slot is empty
    `first`      the slots, each a whole number of 4096 bytes

An index is built from the tables alone. A write erases the slot's record, writes the payload, then its record; whatever
a process leaves that is killed between them is an empty slot. A disk may write these in another order before power is
lost: then the checksum tells.

A file for each block was measured first: at 64 KiB it wrote 100 MB/s where slots take 2,400, at 2 MiB 400 and 2,500
(ext4; names, inodes and their journal cost 0.4 to 5 ms a block), and to give one up took 0.1 to 0.6 ms more. Reads are
alike.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

from ridgeline.tiers.private import PrivateDirectory
from ridgeline.tiers.sealed import EMPTY, RECORD_BYTES, Buffer, TierKeys

ALIGNED = 4096
MAGIC, VERSION = b"RLKVSEG\0", 1
_HEADER = struct.Struct("<8sIIQQ")
_SEAL = 8
MOST_PARTS = 512  # of one call; the system takes 1024
MOST_OPEN = 128  # descriptors kept, of 1024 that a process has by default
MOST_SLOTS = 1 << 20
COARSE = 1_000_000_000  # ns
PUNCH_HOLE = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_libc = ctypes.CDLL(None, use_errno=True)


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


class ForeignFile(ValueError):
    """A file that is no segment of this format, sealed with this directory's key."""


@dataclass(frozen=True)
class SegmentShape:
    """slot_bytes: of each of the `slots`."""

    slot_bytes: int
    slots: int

    @property
    def first(self) -> int:
        """The place of the first slot."""
        return ALIGNED + aligned(self.slots * RECORD_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.first + self.slots * self.slot_bytes

    def packed(self, keys: TierKeys) -> bytes:
        data = _HEADER.pack(MAGIC, VERSION, 0, self.slot_bytes, self.slots)
        return data + keys.seal(data)

    @classmethod
    def unpacked(cls, data: bytes, keys: TierKeys) -> SegmentShape:
        """Raise ForeignFile."""
        body, seal = data[: _HEADER.size], data[_HEADER.size : _HEADER.size + _SEAL]
        if len(seal) < _SEAL or keys.seal(body) != seal:
            raise ForeignFile("it is damaged, or of another key")
        magic, version, _, slot_bytes, slots = _HEADER.unpack(body)
        if (magic, version) != (MAGIC, VERSION):
            raise ForeignFile(f"it has format {version}, not {VERSION}")
        return cls(slot_bytes, slots)


@dataclass(eq=False)
class TierSegment:
    """name: of its file. own: this process writes to it. changed: when its table was last read."""

    name: str
    shape: SegmentShape
    own: bool
    changed: int = 0
    dirty: bool = field(default=False, repr=False)


class Files:
    """The directory's segments on disk. All calls may come from several threads at once."""

    def __init__(self, directory: PrivateDirectory, keys: TierKeys, *, read_only: bool = False) -> None:
        self.directory, self.keys = directory, keys
        self._flags = os.O_RDONLY if read_only else os.O_RDWR
        self._open: OrderedDict[str, int] = OrderedDict()
        self._used: dict[int, int] = {}  # descriptor → threads that use it
        self._left: set[int] = set()  # those to close when no thread uses them any more
        self._lock = Lock()

    # ---- descriptors ------------------------------------------------------------------------------------------

    def _take(self, name: str) -> int:
        with self._lock:
            if name not in self._open:
                self._open[name] = self.directory.open(name, self._flags)
                if len(self._open) > MOST_OPEN:
                    self._leave(self._open.popitem(last=False)[1])
            self._open.move_to_end(name)
            found = self._open[name]
            self._used[found] = self._used.get(found, 0) + 1
            return found

    def _give(self, descriptor: int) -> None:
        with self._lock:
            self._used[descriptor] -= 1
            if not self._used[descriptor]:
                del self._used[descriptor]
                if descriptor in self._left:
                    self._left.remove(descriptor)
                    os.close(descriptor)

    def _leave(self, descriptor: int) -> None:
        if descriptor in self._used:
            self._left.add(descriptor)
        else:
            os.close(descriptor)

    def forget(self, name: str) -> None:
        """Close a file that was removed or renamed."""
        with self._lock:
            if (found := self._open.pop(name, None)) is not None:
                self._leave(found)

    def close(self) -> None:
        for name in list(self._open):
            self.forget(name)

    # ---- whole files ------------------------------------------------------------------------------------------

    def create(self, name: str, shape: SegmentShape) -> TierSegment:
        """Make an empty segment. The disk takes its bytes when slots are written."""
        descriptor = self.directory.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(descriptor, shape.file_bytes)
            _write(descriptor, [shape.packed(self.keys)], 0)
        except OSError:
            self.directory.remove(name)
            raise
        finally:
            os.close(descriptor)
        return TierSegment(name, shape, own=True)

    def load(self, name: str, *, own: bool) -> TierSegment:
        """Return a segment that there is. Raise ForeignFile or OSError."""
        descriptor = self._take(name)
        try:
            shape = SegmentShape.unpacked(os.pread(descriptor, _HEADER.size + _SEAL, 0), self.keys)
        finally:
            self._give(descriptor)
        return TierSegment(name, shape, own)

    def table(self, segment: TierSegment) -> list[bytes]:
        """Return the bytes of each slot's record: none of an empty slot, or where the file was cut off."""
        size, shape = RECORD_BYTES, segment.shape
        descriptor = self._take(segment.name)
        try:
            stat = os.fstat(descriptor)
            data = os.pread(descriptor, shape.slots * size, ALIGNED)
        finally:
            self._give(descriptor)
        # Clocks of files may be coarse: what changed just now may change again and look the same
        segment.changed = stat.st_mtime_ns if time.time_ns() - stat.st_mtime_ns > COARSE else 0
        there = min(shape.slots, len(data) // size, max(0, stat.st_size - shape.first) // shape.slot_bytes)
        rows = [data[n * size : (n + 1) * size] for n in range(there)]
        return [b"" if row == EMPTY else row for row in rows] + [b""] * (shape.slots - there)

    def remove(self, segment: TierSegment) -> None:
        self.directory.remove(segment.name)
        self.forget(segment.name)

    def sync(self, segment: TierSegment) -> None:
        """Wait until the disk has what was written."""
        descriptor = self._take(segment.name)
        try:
            os.fdatasync(descriptor)
        finally:
            self._give(descriptor)

    # ---- slots ------------------------------------------------------------------------------------------------

    def write(self, segment: TierSegment, slot: int, row: bytes, parts: Sequence[Buffer]) -> None:
        """Write a block and its record. Nothing is left behind it of a longer block that the slot held."""
        descriptor, size = self._take(segment.name), sum(memoryview(part).nbytes for part in parts)
        filled = [*parts, bytes(min(-size % ALIGNED, segment.shape.slot_bytes - size))]
        try:
            _write(descriptor, [EMPTY], _row(slot))
            _write(descriptor, filled, segment.shape.first + slot * segment.shape.slot_bytes)
            _write(descriptor, [row], _row(slot))
        finally:
            self._give(descriptor)

    def row(self, segment: TierSegment, slot: int) -> bytes:
        """Return the bytes of a slot's record as they are now."""
        descriptor = self._take(segment.name)
        try:
            return os.pread(descriptor, RECORD_BYTES, _row(slot))
        finally:
            self._give(descriptor)

    def read(self, segment: TierSegment, slot: int, into: Sequence[Buffer]) -> bool:
        """Fill writable buffers with a slot's bytes. Return False if the file ends before."""
        descriptor = self._take(segment.name)
        try:
            return _read(descriptor, into, segment.shape.first + slot * segment.shape.slot_bytes)
        finally:
            self._give(descriptor)

    def erase(self, segment: TierSegment, slot: int) -> None:
        """Empty a slot, and give its bytes back to the disk or, where the file system cannot, overwrite them."""
        descriptor, shape = self._take(segment.name), segment.shape
        try:
            _write(descriptor, [EMPTY], _row(slot))
            start = shape.first + slot * shape.slot_bytes
            if _libc.fallocate(descriptor, PUNCH_HOLE, ctypes.c_long(start), ctypes.c_long(shape.slot_bytes)):
                _write(descriptor, [bytes(shape.slot_bytes)], start)
        finally:
            self._give(descriptor)


def _row(slot: int) -> int:
    return ALIGNED + slot * RECORD_BYTES


def _write(descriptor: int, parts: Sequence[Buffer], start: int) -> None:
    for first in range(0, len(parts), MOST_PARTS):
        left = [view for part in parts[first : first + MOST_PARTS] if (view := _octets(part))]
        while left:
            done = os.pwritev(descriptor, left, start)
            start += done
            left = _after(left, done)


def _read(descriptor: int, parts: Sequence[Buffer], start: int) -> bool:
    for first in range(0, len(parts), MOST_PARTS):
        left = [view for part in parts[first : first + MOST_PARTS] if (view := _octets(part))]
        while left:
            done = os.preadv(descriptor, left, start)
            if not done:
                return False
            start += done
            left = _after(left, done)
    return True


def _octets(part: Buffer) -> memoryview:
    return memoryview(part).cast("B")


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    """Return the rest of some buffers, after their first `done` bytes."""
    for n, part in enumerate(parts):
        if done < len(part):
            return [part[done:], *parts[n + 1 :]]
        done -= len(part)
    return []

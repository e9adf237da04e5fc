"""A disk tier's directory seen from outside, while servers use it or none does: `ridgeline kv` reads and purges it.

To erase a slot is safe, also in a file of another process. Its owner may write another block there at the same moment.
Then that block is lost, but never read wrong, since its checksum covers record and payload.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ridgeline.tiers.owners import SEGMENT, live_owners
from ridgeline.tiers.private import PrivateDirectory
from ridgeline.tiers.sealed import BlockRecord, load_keys
from ridgeline.tiers.segment import Files, ForeignFile, TierSegment
from ridgeline.tiers.space import PURGED


class FoundRecord(NamedTuple):
    segment: TierSegment
    slot: int
    record: BlockRecord


@dataclass(kw_only=True)
class Contents:
    """The directory's contents in figures. models, tenants: blocks and bytes of each, by the first digits of their
    keyed names. disk_bytes: that the disk has given to the files. foreign: files that are left alone, and why.
    servers: processes that use the directory now. damaged: records that nothing is read from."""

    blocks: int = 0
    bytes: int = 0
    expired: int = 0
    damaged: int = 0
    files: int = 0
    file_bytes: int = 0
    disk_bytes: int = 0
    servers: int = 0
    models: Counter[str] = field(default_factory=Counter)
    tenants: Counter[str] = field(default_factory=Counter)
    foreign: dict[str, str] = field(default_factory=dict)


class Inspected:
    """Raises InvalidConfig if the directory is none of a disk tier, or open to others."""

    def __init__(self, path: Path, *, writes: bool = False) -> None:
        self._directory = PrivateDirectory(path, make=False)
        self.keys = load_keys(self._directory, make=False)
        self._files = Files(self._directory, self.keys, read_only=not writes)
        self.foreign: dict[str, str] = {}
        self.damaged = 0

    def segments(self) -> Iterator[TierSegment]:
        self.foreign.clear()
        for name in self._directory.files():
            if not SEGMENT.fullmatch(name):
                continue
            try:
                yield self._files.load(name, own=False)
            except FileNotFoundError:
                continue
            except (ForeignFile, OSError) as error:
                self.foreign[name] = str(error)

    def blocks(self) -> Iterator[FoundRecord]:
        """Yield all blocks whose records are sound, file by file."""
        self.damaged = 0
        for segment in self.segments():
            for slot, row in enumerate(self._files.table(segment)):
                record = self.keys.unpacked(row) if row else None
                if record is not None:
                    yield FoundRecord(segment, slot, record)
                self.damaged += bool(row) and record is None

    def contents(self, now: float) -> Contents:
        found = Contents()
        for _, _, record in self.blocks():
            found.blocks, found.bytes = found.blocks + 1, found.bytes + record.length
            found.expired += record.expired(now)
            found.models[record.identity.hex()[:8]] += record.length
            found.tenants[record.tenant.hex()[:8]] += record.length
        names = self._directory.files()
        for name in filter(SEGMENT.fullmatch, names):
            with suppress(FileNotFoundError):  # its process removed it meanwhile
                stat = os.stat(name, dir_fd=self._directory.descriptor, follow_symlinks=False)
                found.files, found.file_bytes = found.files + 1, found.file_bytes + stat.st_size
                found.disk_bytes += stat.st_blocks * 512
        found.damaged, found.foreign = self.damaged, dict(self.foreign)
        found.servers = len(live_owners(self._directory, names))
        return found

    def verify(self) -> Iterator[tuple[FoundRecord, bool]]:
        """Read every block, and yield it with True if it is what was written. A block that another process replaces
        meanwhile is left out."""
        for found in self.blocks():
            segment, slot, record = found
            row, into = self._files.row(segment, slot), bytearray(record.length)
            sound = self._files.read(segment, slot, [into]) and self.keys.holds(row, [into])
            if sound or (self.keys.unpacked(row) == record and self._files.row(segment, slot) == row):
                yield found, sound

    def purge(self, wanted: Callable[[BlockRecord], bool]) -> tuple[int, int]:
        """Erase the blocks that are wanted. Return how many these were, and their bytes."""
        count = size = 0
        for segment, slot, record in self.blocks():
            if wanted(record):
                self._files.erase(segment, slot)
                count, size = count + 1, size + record.length
        self._directory.touch(PURGED)
        return count, size

    def remove_files(self) -> int:
        """Remove the files that no running process owns, damaged ones included. Return how many these were."""
        with self._directory.locked():
            names = self._directory.files()
            live = live_owners(self._directory, names)
            gone = [name for name in names if (found := SEGMENT.fullmatch(name)) and found[1] not in live]
            for name in gone:
                self._directory.remove(name)
        return len(gone)

    def close(self) -> None:
        self._files.close()
        self._directory.close()

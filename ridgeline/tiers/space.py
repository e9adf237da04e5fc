"""The place of a new block, and the regular look at the directory.

A block goes into a free slot of its size, else into a new file, if the directory may grow and this process has less
than its share (the capacity divided by the live processes), else into the slot of the block that ranks lowest. Where
blocks have several sizes, a whole file of another size goes instead, if all in it ranks lower.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from threading import Lock

from ridgeline.tiers.catalog import BlockPlace, Catalog, Entry
from ridgeline.tiers.options import DiskFigures, DiskOptions
from ridgeline.tiers.owners import Owner, Scan
from ridgeline.tiers.private import LockBusy
from ridgeline.tiers.sealed import RECORD_BYTES, BlockRecord
from ridgeline.tiers.segment import ALIGNED, MOST_SLOTS, Files, ForeignFile, SegmentShape, TierSegment, aligned

logger = logging.getLogger(__name__)

PURGED = "purged"  # changes when another process erased blocks of ours
LEAST_FILES = 8  # that a process's share has room for
COMPARED = 8  # evictions, at least, between two comparisons of the files of all sizes
GIVEN = 8  # files given up for another process at one look


class Space:
    """The files of one directory as places for blocks. `lock` guards the catalog and the figures."""

    def __init__(
        self,
        files: Files,
        owner: Owner,
        catalog: Catalog,
        lock: Lock,
        figures: DiskFigures,
        options: DiskOptions,
    ) -> None:
        self._files, self._owner, self._catalog, self._lock = files, owner, catalog, lock
        self._figures, self._options = figures, options
        self._capacity = figures.capacity_bytes
        self._growing = Lock()
        self._owners, self._purged = 1, files.directory.changed(PURGED)
        self._full, self._since = False, 0
        self._refused: set[str] = set()  # files that are no segments

    @property
    def share(self) -> int:
        """The most bytes of files that this process may own."""
        return self._capacity // self._owners

    def fits(self, tenant: bytes, length: int) -> bool:
        """Return True if a block of so many bytes could ever be stored for a tenant."""
        quota = self._options.tenant_bytes
        return self._shape(aligned(length)).file_bytes <= self.share and (quota is None or length <= quota)

    def _shape(self, slot_bytes: int) -> SegmentShape:
        size = min(self._options.segment_bytes, self.share // LEAST_FILES)
        slots = (size - 2 * ALIGNED) // (max(slot_bytes, ALIGNED) + RECORD_BYTES)
        return SegmentShape(max(slot_bytes, ALIGNED), max(1, min(slots, MOST_SLOTS)))

    # ---- a place for a block ----------------------------------------------------------------------------------

    def place(self, record: BlockRecord) -> BlockPlace | None:
        """Take a slot for a block. Whatever it held is forgotten, and its record is to be overwritten. Raise OSError if
        the disk is full."""
        self._keep_quota(record)
        slot_bytes = max(aligned(record.length), ALIGNED)
        with self._lock:
            found = self._catalog.reserve(slot_bytes)
        return found or self._grown(slot_bytes) or self._evicted(slot_bytes)

    def _keep_quota(self, record: BlockRecord) -> None:
        quota, given = self._options.tenant_bytes, list[BlockPlace]()
        if quota is None:
            return
        with self._lock:
            while self._catalog.tenants[record.tenant] + record.length > quota:
                if (entry := self._catalog.first_of(record.tenant)) is None:
                    break  # the rest lies in files of others
                given.append(self._catalog.evict(entry))
                self._figures.evicted += 1
        self.erase(given)

    def _grown(self, slot_bytes: int) -> BlockPlace | None:
        """Take a slot of a new file, if there may be one more."""
        with self._growing:
            with self._lock:
                if (found := self._catalog.reserve(slot_bytes)) is not None or self._full:
                    return found
                own = sum(segment.shape.file_bytes for segment in self._catalog.own())
            shape = self._shape(slot_bytes)
            if own + shape.file_bytes > self.share or (segment := self._created(shape)) is None:
                self._full = True
                return None
            with self._lock:
                self._catalog.add_segment(segment)
                return self._catalog.reserve(slot_bytes)

    def _created(self, shape: SegmentShape) -> TierSegment | None:
        try:
            with self._files.directory.locked():
                if self._owner.scan().bytes + shape.file_bytes > self._capacity:
                    return None
                return self._files.create(self._owner.new_name(), shape)
        except LockBusy:
            return None

    def _evicted(self, slot_bytes: int) -> BlockPlace | None:
        """Take the slot of the block that ranks lowest, or one of a file in place of another file."""
        with self._lock:
            first = self._catalog.first(slot_bytes)
            self._since += 1
            often = max(COMPARED, len(self._catalog.entries) >> 8)  # it looks at all blocks
            compares = first is None or (self._catalog.sizes > 1 and self._since >= often)
            self._since = 0 if compares else self._since
            coldest = self._catalog.coldest_segment(but=slot_bytes) if compares else None
            if coldest is None or (first is not None and coldest[0] >= first.rank):
                if first is None:
                    return None
                self._figures.evicted += 1
                return self._catalog.evict(first)
            self._figures.evicted += self._catalog.drop_segment(coldest[1])
            self._full = False
        self._files.remove(coldest[1])
        return self._grown(slot_bytes)

    # ---- blocks that go ---------------------------------------------------------------------------------------

    def discard(self, entries: Iterable[Entry]) -> int:
        """Forget blocks and erase them, those of other processes too. Return how many were still there."""
        with self._lock:
            there = [entry for entry in entries if self._catalog.entries.get(entry.tag) is entry]
            for entry in there:
                self._catalog.remove(entry)
        self.erase(entry.place for entry in there if entry.place.segment.own or not self._is_anothers(entry))
        return len(there)

    def _is_anothers(self, entry: Entry) -> bool:
        """Return True if the slot of another process holds something else by now, which must stay."""
        try:
            record = self._files.keys.unpacked(self._files.row(*entry.place))
        except OSError:
            return True
        return record is not None and record.tag != entry.tag

    def erase(self, places: Iterable[BlockPlace]) -> None:
        """Erase slots whose blocks are forgotten, and let them be taken."""
        for place in places:
            try:
                self._files.erase(*place)
            except FileNotFoundError:
                continue
            except OSError as error:  # its owner, or a later look, finds it again
                logger.warning("a block of the KV cache cannot be erased: %s", error)
                continue
            with self._lock:
                self._catalog.free(place)

    def lose(self, segment: TierSegment) -> bool:
        """Forget a file that was deleted. Return False."""
        self._files.forget(segment.name)
        with self._lock:
            if self._catalog.segments.get(segment.name) is segment:
                self._catalog.drop_segment(segment)
        return False

    # ---- the directory ----------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Bring the catalog up to date with the directory, and delete what has expired. Raise OSError."""
        purged = self._files.directory.changed(PURGED)
        with self._files.directory.locked():
            scan = self._owner.scan()
        with self._lock:
            self._owners = self._figures.owners = scan.owners
            self._full = False
            known = dict(self._catalog.segments)
        for name, segment in known.items():
            if name not in scan.own and name not in scan.foreign:
                self.lose(segment)
        for names, own in ((scan.own, True), (scan.foreign, False)):
            for name in names:
                self._learn(name, known.get(name), own=own, again=purged != self._purged, now=now)
        self._purged = purged
        with self._lock:
            expired = self._catalog.expired(now)
            self._figures.expired += len(expired)
        self.discard(expired)
        self._make_room(scan)

    def _learn(self, name: str, known: TierSegment | None, *, own: bool, again: bool, now: float) -> None:
        try:
            if known is None:
                if name not in self._refused:
                    self._add(self._files.load(name, own=own), now)
            elif own and again:
                self._look_again(known)
            elif not own and known.changed != self._files.directory.changed(name):
                with self._lock:
                    self._catalog.drop_segment(known)
                self._add(known, now)
        except FileNotFoundError:
            return
        except (ForeignFile, OSError) as error:
            self._refused.add(name)
            with self._lock:
                self._figures.corrupt += 1
            logger.warning("the file %s is left alone: %s; it may be deleted", self._files.directory.path / name, error)

    def _add(self, segment: TierSegment, now: float) -> None:
        """Add a file to the catalog. Erase the slots whose records are damaged or have expired, if it is an own one."""
        found, bad = list[tuple[int, BlockRecord]](), list[BlockPlace]()
        for slot, row in enumerate(self._files.table(segment)):
            record = self._files.keys.unpacked(row) if row else None
            if record is None or record.expired(now) or record.length > segment.shape.slot_bytes:
                bad += [BlockPlace(segment, slot)] * bool(row)
            else:
                found.append((slot, record))
        if segment.own:
            for place in bad:
                self._files.erase(*place)
        with self._lock:
            twice = self._catalog.add_segment(segment, found)
        self.erase(entry.place for entry in twice)

    def _look_again(self, segment: TierSegment) -> None:
        """Forget the blocks of an own file that another process erased."""
        with self._lock:
            held = self._catalog.held(segment)
        rows = self._files.table(segment)
        with self._lock:
            for entry in held:
                if not rows[entry.place.slot] and self._catalog.entries.get(entry.tag) is entry:
                    self._catalog.remove(entry)
                    self._catalog.free(entry.place)

    def _make_room(self, scan: Scan) -> None:
        """Remove the coldest own files while there are more than this process's share, and others need room."""
        total, given, file = scan.bytes, 0, self._shape(ALIGNED).file_bytes if scan.owners > 1 else 0
        while total > self._capacity or (total + file > self._capacity and given < GIVEN):
            with self._lock:
                own = sum(segment.shape.file_bytes for segment in self._catalog.own())
                coldest = self._catalog.coldest_segment()
                if own <= self.share or coldest is None:
                    return
                self._figures.evicted += self._catalog.drop_segment(coldest[1])
            self._files.remove(coldest[1])
            total, given = total - coldest[1].shape.file_bytes, given + 1

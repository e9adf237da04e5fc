"""The disk as a tier: blocks of bytes by name, in a directory that several processes share.

Nothing here blocks the caller. Writes and reads wait in queues for threads, and a write that finds the queue full is
dropped, since a cache may forget. Every read checks a checksum over the block and its record, so what is read is what
was written, or nothing. A process that is killed loses the writes that it had not begun; the kernel has the others, and
puts them on the disk in its own time. `flush` waits for both.

    private.py    a directory and files that no other user can touch
    sealed.py     keys, names and checksums
    segment.py    files of slots
    owners.py     which process writes which file
    catalog.py    the index in memory; eviction.py: the order of eviction
    space.py      the place of a new block, and the regular look at the directory
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Condition, Event, Lock, Thread

from ridgeline.core.errors import InvalidConfig
from ridgeline.tiers.catalog import BlockPlace, Catalog, Entry
from ridgeline.tiers.options import DiskFigures, DiskOptions
from ridgeline.tiers.owners import Owner
from ridgeline.tiers.private import PrivateDirectory
from ridgeline.tiers.sealed import EMPTY, BlockName, BlockRecord, Buffer, TierKeys, load_keys
from ridgeline.tiers.segment import Files, TierSegment
from ridgeline.tiers.space import PURGED, Space

logger = logging.getLogger(__name__)

LEAST_BYTES = 1 << 20  # of the directory
MOST_READS = 1 << 16  # that wait at a time


class _Pending:
    """A write that waits or runs. gone: its block was removed meanwhile."""

    __slots__ = ("gone", "tenant")

    def __init__(self, tenant: bytes) -> None:
        self.gone, self.tenant = False, tenant


class DiskTier:
    """Blocks in a directory, which is made if it is not there. All methods may be called from any thread.

    identity: bytes that describe the model, its weights, dtype, layout, rotary positions, format of the cache and
        division: blocks of another identity are never found.
    capacity_bytes: the most bytes of all files of blocks in the directory, of every process.
    clock: seconds since 1970.

    Raises InvalidConfig, with one sentence, for a directory that cannot be used or is open to other users.
    """

    def __init__(
        self,
        directory: Path,
        identity: bytes,
        capacity_bytes: int,
        options: DiskOptions = DiskOptions(),
        clock: Callable[[], float] = time.time,
    ) -> None:
        if capacity_bytes < LEAST_BYTES:
            raise InvalidConfig(f"the disk tier's size must be at least {LEAST_BYTES} bytes, got {capacity_bytes}.")
        self._options, self._clock, self._identity = options, clock, identity
        self._catalog = Catalog(options.eviction, by_tenant=options.tenant_bytes is not None)
        self._figures = DiskFigures(capacity_bytes=capacity_bytes)
        self._lock, self._idle = Lock(), Condition()
        self._pending: dict[bytes, _Pending] = {}
        self._reads, self._retry_at, self._said = 0, 0.0, set[str]()
        self._directory = PrivateDirectory(directory)
        try:
            with self._directory.locked():
                self.keys: TierKeys = load_keys(self._directory, make=True)
                self._owner = Owner(self._directory)
        except OSError as error:
            self._directory.close()
            raise InvalidConfig(f"the KV cache's directory {directory} cannot be used: {error}.") from error
        self.files = Files(self._directory, self.keys)
        self._space = Space(self.files, self._owner, self._catalog, self._lock, self._figures, options)
        self._writers = ThreadPoolExecutor(options.writers, "kv-disk-write")
        self._readers = ThreadPoolExecutor(options.readers, "kv-disk-read")
        self._closing = Event()
        self.tick()
        self._keeper = Thread(target=self._keep, name="kv-disk-keeper", daemon=True)
        if options.period:
            self._keeper.start()

    # ---- asking -----------------------------------------------------------------------------------------------

    def contains(self, name: BlockName, tenant: str = "") -> bool:
        """Return True if the index has a block; reading it may still fail."""
        tag = self.keys.tag(self._identity, tenant, name)
        with self._lock:
            return (entry := self._catalog.entries.get(tag)) is not None and not self._is_over(entry)

    def figures(self) -> DiskFigures:
        """Return a copy of the figures as they are now."""
        with self._lock:
            catalog, own = self._catalog, self._catalog.own()
            now = {
                "blocks": len(catalog.entries),
                "bytes": catalog.bytes,
                "own_bytes": sum(segment.shape.file_bytes for segment in own),
                "tenants": len(catalog.tenants),
                "stopped": bool(self._retry_at),
            }
            return DiskFigures(**{**vars(self._figures), **now})

    # ---- writing ----------------------------------------------------------------------------------------------

    def submit_write(
        self, name: BlockName, tenant: str, parts: Sequence[Buffer], expires: float = 0.0, cost: float = 0.0
    ) -> Future[bool]:
        """Write a block, whose bytes are those of `parts` one after the other. The parts must not change until the
        future is done; it tells whether the block is there.

        expires: seconds since 1970; 0: after the store's `ttl`. cost: milliseconds to compute the block again.
        """
        length, done = sum(memoryview(part).nbytes for part in parts), Future[bool]()
        tag, owner = self.keys.tag(self._identity, tenant, name), self.keys.tenant(tenant)
        known = self._take_in(tag, owner, length)
        if known is not None:
            done.set_result(known)
            return done
        now = self._clock()
        ends = expires or (now + self._options.ttl if self._options.ttl else 0.0)
        record = BlockRecord(length, now, ends, cost, tag, owner, self.keys.identity(self._identity))
        try:
            self._writers.submit(self._write, record, parts, done)
        except RuntimeError:  # closed meanwhile
            self._leave(record)
            done.set_result(False)
        return done

    def _take_in(self, tag: bytes, tenant: bytes, length: int) -> bool | None:
        """Let a write join the queue (None), or say what becomes of it."""
        with self._lock:
            if (entry := self._catalog.entries.get(tag)) is not None and not self._is_over(entry):
                self._catalog.use(entry)
                return True
            if tag in self._pending or self._closing.is_set():
                return False
            if self._retry_at > time.monotonic() or not self._space.fits(tenant, length):
                self._figures.refused += 1
                return False
            if self._figures.queued_bytes + length > self._options.queue_bytes:
                self._figures.dropped += 1
                return False
            self._figures.queued_bytes += length
            self._pending[tag] = _Pending(tenant)
            return None

    def _leave(self, record: BlockRecord, seconds: float = 0.0) -> None:
        with self._lock:
            self._figures.write_seconds += seconds
            self._figures.queued_bytes -= record.length
            del self._pending[record.tag]
        with self._idle:
            self._idle.notify_all()

    def _write(self, record: BlockRecord, parts: Sequence[Buffer], done: Future[bool]) -> None:
        found, start = False, time.monotonic()
        try:
            found = self._put(record, parts)
        except OSError as error:
            with self._lock:
                self._figures.failed += 1
                first, self._retry_at = not self._retry_at, time.monotonic() + self._options.retry
            if first:
                logger.warning(
                    "the KV cache's directory %s cannot be written to (%s): nothing is stored there for now, and it is "
                    "tried again every %g seconds",
                    *(self._directory.path, error.strerror or error, self._options.retry),
                )
        finally:
            self._leave(record, time.monotonic() - start)
            done.set_result(found)

    def _put(self, record: BlockRecord, parts: Sequence[Buffer]) -> bool:
        with self._lock:
            if self._retry_at > time.monotonic():
                self._figures.refused += 1
                return False
        row = self.keys.packed(record, parts)
        place = self._space.place(record)
        if place is None:
            with self._lock:
                self._figures.refused += 1
            return False
        try:
            self.files.write(*place, row, parts)
        except OSError as error:
            if isinstance(error, FileNotFoundError):  # it was deleted
                return self._space.lose(place.segment)
            with self._lock:
                self._catalog.free(place)
            raise
        place.segment.dirty = True
        with self._lock:
            gone = self._pending[record.tag].gone or not self._catalog.has(place)
            old = None if gone else self._keep_entry(Entry(record, place))
        if gone:  # its block, or its file, was removed while it was written
            self._space.erase([place])
        elif old is not None:
            self._space.erase([old])
        return not gone

    def _keep_entry(self, entry: Entry) -> BlockPlace | None:
        """Add a block. Return the place of the one that it replaces, if that was ours: it had expired."""
        old = self._catalog.entries.get(entry.tag)
        if old is not None:
            self._catalog.remove(old)
        self._catalog.add(entry)
        self._figures.written += 1
        self._figures.written_bytes += entry.length
        if self._retry_at:
            self._retry_at = 0.0
            logger.info("the KV cache's directory %s can be written to again", self._directory.path)
        return old.place if old is not None and old.place.segment.own else None

    # ---- reading ----------------------------------------------------------------------------------------------

    def submit_read(self, name: BlockName, tenant: str, into: Sequence[Buffer]) -> Future[bool]:
        """Fill writable buffers with a block, which has as many bytes as they have. If the future says False, there is
        no such block, and what the buffers hold is undefined."""
        done, tag = Future[bool](), self.keys.tag(self._identity, tenant, name)
        length = sum(memoryview(part).nbytes for part in into)
        with self._lock:
            entry = self._catalog.entries.get(tag)
            there = entry is not None and not self._is_over(entry) and entry.length == length
            if entry is None or not there or self._reads >= MOST_READS:
                self._figures.missed += 1
                done.set_result(False)
                return done
            self._catalog.use(entry)
            self._reads += 1
        try:
            self._readers.submit(self._read, entry, into, done)
        except RuntimeError:  # closed meanwhile
            done.set_result(False)
        return done

    def _read(self, entry: Entry, into: Sequence[Buffer], done: Future[bool]) -> None:
        found, why, start = False, "", time.monotonic()
        try:
            found = self._is_read(entry, into)
            why = "" if found or self._is_replaced(entry) else "corrupt"
        except FileNotFoundError:
            pass
        except OSError as error:
            why = "failed"
            self._say("a block of the KV cache cannot be read (%s); it is computed again", error.strerror or error)
        with self._lock:
            self._reads -= 1
            figures = self._figures
            figures.read, figures.missed = figures.read + found, figures.missed + (not found)
            figures.read_bytes += entry.length if found else 0
            figures.read_seconds += time.monotonic() - start
            figures.corrupt, figures.failed = figures.corrupt + (why == "corrupt"), figures.failed + (why == "failed")
        if not found:
            self._space.discard([entry])
        if why == "corrupt":
            self._say("a block of the KV cache in %s is damaged; it is computed again", entry.place.segment.name)
        done.set_result(found)

    def _is_read(self, entry: Entry, into: Sequence[Buffer]) -> bool:
        """Fill the buffers, and return True if they hold the block that the entry stands for."""
        row = self.files.row(*entry.place)
        record = self.keys.unpacked(row)
        if record is None or record.tag != entry.tag or record.length != entry.length:
            return False
        return self.files.read(*entry.place, into) and self.keys.holds(row, into)

    def _is_replaced(self, entry: Entry) -> bool:
        """Return True if its slot is another block's by now, or empty: another process may have removed the block."""
        row = self.files.row(*entry.place)
        record = self.keys.unpacked(row)
        return row == EMPTY or (record is not None and record.tag != entry.tag)

    def _is_over(self, entry: Entry) -> bool:
        return 0 < entry.expires <= self._clock()

    def _say(self, text: str, about: object) -> None:
        """Say something of a kind that is said once."""
        if text not in self._said:
            self._said.add(text)
            logger.warning(text, about)

    # ---- removing ---------------------------------------------------------------------------------------------

    def remove(self, name: BlockName, tenant: str = "") -> None:
        """Erase a block."""
        tag = self.keys.tag(self._identity, tenant, name)
        with self._lock:
            if tag in self._pending:
                self._pending[tag].gone = True
            entry = self._catalog.entries.get(tag)
        self._space.discard([] if entry is None else [entry])

    def purge(self, tenant: str | None = None) -> int:
        """Erase all blocks of a tenant, or of every tenant (None), of whatever identity. Return how many there were,
        beside those that waited to be written."""
        owner = None if tenant is None else self.keys.tenant(tenant)
        with self._lock:
            for pending in self._pending.values():
                pending.gone = pending.gone or owner in (None, pending.tenant)
            found = [entry for entry in self._catalog.entries.values() if owner in (None, entry.tenant)]
        count = self._space.discard(found)
        self._directory.touch(PURGED)
        return count

    # ---- the directory ----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at the directory: adopt files whose process is gone, learn what others wrote, delete what has expired,
        and make room for others."""
        try:
            self._space.look(self._clock())
        except OSError as error:
            self._say("the KV cache's directory cannot be looked at (%s)", error)

    def _keep(self) -> None:
        while not self._closing.wait(self._options.period):
            self.tick()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything that was submitted is on the disk, even if power is lost then. Return False if that
        takes longer than `timeout` seconds; the kernel still writes what it has."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._idle:
            done = self._idle.wait_for(lambda: not self._pending, timeout)
        for segment in self._dirty() if done else ():
            if until is not None and time.monotonic() > until:
                return False
            self.files.sync(segment)
        return done

    def _dirty(self) -> list[TierSegment]:
        with self._lock:
            found = [segment for segment in self._catalog.own() if segment.dirty]
            for segment in found:
                segment.dirty = False
        return found

    def close(self, timeout: float | None = None) -> None:
        """Write what waits, for at most `timeout` seconds, and leave the blocks to other processes."""
        if self._closing.is_set():
            return
        self._closing.set()
        try:
            self.flush(timeout)
        except OSError as error:
            self._say("the KV cache cannot be flushed (%s)", error)
        waits = timeout is None or not self._pending
        self._writers.shutdown(wait=waits, cancel_futures=not waits)
        self._readers.shutdown(wait=waits, cancel_futures=not waits)
        if not waits:
            self._say("the disk of the KV cache is slow: %d blocks are not written", len(self._pending))
            return  # threads may still use the files; they end with the process
        if self._keeper.is_alive():
            self._keeper.join()
        self.files.close()
        self._owner.close()
        self._directory.close()

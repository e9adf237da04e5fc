"""The disk below the host's memory: what passes between `HostTier` and a store of blocks (`ridgeline.tiers`).

*Down.* A block goes to the host soon after it was written, not only when the device evicts it, and from there to the
disk as soon as the copy from the device has ended. So when the host evicts it, it is on the disk already, and a process
that is killed leaves nearly all that it computed.

    published in plan N     the earliest save is in plan N + 1, since N itself writes the block
    saved in plan M         M has run, and the worker says that its copies have ended (`HostTier.retire`)
    written                 the host's block is held until the store has it. No step waits for that

At most a share of the host's blocks is held for writes (`HELD_SHARE`). A block that the host evicts before its turn is
lost, and counted.

*Up.* A new request is looked up once, when it comes. If the disk has more of its prompt than device and host, and
reading that takes less predicted time than running the tokens, the request waits outside of the queue while blocks of
the host are filled. Then it is scheduled like any other one, and finds them there. It waits no longer than running the
tokens was predicted to take, or `LEAST_WAIT` if that is longer.

*Ahead.* The blocks of a session whose turn is expected are read in the same way, while no request waits for a read. A
request that comes meanwhile waits for what is on its way, as above.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Sequence as PySequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from math import inf
from os import urandom
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ridgeline.core.clock import Clock
from ridgeline.core.plan.worker import KeepsBelow
from ridgeline.engine.cache.checkpoints import Checkpoint
from ridgeline.engine.cache.disk_hits import DiskHit, DiskHits, Lacking
from ridgeline.engine.cache.prefix import Hash
from ridgeline.engine.sequence import Sequence
from ridgeline.tiers.options import DiskFigures
from ridgeline.tiers.sealed import BlockName, Buffer

if TYPE_CHECKING:
    from ridgeline.engine.cache.host_tier import BlockMove, HostTier

logger = logging.getLogger(__name__)

EAGER_BYTES = 8 << 20  # that a plan saves before the device evicts them
MOST_RIPE = 1 << 16  # blocks that wait for that
HELD_SHARE = 4  # a part of the host's memory may be held for writes, and two parts filled by reads
MOST_WRITES = 64 << 20  # bytes that the store is given at a time; more wait where they are
FIRST_RATE = 0.7e9  # bytes a second that the store reads, until it was measured (docs/kv-disk.md)
RECOVERS = 1.05  # by so much the rate rises with every read that it forbids, so that it is measured (again)
LEAST_WAIT = 0.5  # seconds that a request waits at least for a read that takes longer than was predicted


class BlockStore(Protocol):
    """The methods of `tiers.disk.DiskTier` that are used here."""

    def contains(self, name: BlockName, tenant: str = "") -> bool: ...
    def submit_write(
        self, name: BlockName, tenant: str, parts: PySequence[Buffer], expires: float = 0.0, cost: float = 0.0
    ) -> Future[bool]: ...
    def submit_read(self, name: BlockName, tenant: str, into: PySequence[Buffer]) -> Future[bool]: ...
    def remove(self, name: BlockName, tenant: str = "") -> None: ...
    def figures(self) -> DiskFigures: ...
    def close(self, timeout: float | None = None) -> None: ...


@dataclass
class DiskCounts:
    """queried, hit: prompt tokens that were looked for on the disk, and those that were read. forgone: tokens that it
    has and whose reading was predicted to take longer than running them. late: requests that ran their tokens since a
    read took too long. unwritten: blocks that the host's memory gave up before they were written. ahead: tokens that
    were read before the request came that would go on with them."""

    queried: int = 0
    hit: int = 0
    forgone: int = 0
    late: int = 0
    unwritten: int = 0
    ahead: int = 0


class Write(NamedTuple):
    """A block of the host on its way to the disk."""

    done: Future[bool]
    group: int
    below: int


class Read(NamedTuple):
    """A block on its way from the disk, and the host's block that it fills."""

    done: Future[bool]
    lacking: Lacking
    below: int


class Fetch:
    """The blocks that are read for a request. waits: it has not gone on without them. until: when it does. asked: it
    is here; else the blocks are read ahead.

    held: blocks of its beginning in the host's memory, which must not go meanwhile.
    """

    def __init__(self, seq: Sequence, tokens: int, until: float, *, waits: bool = True) -> None:
        self.seq, self.tokens, self.until = seq, tokens, until
        self.waits, self.whole, self.asked = waits, True, waits
        self.reads: deque[Read] = deque()
        self.held: list[tuple[int, int]] = []
        self.checkpoints: dict[Hash, Checkpoint] = {}


class DiskBelow:
    """The blocks on their way between the host's memory and a store."""

    def __init__(self, tier: HostTier, hits: DiskHits, store: BlockStore, memory: KeepsBelow, clock: Clock) -> None:
        self.counts = DiskCounts()
        self.store, self._tier, self._hits, self._memory, self._clock = store, tier, hits, memory, clock
        self._index, self._sizes = hits.index, tier.layout.block_bytes
        self._most = min(MOST_WRITES, tier.layout.num_bytes // HELD_SHARE)
        self._fresh: dict[tuple[Hash, int], None] = {}  # published since the newest plan was made
        self._ripe: deque[tuple[Hash, int]] = deque()  # published before
        self._dirty: OrderedDict[tuple[int, int], Hash] = OrderedDict()  # the host's blocks that are not written yet
        self._writing: deque[Write] = deque()
        self._queued = 0  # bytes of those
        self._fetches: list[Fetch] = []
        self._reading = 0  # bytes
        self._rate, self._since, self._read = FIRST_RATE, 0.0, 0  # bytes read since then
        self._fastest = inf  # the highest rate that is known to be possible; before the first read any is
        self._said = False
        tier.on_evict = self._evicted
        hits.disk_has = self._has

    # ---- asking -----------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, float]:
        """Return the counts, and those of the store."""
        found = {**asdict(self.counts), **vars(self.store.figures())}
        return {f"disk_{name}": float(count) for name, count in found.items()}

    def expect(self, rate: float) -> None:
        """Take so many bytes a second as the rate of reads, until some are measured."""
        self._rate, self._fastest = rate, max(FIRST_RATE, rate)

    @property
    def busy(self) -> bool:
        """Return True if blocks wait to be saved or written, or are on their way."""
        return bool(self._fresh or self._ripe or self._dirty or self._writing or self._fetches)

    @property
    def held(self) -> int:
        """Blocks that are being written or read."""
        return len(self._writing) + sum(len(fetch.reads) for fetch in self._fetches)

    @property
    def readers(self) -> list[Sequence]:
        """The requests that wait for reads."""
        return [fetch.seq for fetch in self.waiting]

    @property
    def waiting(self) -> list[Fetch]:
        """The reads that requests wait for."""
        return [fetch for fetch in self._fetches if fetch.waits]

    @property
    def next_write(self) -> Future[bool] | None:
        """The oldest write under way."""
        return self._writing[0].done if self._writing else None

    @property
    def awaited(self) -> bool:
        """Return True if requests wait for reads."""
        return any(fetch.waits for fetch in self._fetches)

    def _name(self, node_hash: Hash, group: int) -> BlockName:
        return BlockName(self._hits.generation + node_hash, group)

    def _has(self, node_hash: Hash, group: int, salt: str) -> bool:
        return self.store.contains(self._name(node_hash, group), salt)

    # ---- down -------------------------------------------------------------------------------------------------

    def note(self, node_hash: Hash, groups: PySequence[int], salt: str) -> None:
        """A full block was published on the device, of a prompt with this salt."""
        node = self._index.get(node_hash)
        assert node is not None
        node.salt = salt
        for group in groups:
            self._fresh[node_hash, group] = None

    def ripen(self, budget: float) -> None:
        """Let a plan save blocks that earlier plans wrote: at least one, and as many as `budget` bytes allow."""
        left = min(budget, EAGER_BYTES)
        while self._ripe:
            node_hash, group = self._ripe[0]
            if (node_hash, group) not in self._fresh:  # else this plan writes it anew
                if not self._tier.save_early(node_hash, group):
                    break
                left -= self._sizes[group]
            self._ripe.popleft()
            if left <= 0:
                break
        if self._fresh:
            self._ripe += self._fresh
            self._fresh.clear()
            while len(self._ripe) > MOST_RIPE:
                self._ripe.popleft()

    @property
    def has_ripe(self) -> bool:
        return bool(self._ripe or self._fresh)

    def arrived(self, saves: PySequence[BlockMove]) -> None:
        """Copies of blocks to the host's memory have ended."""
        for group, _, below in saves:
            node_hash = self._index.hash_below(group, below)
            node = None if node_hash is None else self._index.get(node_hash)
            if node_hash is not None and node is not None and node.salt is not None and self._sizes[group]:
                self._dirty[group, below] = node_hash

    def dropped(self, group: int, below: int) -> None:
        """A block below no longer holds what it held."""
        self._dirty.pop((group, below), None)

    def _evicted(self, node_hash: Hash, group: int, below: int) -> None:
        self.counts.unwritten += (group, below) in self._dirty

    def pump(self) -> None:
        """Take what the store has written, and give it more."""
        pool = self._tier.pool
        while self._writing and self._writing[0].done.done():
            _, group, below = self._writing.popleft()
            self._queued -= self._sizes[group]
            pool.release(group, below, 0)
        while self._dirty:
            (group, below), node_hash = next(iter(self._dirty.items()))
            if self._writing and self._queued + self._sizes[group] > self._most:
                return
            del self._dirty[group, below]
            node = self._index.get(node_hash)
            assert node is not None
            assert node.salt is not None
            pool.share(group, below)
            self._queued += self._sizes[group]
            done = self.store.submit_write(
                self._name(node_hash, group),
                node.salt,
                self._memory.octets(group, below),
                cost=self._tier.price.prompt(self._hits.block_size),
            )
            self._writing.append(Write(done, group, below))

    def remove(self, node_hashes: PySequence[Hash], salt: str) -> None:
        """Erase blocks: what they hold may be no numbers."""
        for node_hash in node_hashes:
            for group in range(len(self._sizes)):
                name = self._name(node_hash, group)
                self.store.remove(name, salt)

    def forget(self) -> None:
        """Find nothing that is on the disk now, until the process ends."""
        self._hits.generation = urandom(16)
        self._fresh.clear()
        self._ripe.clear()

    # ---- up ---------------------------------------------------------------------------------------------------

    def seconds_of(self, blocks: int) -> float:
        """Return the seconds in which so many blocks of each group would be read."""
        return blocks * sum(self._sizes) / self._rate

    def read_ahead(self, seq: Sequence) -> bool:
        """Read what the disk has of a sequence that stands for a session. Return False if other reads go first."""
        if self.awaited:
            return False
        hit = self._worth(seq, expected=True)
        if hit is not None:
            fetch = Fetch(seq, hit.end - hit.start, 0.0, waits=False)
            self._begin(fetch, seq, hit)
            if fetch.reads:
                self._fetches.append(fetch)
            else:
                self._let_go(fetch)
        return True

    def _join(self, seq: Sequence, ahead: Sequence | None) -> bool:
        """Let a request wait for what is read ahead for its session, if that is still under way."""
        for fetch in self._fetches if ahead is not None else ():
            if fetch.seq is ahead and not fetch.asked:
                milliseconds = self._tier.price.prompt(fetch.tokens)
                fetch.seq, fetch.waits, fetch.asked = seq, True, True
                fetch.until = self._clock() + max(LEAST_WAIT, milliseconds / 1e3)
                return True
        return False

    def fetch(self, seq: Sequence, ahead: Sequence | None = None) -> bool:
        """Read what the disk has of a new request, if that pays. Return True if the request waits for it. ahead: the
        sequence that stands for its session."""
        if self._join(seq, ahead):
            return True
        found = [(member, hit) for member in seq.members if (hit := self._worth(member)) is not None]
        if not found:
            return False
        milliseconds = sum(self._tier.price.prompt(hit.end - hit.start, hit.start) for _, hit in found)
        fetch = Fetch(
            seq, sum(hit.end - hit.start for _, hit in found), self._clock() + max(LEAST_WAIT, milliseconds / 1e3)
        )
        for member, hit in found:
            self._begin(fetch, member, hit)
        if not fetch.reads:
            self._let_go(fetch)
            return False
        self._fetches.append(fetch)
        return True

    def _worth(self, seq: Sequence, *, expected: bool = False) -> DiskHit | None:
        """Return the hit that should be read for a sequence, or None. expected: it has not come yet."""
        room = max(0, 2 * self._tier.layout.num_bytes // HELD_SHARE - self._reading)
        hit = self._hits.find(seq, min(room, self._tier.free_bytes))
        if hit is None:
            return None
        self.counts.queried += 0 if expected else hit.asked
        if not hit.lacking:
            return None
        num_bytes = sum(self._sizes[each.group] for each in hit.lacking)
        seconds = (self._reading + num_bytes) / self._rate + self._tier.load_seconds(num_bytes)
        if 1e3 * seconds < self._tier.price.prompt(hit.end - hit.start, hit.start):
            return hit
        self.counts.forgone += 0 if expected else hit.end - hit.start
        self._rate = max(self._rate, min(self._fastest, self._rate * RECOVERS))
        return None

    def _begin(self, fetch: Fetch, seq: Sequence, hit: DiskHit) -> None:
        pool, salt = self._tier.pool, seq.request.salt_owner
        if not self._reading:
            self._since, self._read = self._clock(), 0
        for group, below in hit.held:
            pool.share(group, below)
            fetch.held.append((group, below))
        for lacking in hit.lacking:
            taken = self._tier.reserve(lacking.group)
            if taken is None:
                fetch.whole = False
                return
            octets = self._memory.octets(lacking.group, taken)
            done = self.store.submit_read(self._name(lacking.node_hash, lacking.group), salt, octets)
            fetch.reads.append(Read(done, lacking, taken))
            self._reading += self._sizes[lacking.group]

    def arrivals(self) -> list[Sequence]:
        """Take the blocks that were read. Return the requests that wait no longer."""
        ready, now = list[Sequence](), self._clock()
        for fetch in list(self._fetches):
            while fetch.reads and fetch.reads[0].done.done():
                self._take(fetch, fetch.reads.popleft())
            if not fetch.reads:
                self._fetches.remove(fetch)
                self._let_go(fetch)
                self.counts.hit += fetch.tokens if fetch.whole and fetch.asked else 0
                self.counts.ahead += fetch.tokens if fetch.whole and not fetch.asked else 0
            elif not fetch.waits or now < fetch.until:
                continue
            else:
                self._is_late()
            if fetch.waits:
                fetch.waits = False
                ready.append(fetch.seq)
        return ready

    def _take(self, fetch: Fetch, read: Read) -> None:
        """Make a block that was read matchable, if it was there and nothing was forgotten meanwhile."""
        node_hash, parent, group, end, generation = read.lacking
        size = self._sizes[group]
        self._reading, self._read = self._reading - size, self._read + size
        if not read.done.result() or generation != self._hits.generation:
            fetch.whole = False
            self._tier.pool.release(group, read.below, 0)
            return
        checkpoint = None
        if group in self._tier.exact:
            checkpoint = fetch.checkpoints.setdefault(node_hash, Checkpoint(end, None))
        self._tier.fill(node_hash, parent, group, read.below, checkpoint)
        if (node := self._index.get(node_hash)) is not None:
            node.salt = fetch.seq.request.salt_owner
        if not self._reading and (seconds := self._clock() - self._since) > 0:
            rate = self._read / seconds
            self._fastest = max(FIRST_RATE if self._fastest == inf else self._fastest, rate)
            self._rate = (self._rate + rate) / 2

    def _let_go(self, fetch: Fetch) -> None:
        for group, below in fetch.held:
            self._tier.pool.release(group, below, 0)
        fetch.held = []

    def _is_late(self) -> None:
        self.counts.late += 1
        if not self._said:
            self._said = True
            logger.warning("the disk of the KV cache is slow: prompts are computed that it was still being read for")

    def leave(self, seq: Sequence) -> bool:
        """A request has ended. Return True if it waited here."""
        for fetch in self._fetches:
            if fetch.seq is seq and fetch.waits:
                fetch.waits = False
                return True
        return False

    # ---- waiting ----------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Wait for the next read, at most so long."""
        wait([fetch.reads[0].done for fetch in self._fetches if fetch.reads and fetch.waits], seconds)

    def wait_for_writes(self, seconds: float) -> None:
        """Wait for the next block that is being written, at most so long."""
        if self._writing:
            wait([self._writing[0].done], seconds)

    def close(self, seconds: float) -> None:
        """Write what is in the host's memory, for at most so many seconds, and close the store."""
        until = monotonic() + seconds
        self.pump()
        while self._writing and (left := until - monotonic()) > 0:
            self.wait_for_writes(left)
            self.pump()
        self.store.close(max(0.0, until - monotonic()))

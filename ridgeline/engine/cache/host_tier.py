"""The host's memory as a second tier of the cache: blocks that the device's pool evicts are saved there, and are loaded
again where that is faster than computing them.

It is a second `BlockPool`, over a `HostLayout`. The nodes of the one prefix index know their blocks in both. A block
that was loaded stays below as well, so its next eviction moves nothing.

*When what moves.* Plans run one after the other on the compute stream, and blocks travel on one side stream, in the
order of the plans. Plan N is made while earlier plans are in flight:

    evicted while N is made    Only plans from N on write to the block, and all its writers before N are queued before
                               N. So N saves it before it changes anything, whatever is in flight.
    host block of a save       It can be found at once. A load of it is in N or later, and the side stream has the save
                               first. A later save to the same block, after its eviction, comes behind that load too.
    device block of a load     Rows of earlier plans may still read what it held. So the side stream waits until the
                               compute stream has come to N, and has gathered N's saves, of which it may be one.
    rows that read it          Those of N + 1 and later: each plan first waits for the loads of the plan before it. They
                               were chosen to take no longer than that plan's rows. Rows of N only if N says `awaited`.
    given back before that     A sequence that leaves may give the block of a load in N to another one, whose rows come
                               in N + 1 or later, behind the wait.

So a sequence is planned once its last load is in an earlier plan (`is_there`). Until then the queue holds the device's
block and the host's. The host's block is held on until its plan has retired, since a reader other than these streams
must not find it half written or overwritten.

*What fails.* A plan that failed, and all dropped after it, moved nothing for certain: what they should have saved
leaves the index, and so do the device's blocks that they should have filled (`undo`).

*Copies that take longer.* A plan's copies may end after its result has come. So blocks of a plan are let go once the
worker says that its copies have ended (`memory`), and only then may others read or write them.

The tier below this one is in `disk.py`. `on_evict` tells of a block that is about to leave the host's memory, and
`reserve` and `fill` take in a block that came from below.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as PySequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

from ridgeline.core.plan.step import MoveBlocks, Moves
from ridgeline.core.plan.worker import KeepsBelow
from ridgeline.core.settings.host_tier import HostTierSettings
from ridgeline.core.specs.cache_layout import NULL_BLOCK, CacheLayout
from ridgeline.core.specs.host_layout import HostLayout
from ridgeline.engine.cache.checkpoints import Checkpoint, Checkpoints
from ridgeline.engine.cache.disk import DiskBelow
from ridgeline.engine.cache.hits import BELOW, Hit
from ridgeline.engine.cache.pool import BlockPool
from ridgeline.engine.cache.prefix import HASH_BYTES, Hash, Node, PrefixIndex
from ridgeline.engine.price import Price
from ridgeline.engine.sequence import Rising, Sequence


class BlockMove(NamedTuple):
    """A block of a group on the device, and its block below."""

    group: int
    block: int
    below: int


class BlockLoad(NamedTuple):
    """A move to the device. number: counts loads up. node_hash: under which the device's block was published, or
    None."""

    number: int
    move: BlockMove
    node_hash: Hash | None


class UnderWay(NamedTuple):
    """The moves of a plan that has not retired. num_bytes: of its saves."""

    plan: int
    saves: list[BlockMove]
    loads: list[BlockLoad]
    num_bytes: int


@dataclass
class TierCounts:
    """Counts of the host tier.

    queried, hit: tokens that were looked for below, and found.
    saved, loaded: bytes. saved_blocks, loaded_blocks: their blocks.
    lost: evicted blocks that were not saved, for want of staging memory or of host blocks.
    evicted: blocks that left the host's memory.
    """

    queried: int = 0
    hit: int = 0
    saved: int = 0
    loaded: int = 0
    saved_blocks: int = 0
    loaded_blocks: int = 0
    lost: int = 0
    evicted: int = 0


@dataclass
class DeviceParts:
    """The parts of the cache on the device that loads need. publish: make a full block of a sequence matchable, by its
    column, group and id. forget: withdraw a block."""

    pool: BlockPool
    publish: Callable[[Sequence, int, int, int], bool]
    forget: Callable[[int, int], None]


class HostTier:
    """The blocks in the host's memory, and all moves to and from it.

    on_evict: called with a block's hash, group and id before its content is evicted. saved: once it is published here.
    memory: the worker, if its copies may be asked about. disk: the tier below, if there is one.

    issued: the number of the newest load that a plan carries.
    """

    def __init__(
        self,
        settings: HostTierSettings,
        layout: CacheLayout,
        index: PrefixIndex,
        checkpoints: Checkpoints,
        price: Price,
    ) -> None:
        self.layout = HostLayout(layout, settings.pages)
        self.pool = BlockPool(self.layout, self._give_up, partial(checkpoints.page_worth, below=True))
        self.device: DeviceParts
        self.counts = TierCounts()
        self.on_evict: Callable[[Hash, int, int], None] = lambda node_hash, group, block: None
        self.saved: Callable[[Hash, int, int], None] = lambda node_hash, group, block: None
        self.memory: KeepsBelow | None = None
        self.disk: DiskBelow | None = None
        self.issued = 0
        self._index, self._checkpoints, self.price = index, checkpoints, price
        self.exact, self.preempted = checkpoints.groups, settings.preempted
        self._per_millisecond = settings.bytes_per_second / 1e3
        sizes = self.layout.block_bytes
        self._staging = max(settings.staging_bytes, *sizes)
        self._staged = 0  # bytes of saves that have not retired
        self._saves: list[BlockMove] = []  # for the next plan
        self._added = 0
        self._queue: deque[BlockLoad] = deque()
        self._queued = 0  # bytes
        self._arriving: dict[tuple[int, int], int] = {}  # the device's blocks in the queue → their numbers
        self._under_way: deque[UnderWay] = deque()
        self._last: dict[str, float] | None = None

    def figures(self) -> dict[str, float]:
        """Return the counts, the bytes there are (`size`), and those of them that hold blocks (`used`)."""
        if self._last is not None:
            return self._last
        page, pages = self.layout.of.page_bytes, self.pool.num_pages
        found = {**asdict(self.counts), "size": pages * page, "used": (pages - self.pool.fresh_pages) * page}
        if self.memory is not None:
            found["save_seconds"], found["load_seconds"] = self.memory.move_seconds()
        return found if self.disk is None else {**found, **self.disk.figures()}

    def leave(self) -> None:
        """The memory and the disk are about to go: their last figures stay."""
        self._last = self.figures()

    @property
    def free_bytes(self) -> int:
        """Bytes of the pages that could be taken now."""
        return self.pool.free_pages * self.layout.of.page_bytes

    def load_seconds(self, num_bytes: int) -> float:
        """Return the seconds of so many bytes to the device, behind those that are queued."""
        return self.travel_seconds(self._queued + num_bytes)

    def travel_seconds(self, num_bytes: float) -> float:
        """Return the seconds of so many bytes to the device, if nothing else is on its way."""
        return num_bytes / self._per_millisecond / 1e3

    # ---- saving -----------------------------------------------------------------------------------------------

    def save(self, node_hash: Hash, group: int, block: int) -> bool:
        """Keep a block that the device's pool is about to evict. False if it cannot be kept."""
        node = self._index.get(node_hash)
        assert node is not None
        below = node.below[group]
        if below is not None:
            self.pool.share(group, below)  # it was used lately
            self.pool.release(group, below, 0)
            return True
        size = self.layout.block_bytes[group]
        if len(node_hash) > HASH_BYTES or self._staged + size > self._staging:
            self.counts.lost += len(node_hash) == HASH_BYTES
            return False
        if not self._save(node_hash, node.parent, group, block):
            self.counts.lost += 1
            return False
        return True

    def save_early(self, node_hash: Hash, group: int) -> bool:
        """Keep a block that the device has, if it has it still and plans before the next one wrote it. False if there
        is no room for that now."""
        node = self._index.get(node_hash)
        block = None if node is None or node.below[group] is not None else node.blocks[group]
        if node is None or block is None or (group, block) in self._arriving:
            return True
        if self._staged + self.layout.block_bytes[group] > self._staging // 2:
            return False
        return self._save(node_hash, node.parent, group, block)

    def _save(self, node_hash: Hash, parent: Hash, group: int, block: int) -> bool:
        """Let the next plan save a block. False if all of the host's blocks are held."""
        taken, size = self.reserve(group), self.layout.block_bytes[group]
        if taken is None:
            return False
        self._staged += size
        self._saves.append(BlockMove(group, block, taken))
        self.counts.saved += size
        self.counts.saved_blocks += 1
        self._publish(node_hash, parent, group, taken)
        if (checkpoint := self._checkpoints.at(group, block)) is not None:
            self._checkpoints.sink(group, taken, checkpoint)
        return True

    def reserve(self, group: int) -> int | None:
        """Return a host block to write to, held; None if all are held."""
        taken = self.pool.take([int(g == group) for g in range(len(self.layout.groups))])
        return None if taken is None else taken[group][0]

    def fill(self, node_hash: Hash, parent: Hash, group: int, block: int, checkpoint: Checkpoint | None = None) -> None:
        """Publish a block from `reserve` that was filled from a tier below, and hold it no longer. Nothing else has
        what it holds, or it is given back. checkpoint: that it holds, if it is a state."""
        node = self._index.get(node_hash)
        if node is None or node.below[group] is None:
            self._publish(node_hash, parent, group, block)
            if checkpoint is not None:
                self._checkpoints.sink(group, block, self._checkpoint_of(node_hash) or checkpoint)
        self.pool.release(group, block, 0)

    def _checkpoint_of(self, node_hash: Hash) -> Checkpoint | None:
        """Return the checkpoint that the node's blocks on the device or here hold."""
        node = self._index.get(node_hash)
        for g in self.exact if node is not None else ():
            assert node is not None
            for block, found in ((node.blocks[g], self._checkpoints.at), (node.below[g], self._checkpoints.below)):
                if block is not None and (checkpoint := found(g, block)) is not None:
                    return checkpoint
        return None

    def _publish(self, node_hash: Hash, parent: Hash, group: int, block: int) -> None:
        self._index.save(node_hash, parent, group, block)
        self.pool.mark_cached(group, block)
        self.saved(node_hash, group, block)

    def _give_up(self, group: int, blocks: PySequence[int]) -> None:
        """The host's pool evicts blocks."""
        for block in blocks:
            self._give_up_block(group, block)

    def _give_up_block(self, group: int, block: int) -> None:
        """Evict a block below. Where keys and values are gone, no request can begin at the state behind them."""
        node_hash = self._index.hash_below(group, block)
        assert node_hash is not None
        self.counts.evicted += 1
        self.on_evict(node_hash, group, block)
        node = self._index.get(node_hash)
        self._drop(group, block)
        if node is None or group in self.exact or node.blocks[group] is not None:
            return
        for g in self.exact:
            if (state := node.below[g]) is not None and not self.pool.refs(g, state):
                self.forget(g, state)

    def forget(self, group: int, block: int) -> None:
        """Withdraw a block below."""
        self._drop(group, block)
        self.pool.forget(group, block)

    def forget_all_of(self, node: Node) -> None:
        """Withdraw all blocks below of a node."""
        for group, block in enumerate(node.below):
            if block is not None:
                self.forget(group, block)

    def _drop(self, group: int, block: int) -> None:
        if self.disk is not None:
            self.disk.dropped(group, block)
        node = self._index.get(self._index.hash_below(group, block) or b"")
        self._index.drop_below(group, block)
        self._checkpoints.drop_below(group, block, gone=node is None or node.blocks[group] is None)

    # ---- loading ----------------------------------------------------------------------------------------------

    def pays(self, seq: Sequence, num_bytes: int, start: int, end: int) -> bool:
        """Return True if so many bytes are loaded in less time than the sequence's tokens from `start` to `end` would
        take, or if it was preempted and is to get them in any case."""
        if seq.preemptions and self.preempted == "swap":
            return True
        milliseconds = (self._queued + num_bytes) / self._per_millisecond
        return milliseconds < self.price.prompt(end - start, start)

    def hold(self, seq: Sequence, hit: Hit) -> None:
        """Hold the host's blocks of a hit that the sequence has just taken, and note which of the device's are on their
        way."""
        for g, blocks in enumerate(seq.blocks):
            for n in [n for n, block in enumerate(blocks) if block == BELOW] if BELOW in blocks else ():
                node = self._index.get(seq.hashes[n])
                assert node is not None
                self._rise(seq, g, n, node.below[g], seq.hashes[n])
                blocks[n] = NULL_BLOCK
        if hit.end is not None:
            for g, block in enumerate(hit.end.blocks):
                if block is None:
                    self._rise(seq, g, hit.blocks, hit.end.below[g], None)
        seq.loads = 0
        if self._arriving:
            places = [(g, block) for g, blocks in enumerate(seq.blocks) for block in blocks]
            places += list(enumerate(seq.source))
            seq.loads = max((self._arriving.get(place, 0) for place in places), default=0)

    def _rise(self, seq: Sequence, group: int, column: int, below: int | None, node_hash: Hash | None) -> None:
        assert below is not None
        self.pool.share(group, below)
        seq.rising.append(Rising(group, column, below, node_hash))

    def let_go(self, seq: Sequence) -> None:
        """Hold nothing below for a sequence that is not admitted."""
        for rising in seq.rising:
            self.pool.release(rising.group, rising.below, 0)
        seq.rising = []

    def load(self, seq: Sequence) -> None:
        """Give a sequence that is admitted blocks for what it has below, and queue their loads."""
        wanted = [0] * len(self.layout.groups)
        for rising in seq.rising:
            wanted[rising.group] += rising.node_hash is not None
        taken = self.device.pool.take(wanted)
        assert taken is not None
        for group, column, below, node_hash in seq.rising:
            published = False
            if node_hash is None:
                block = seq.blocks[group][column]
            else:
                block = seq.blocks[group][column] = taken[group].pop(0)
                published = self.device.publish(seq, column, group, block)
            if published:
                self._checkpoints.rise(group, below, block)
            self.device.pool.share(group, block)
            self._added += 1
            self._arriving[group, block] = self._added
            move = BlockMove(group, block, below)
            self._queue.append(BlockLoad(self._added, move, node_hash if published else None))
            self._queued += self.layout.block_bytes[group]
        seq.loads = max(seq.loads, self._added)
        seq.rising = []

    def waits_for(self, seq: Sequence) -> int:
        """Return the number of a sequence's blocks that are still to be loaded."""
        return sum((g, block) in self._arriving for g, blocks in enumerate(seq.blocks) for block in blocks)

    def is_there(self, seq: Sequence) -> bool:
        """Return True if a plan from now on may run the request: earlier ones carry its last load."""
        for member in seq.members:
            if member.loads > self.issued:
                return False
            member.loads = 0
        return True

    # ---- plans ------------------------------------------------------------------------------------------------

    def moves(self, plan: int, milliseconds: Callable[[], float], through: int) -> Moves | None:
        """Return the moves of a plan, or None. milliseconds: for how long it is predicted to run. through: its own rows
        need the loads up to this number; 0: they need none."""
        early = self.disk is not None and self.disk.has_ripe
        if not self._saves and not self._queue and not early:
            return None
        loads, spent = list[BlockLoad](), 0.0
        budget = milliseconds() * self._per_millisecond if self._queue or early else 0.0
        if early:
            assert self.disk is not None
            self.disk.ripen(budget)
        while self._queue and (not loads or self._queue[0].number <= through):
            spent += self._take_load(loads)
        while self._queue and spent + self.layout.block_bytes[self._queue[0].move.group] <= budget:
            spent += self._take_load(loads)
        saves, self._saves = self._saves, []
        if not saves and not loads:
            return None
        sizes = self.layout.block_bytes
        self._under_way.append(UnderWay(plan, saves, loads, sum(sizes[move.group] for move in saves)))
        return Moves(self._by_group(saves), self._by_group([load.move for load in loads]), through > 0)

    def _take_load(self, loads: list[BlockLoad]) -> int:
        load = self._queue.popleft()
        loads.append(load)
        group, block, _ = load.move
        size = self.layout.block_bytes[group]
        self.issued, self._queued = load.number, self._queued - size
        self.counts.loaded += size
        self.counts.loaded_blocks += 1
        del self._arriving[group, block]
        self.device.pool.release(group, block, 0)
        return size

    def prune(self) -> None:
        """A sequence has left: load nothing that no other one waits for."""
        queued, self._queue = self._queue, deque()
        for load in queued:
            if self.device.pool.refs(*load.move[:2]) > 1:
                self._queue.append(load)
            else:
                self._unqueue(load)

    def _unqueue(self, load: BlockLoad) -> None:
        group, block, below = load.move
        self._withdraw(load)
        del self._arriving[group, block]
        self._queued -= self.layout.block_bytes[group]
        self.device.pool.release(group, block, 0)
        self.pool.release(group, below, 0)

    def _withdraw(self, load: BlockLoad) -> None:
        """The device's block does not get what it was published for."""
        group, block, _ = load.move
        if load.node_hash is not None and self._index.hash_of(group, block) == load.node_hash:
            self.device.forget(group, block)

    def _by_group(self, moves: list[BlockMove]) -> tuple[MoveBlocks, ...]:
        found = []
        for g in range(len(self.layout.groups)):
            own = [move for move in moves if move.group == g]
            if own:
                found.append(MoveBlocks(g, tuple(m.block for m in own), tuple(m.below for m in own)))
        return tuple(found)

    def retire(self, plan: int) -> None:
        """Plans up to this one have run. Blocks are let go whose copies have ended."""
        if self._under_way and self.memory is not None:
            plan = min(plan, self.memory.settled())
        while self._under_way and self._under_way[0].plan <= plan:
            done = self._under_way.popleft()
            self._staged -= done.num_bytes
            for move in [*done.saves, *(load.move for load in done.loads)]:
                self.pool.release(move.group, move.below, done.plan)
            if self.disk is not None:
                self.disk.arrived(done.saves)
        if self.disk is not None:
            self.disk.pump()

    @property
    def is_busy(self) -> bool:
        """Return True if blocks are on their way here, or from here to the disk."""
        return bool(self._under_way or self._saves) or (self.disk is not None and self.disk.busy)

    def undo(self) -> None:
        """Plans failed, and none is in flight: take back what those that have not retired should have moved, and all
        that is queued."""
        if self.memory is not None and self._under_way:
            self.memory.end_moves()
        for failed in self._under_way:
            self._staged -= failed.num_bytes
            for move in failed.saves:
                self._forget_save(move)
            for load in failed.loads:
                self._withdraw(load)
                self.pool.release(load.move.group, load.move.below, 0)
        self._under_way.clear()
        for load in self._queue:
            self._unqueue(load)
        self._queue.clear()
        self.issued = self._added

    def leave_device(self) -> None:
        """The device's memory goes, and no plan is in flight."""
        self.undo()
        for move in self._saves:
            self._forget_save(move)
            self._staged -= self.layout.block_bytes[move.group]
        self._saves = []

    def _forget_save(self, move: BlockMove) -> None:
        if self._index.hash_below(move.group, move.below) is not None:
            self.forget(move.group, move.below)
        self.pool.release(move.group, move.below, 0)

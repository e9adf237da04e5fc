"""A disk below the host's memory on a virtual clock: a store of names whose reads and writes take their time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

from ridgeline.core.clock import Clock
from ridgeline.core.plan.step import Moves, StepResult
from ridgeline.simulation.device import Device
from ridgeline.tiers.options import DiskFigures
from ridgeline.tiers.sealed import BlockName, Buffer

Key = tuple[str, BlockName]


class TimedResult(Future[bool]):
    """The outcome of a read or a write, which is there from the moment `at` on."""

    def __init__(self, clock: Clock, at: float, found: bool) -> None:
        super().__init__()
        self._now, self.at = clock, at
        self.set_result(found)

    def done(self) -> bool:
        return self._now() >= self.at


class SimulatedDisk:
    """Blocks by name, the least lately used of which go first. It outlives the engine of its replica.

    rate: bytes a second, of reads and writes alike, which wait in two queues, as a store's threads do.
    """

    def __init__(self, clock: Clock, capacity_bytes: int, rate: float) -> None:
        self._clock, self._capacity, self.rate = clock, capacity_bytes, rate
        self._stored: OrderedDict[Key, tuple[int, float]] = OrderedDict()  # with bytes, and when it is written
        self._bytes = 0
        self._reads_until = self._writes_until = 0.0

    def contains(self, name: BlockName, tenant: str = "") -> bool:
        found = self._stored.get((tenant, name))
        return found is not None and found[1] <= self._clock()

    def submit_write(
        self, name: BlockName, tenant: str, parts: Sequence[Buffer], expires: float = 0.0, cost: float = 0.0
    ) -> Future[bool]:
        size, key = sum(memoryview(part).nbytes for part in parts), (tenant, name)
        if key in self._stored:
            self._stored.move_to_end(key)
            return TimedResult(self._clock, self._stored[key][1], found=True)
        self._writes_until = max(self._writes_until, self._clock()) + size / self.rate
        self._stored[key] = size, self._writes_until
        self._bytes += size
        while self._bytes > self._capacity:
            _, (gone, _) = self._stored.popitem(last=False)
            self._bytes -= gone
        return TimedResult(self._clock, self._writes_until, found=True)

    def submit_read(self, name: BlockName, tenant: str, into: Sequence[Buffer]) -> Future[bool]:
        found = self.contains(name, tenant)
        if found:
            self._stored.move_to_end((tenant, name))
            size = sum(memoryview(part).nbytes for part in into)
            self._reads_until = max(self._reads_until, self._clock()) + size / self.rate
        return TimedResult(self._clock, self._reads_until, found)

    def remove(self, name: BlockName, tenant: str = "") -> None:
        if (found := self._stored.pop((tenant, name), None)) is not None:
            self._bytes -= found[0]

    def figures(self) -> DiskFigures:
        return DiskFigures(blocks=len(self._stored), bytes=self._bytes, capacity_bytes=self._capacity)

    def close(self, timeout: float | None = None) -> None: ...


class DeviceAboveDisk(Device):
    """A device whose blocks in the host's memory go to a disk. They hold nothing: zeros stand for all of them."""

    def hold(self, block_bytes: Sequence[int]) -> None:
        """Take the bytes of a block of each group."""
        self._nothing = [memoryview(bytearray(size)) for size in block_bytes]
        self._collected = 0

    def collect(self) -> StepResult:
        found = super().collect()
        self._collected = found.plan_id
        return found

    def octets(self, group: int, block: int) -> list[memoryview]:
        return [self._nothing[group]]

    def settled(self) -> int:
        return self._collected

    def end_moves(self) -> None: ...

    def move(self, plan: int, moves: Moves) -> None:
        assert self._bus is not None
        self._bus.begin(moves, self._clock())

    def move_seconds(self) -> tuple[float, float]:
        return 0.0, 0.0

"""A store of blocks under a scheduler's control: it reads and writes as late as may be, and holds to the rule that the
host's blocks stay as they are meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from ridgeline.core.plan.step import Moves, StepPlan
from ridgeline.tiers.options import DiskFigures
from ridgeline.tiers.sealed import BlockName
from tests.engine.ideal_host import ON_ITS_WAY, Block, IdealHost

Place = tuple[int, int]
Key = tuple[str, BlockName]


class HostOctets:
    """The host's memory as a store sees it. Copies of plans may end long after their results: not before `settled`."""

    def __init__(self, host: Callable[[], IdealHost]) -> None:
        self._host = host
        self.newest = self.ended = 0
        self.slow = False
        self._moved: dict[Place, int] = {}  # the newest plan that moves a block

    def note(self, plan: StepPlan) -> None:
        self.newest = plan.id
        if not self.slow:
            self.ended = plan.id
        for _, _, below in (*plan.moves.saves, *plan.moves.loads) if plan.moves else ():
            group = next(g for g, _, places in (*plan.moves.saves, *plan.moves.loads) if places is below)
            self._moved.update(((group, place), plan.id) for place in below)

    def octets(self, group: int, block: int) -> list[Place]:
        assert self._moved.get((group, block), 0) <= self.ended, "a block whose copy has not ended"
        return [(group, block)]

    def settled(self) -> int:
        return self.ended

    def end_moves(self) -> None:
        self.ended = self.newest

    def move(self, plan: int, moves: Moves) -> None:
        raise AssertionError("moves without a plan")

    def move_seconds(self) -> tuple[float, float]:
        return 0.0, 0.0

    @property
    def blocks(self) -> dict[Place, Block]:
        return self._host().blocks

    def own(self, place: Place) -> None:
        self._host()._own(*place)


class Order(NamedTuple):
    """A write with what it found, or a read (None)."""

    key: Key
    place: Place
    done: Future[bool]
    seen: Block | None


class IdealDisk:
    """full: nothing more is written. prompt: all is done at once. known: all that was ever stored and not removed,
    which other engines of the model may write again."""

    def __init__(self) -> None:
        self.memory: HostOctets
        self.stored: dict[Key, Block] = {}
        self.known: dict[Key, Block] = {}
        self.full = self.prompt = False
        self.orders: deque[Order] = deque()

    def contains(self, name: BlockName, tenant: str = "") -> bool:
        return (tenant, name) in self.stored

    def submit_write(
        self, name: BlockName, tenant: str, parts: Sequence[Place], expires: float = 0.0, cost: float = 0.0
    ) -> Future[bool]:
        assert cost > 0
        [place] = parts
        return self._order((tenant, name), place, list(self.memory.blocks[place]))

    def submit_read(self, name: BlockName, tenant: str, into: Sequence[Place]) -> Future[bool]:
        [place] = into
        self.memory.own(place)
        self.memory.blocks[place] = [ON_ITS_WAY]
        return self._order((tenant, name), place, None)

    def _order(self, key: Key, place: Place, seen: Block | None) -> Future[bool]:
        self.orders.append(Order(key, place, Future(), seen))
        done = self.orders[-1].done
        if self.prompt:
            self.work()
        return done

    def work(self, most: int = 1 << 30) -> None:
        while self.orders and most:
            key, place, done, seen = self.orders.popleft()
            most -= 1
            if seen is None:
                assert self.memory.blocks[place] == [ON_ITS_WAY], "a block was written to while it was read"
                found = self.stored.get(key)
                if found is not None:
                    self.memory.blocks[place] = list(found)
                done.set_result(found is not None)
                continue
            assert self.memory.blocks[place] == seen, "a block was changed while it was written"
            if not self.full:
                self.stored[key] = self.known[key] = seen
            done.set_result(not self.full)

    def remove(self, name: BlockName, tenant: str = "") -> None:
        self.stored.pop((tenant, name), None)
        self.known.pop((tenant, name), None)
        for order in [order for order in self.orders if order.key == (tenant, name) and order.seen is not None]:
            self.orders.remove(order)
            order.done.set_result(False)

    def figures(self) -> DiskFigures:
        return DiskFigures(blocks=len(self.stored))

    def close(self, timeout: float | None = None) -> None:
        self.work()

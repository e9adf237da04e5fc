"""Requests that show one rule of the allocator each, and the ways to set it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ridgeline_bench.scripts.allocator.model import GIB, MIB, Held, Knobs


class Allocates(Protocol):
    """The model, or the allocator of torch."""

    def allocate(self, name: str, size: int, stream: int = 0) -> None: ...
    def use(self, name: str) -> None: ...
    def free(self, name: str) -> None: ...
    def synchronize(self) -> None: ...
    def give_back(self) -> None: ...
    def held(self) -> Held: ...


class Event(NamedTuple):
    """One call. what: "allocate", "use" (by another stream), "free", "synchronize" or "give_back"."""

    what: str
    name: str = ""
    size: int = 0
    stream: int = 0

    def of(self, allocator: Allocates) -> None:
        """Make the call."""
        if self.what == "allocate":
            allocator.allocate(self.name, self.size, self.stream)
        elif self.what in ("use", "free"):
            getattr(allocator, self.what)(self.name)
        else:
            getattr(allocator, self.what)()


class Scenario(NamedTuple):
    """Events in order. limit: bytes that the driver gives, 0 for all there are."""

    events: Sequence[Event]
    limit: int = 0


def taken(name: str, size: int, stream: int = 0) -> Event:
    return Event("allocate", name, size, stream)


def freed(name: str) -> Event:
    return Event("free", name)


SIZES = (1, 512, 513, 100_000, MIB, MIB + 1, 6 * MIB, 10 * MIB - 1, 10 * MIB, 33 * MIB + 1)


def _sizes() -> list[Event]:
    """Return every size alone, behind an allocator that holds nothing."""
    return [each for size in SIZES for each in (taken("x", size), freed("x"), Event("give_back"))]


def _splitting() -> list[Event]:
    """Five blocks out of one segment; freed out of order they join again."""
    names = [f"part {n}" for n in range(5)]
    order = (names[n] for n in (1, 3, 0, 4, 2))
    return [*(taken(name, 4 * MIB) for name in names), *map(freed, order), taken("whole", 20 * MIB), freed("whole")]


def _streams() -> list[Event]:
    """A block belongs to its stream; `record_stream` keeps it until another stream has ended with it."""
    size = 32 * MIB
    return [
        taken("first", size, 0), freed("first"),
        taken("other stream", size, 1), freed("other stream"),
        taken("same stream", size, 0), Event("use", "same stream"), freed("same stream"),
        taken("too early", size, 0), freed("too early"), Event("synchronize"),
        taken("one", size, 0), taken("two", size, 0), freed("one"), freed("two"),
    ]  # fmt: skip


def _growing() -> list[Event]:
    """A tensor that grows by a copy, as a cache that is concatenated does: no freed block is large enough."""
    events = [taken("0", 12 * MIB)]
    for n in range(1, 48):
        events += [taken(str(n), (12 + 8 * n) * MIB), freed(str(n - 1))]
    return [*events, freed("47")]


def _tenant() -> list[Event]:
    """A small block that stays takes a place in a large one."""
    return [taken("large", 256 * MIB), freed("large"), taken("tenant", 24 * MIB), taken("again", 256 * MIB),
            freed("again"), freed("tenant")]  # fmt: skip


def _mixed(steps: int = 400, most: int = 2 * GIB) -> list[Event]:
    """Sizes from 1 to 256 MiB, evenly spread by their logarithms, that live for random times: at most 2 GiB at once."""
    draw, live, events = random.Random(0), dict[str, int](), list[Event]()
    for step in range(steps):
        size = int(math.exp(draw.uniform(math.log(MIB), math.log(256 * MIB))))
        while live and sum(live.values()) + size > most:
            name = draw.choice(sorted(live))
            del live[name]
            events.append(freed(name))
        live[str(step)] = size
        events.append(taken(str(step), size))
    return [*events, *map(freed, live)]


def _limited() -> list[Event]:
    """Free segments of the wrong sizes fill the memory: they are given back when a request fits nowhere."""
    sizes = [(n, (40 + 2 * n) * MIB) for n in range(20)]
    events = [taken(str(n), size) for n, size in sizes] + [freed(str(n)) for n, _ in sizes]
    return [*events, taken("large", 600 * MIB), freed("large")]


SCENARIOS: Mapping[str, Scenario] = {
    "sizes": Scenario(_sizes()),
    "splitting": Scenario(_splitting()),
    "streams": Scenario(_streams()),
    "growing": Scenario(_growing()),
    "tenant": Scenario(_tenant()),
    "mixed": Scenario(_mixed()),
    "limited": Scenario(_limited(), limit=GIB + 256 * MIB),
}
NATIVE = "native"
ASYNC = "cudaMallocAsync"
SETTINGS: Mapping[str, Knobs] = {
    NATIVE: Knobs(),
    "max_split_size_mb:128": Knobs(max_split=128 * MIB),
    "roundup_power2_divisions:4": Knobs(divisions=4),
    "expandable_segments:True": Knobs(expandable=True),
}


class Walk(NamedTuple):
    """What an allocator held after each event. The peaks are over these."""

    held: Sequence[Held]

    @property
    def peak_allocated(self) -> int:
        return max(each.allocated for each in self.held)

    @property
    def peak_requested(self) -> int:
        return max(each.requested for each in self.held)

    @property
    def peak_reserved(self) -> int:
        return max(each.reserved for each in self.held)


def walk(allocator: Allocates, events: Sequence[Event]) -> Walk:
    """Return what an allocator holds after each event."""
    held = []
    for event in events:
        event.of(allocator)
        held.append(allocator.held())
    return Walk(held)

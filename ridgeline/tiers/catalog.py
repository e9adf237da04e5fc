"""The index in memory: the slot of each block, the free slots, and the order of eviction.

It does no input or output, and its callers hold a lock. A slot whose block was removed is not free before its owner
says so: its record has to be erased first, or is about to be overwritten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from ridgeline.tiers.eviction import Order, Rank, Ranking
from ridgeline.tiers.sealed import BlockRecord
from ridgeline.tiers.segment import TierSegment


class BlockPlace(NamedTuple):
    segment: TierSegment
    slot: int


class Entry:
    """A block that lies on the disk."""

    __slots__ = ("cost", "expires", "hits", "length", "place", "rank", "tag", "tenant")

    def __init__(self, record: BlockRecord, place: BlockPlace) -> None:
        self.tag, self.tenant, self.length = record.tag, record.tenant, record.length
        self.expires, self.cost, self.place = record.expires, record.cost, place
        self.hits = 0
        self.rank: Rank = 0.0, 0


class Catalog:
    """policy: the order of eviction (`eviction`). by_tenant: tenants have quotas, so each has an order of its own."""

    def __init__(self, policy: str, *, by_tenant: bool) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.segments: dict[str, TierSegment] = {}
        self.tenants = Counter[bytes]()  # bytes of each
        self.bytes = 0
        self._ranking, self._by_tenant = Ranking(policy), by_tenant
        self._slots: dict[TierSegment, dict[int, Entry]] = {}
        self._free: dict[int, list[BlockPlace]] = {}  # by the bytes of a slot, as are
        self._orders: dict[int, Order[Entry]] = {}
        self._tenants: dict[bytes, Order[Entry]] = {}
        self._ends: list[tuple[float, bytes]] = []

    # ---- segments ---------------------------------------------------------------------------------------------

    def add_segment(self, segment: TierSegment, found: Iterable[tuple[int, BlockRecord]] = ()) -> list[Entry]:
        """Add a segment with the records of its slots. Return the entries of its own blocks that others have already,
        whose slots are to be erased."""
        self.segments[segment.name], twice = segment, list[Entry]()
        held = self._slots.setdefault(segment, {})
        for slot, record in sorted(found, key=lambda pair: pair[1].written):
            entry = Entry(record, BlockPlace(segment, slot))
            other = self.entries.get(record.tag)
            if other is not None and segment.own and not other.place.segment.own:
                self.remove(other)
            elif other is not None:
                twice += [entry] * segment.own
                held[slot] = entry
                continue
            self.add(entry)
        if segment.own:
            self._orders.setdefault(segment.shape.slot_bytes, Order())
            free = self._free.setdefault(segment.shape.slot_bytes, [])
            free += (BlockPlace(segment, slot) for slot in reversed(range(segment.shape.slots)) if slot not in held)
        return twice

    def drop_segment(self, segment: TierSegment) -> int:
        """Forget a segment and its blocks. Return how many these were."""
        del self.segments[segment.name]
        blocks = [entry for entry in self._slots[segment].values() if self.entries.get(entry.tag) is entry]
        for entry in blocks:
            self.remove(entry)
        del self._slots[segment]
        slot_bytes = segment.shape.slot_bytes
        self._free[slot_bytes] = [place for place in self._free.get(slot_bytes, []) if place.segment is not segment]
        return len(blocks)

    def has(self, place: BlockPlace) -> bool:
        """Return True while the place's file is here."""
        return self.segments.get(place.segment.name) is place.segment

    def own(self) -> list[TierSegment]:
        return [segment for segment in self.segments.values() if segment.own]

    def held(self, segment: TierSegment) -> Sequence[Entry]:
        return list(self._slots[segment].values())

    def coldest_segment(self, but: int | None = None) -> tuple[Rank, TierSegment] | None:
        """Return the own segment whose best block ranks lowest, and that rank. but: slots of so many bytes stay."""
        ranks = [
            (max((entry.rank for entry in self._slots[segment].values()), default=(-1.0, 0)), segment)
            for segment in self.own()
            if segment.shape.slot_bytes != but
        ]
        return min(ranks, key=lambda pair: pair[0], default=None)

    # ---- blocks -----------------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Add a block that lies in its slot now, and was just used."""
        segment, slot = entry.place
        self.entries[entry.tag] = self._slots[segment][slot] = entry
        self.tenants[entry.tenant] += entry.length
        self.bytes += entry.length
        self._ranking.use(entry)
        if entry.expires:
            heappush(self._ends, (entry.expires, entry.tag))
        if segment.own:
            self._orders.setdefault(segment.shape.slot_bytes, Order()).add(entry)
            if self._by_tenant:
                self._tenants.setdefault(entry.tenant, Order()).add(entry)

    def use(self, entry: Entry) -> None:
        entry.hits += 1
        self._ranking.use(entry)

    def remove(self, entry: Entry) -> None:
        """Forget a block. Its slot stays taken."""
        segment, slot = entry.place
        del self.entries[entry.tag]
        del self._slots[segment][slot]
        self.bytes -= entry.length
        self.tenants[entry.tenant] -= entry.length
        if not self.tenants[entry.tenant]:
            del self.tenants[entry.tenant]
        if segment.own:
            self._orders[segment.shape.slot_bytes].discard(entry)
            if self._by_tenant:
                self._tenants[entry.tenant].discard(entry)
                if not self._tenants[entry.tenant]:
                    del self._tenants[entry.tenant]

    def reserve(self, slot_bytes: int) -> BlockPlace | None:
        """Take a free slot."""
        free = self._free.get(slot_bytes)
        return free.pop() if free else None

    def free(self, place: BlockPlace) -> None:
        """The slot's record is erased, so the slot can be taken."""
        if place.segment.own and self.has(place):
            self._slots[place.segment].pop(place.slot, None)
            self._free[place.segment.shape.slot_bytes].append(place)

    # ---- what goes first --------------------------------------------------------------------------------------

    @property
    def sizes(self) -> int:
        """The number of sizes of slots."""
        return len(self._orders)

    def first(self, slot_bytes: int) -> Entry | None:
        """Return the own block in a slot of so many bytes that is evicted first."""
        return self._orders[slot_bytes].first() if slot_bytes in self._orders else None

    def first_of(self, tenant: bytes) -> Entry | None:
        """Return the own block of a tenant that is evicted first."""
        return self._tenants[tenant].first() if tenant in self._tenants else None

    def evict(self, entry: Entry) -> BlockPlace:
        """Forget a block that is evicted for another, and return its place, which is taken."""
        self._ranking.evicted(entry)
        self.remove(entry)
        return entry.place

    def expired(self, now: float) -> list[Entry]:
        """Return the own blocks whose time has come."""
        found: list[Entry] = []
        while self._ends and self._ends[0][0] <= now:
            entry = self.entries.get(heappop(self._ends)[1])
            if entry is not None and 0 < entry.expires <= now and entry.place.segment.own:
                found.append(entry)
        return found

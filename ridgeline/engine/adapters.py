"""The places of adapters on the device. The engine knows adapters by numbers; the worker holds their matrices.

An adapter has one place, which it keeps while requests run with it, and after that until another one needs it. What a
plan's `adapters` say is done in the order of plans, so a place may be given away while older plans are still under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ridgeline.core.plan.step import PlacedAdapter


class AdapterPlaces:
    """So many places, numbered from 1. placed: what the next plan tells the worker."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._free = list(range(places, 0, -1))
        self._place: dict[int, int] = {}  # adapter → place, the one that was used least lately first
        self._running: Counter[int] = Counter()  # adapter → sequences in slots
        self.placed: list[PlacedAdapter] = []
        self.loads = 0  # copies to places so far

    @property
    def running(self) -> list[int]:
        """The adapters with which sequences run."""
        return list(self._running)

    def has_room(self, adapter: int, leaving: Iterable[int] = ()) -> bool:
        """Return True if a sequence with this adapter could start. leaving: adapters of sequences that would leave
        first, 0 among them standing for none."""
        if adapter in self._running:
            return True
        return len(self._running - Counter(leaving)) < self._places

    def take(self, adapter: int) -> None:
        """Count a sequence with this adapter, for which there is room, and give the adapter a place if it has none."""
        place = self._place.pop(adapter, 0)
        if not place:
            place = self._free.pop() if self._free else self._place.pop(self._oldest())
            self.placed.append(PlacedAdapter(place, adapter))
            self.loads += 1
        self._place[adapter] = place
        self._running[adapter] += 1

    def _oldest(self) -> int:
        return next(adapter for adapter in self._place if adapter not in self._running)

    def release(self, adapter: int) -> None:
        """Count a sequence less."""
        self._running[adapter] -= 1
        if not self._running[adapter]:
            del self._running[adapter]

    def place(self, adapter: int) -> int:
        """Return the place of an adapter with which a sequence runs."""
        return self._place[adapter]

    def drop(self, adapter: int) -> None:
        """Forget an adapter with which no sequence runs: its number may come to mean another one."""
        if (place := self._place.pop(adapter, 0)) > 0:
            self._free.append(place)

    def forget(self) -> None:
        """Forget what the places hold, since plans that were to fill them may have failed. No sequence runs."""
        self._free, self._place = list(range(self._places, 0, -1)), {}
        self.placed.clear()

"""The part of a step that brings adapters to the device and says which token has which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ridgeline.worker.adapters.store import AdapterStore
from ridgeline.worker.adapters.tables import AdapterTables
from ridgeline.worker.adapters.whole import PlacedHeads
from ridgeline.worker.slots import Slots
from ridgeline.worker.step import DeviceStep, PlannedStep, StepPart


class StepOfAdapters(StepPart):
    """Copies adapters to their places in front of a step, and sorts the step's tokens by adapter. heads: those of a
    model that pools."""

    def __init__(
        self, store: AdapterStore, tables: AdapterTables, slots: Slots, heads: PlacedHeads | None = None
    ) -> None:
        self.store, self.tables, self.heads, self._slots = store, tables, heads, slots

    def prepare(self, step: PlannedStep) -> None:
        for place, number in step.plan.adapters:
            self.tables.fill(place, adapter := self.store.take(number))
            if self.heads is not None:
                self.heads.fill(place, adapter.heads)

    def forward(self, step: DeviceStep) -> None:
        if step.adapted:
            self.tables.begin(step.inputs, self._slots.adapter_S)
        else:
            self.tables.end()

    def leave(self, step: DeviceStep) -> None:
        """Let what runs behind the forward segment run without adapters."""
        self.tables.end()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let the body run without adapters, on any tokens."""
        with self.tables.aside():
            yield

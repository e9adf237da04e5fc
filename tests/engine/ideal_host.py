"""The host's memory of an ideal worker: the latest that loads may come is checked, and the earliest that saves may."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.core.plan.step import Moves
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.core.specs.host_layout import HostLayout

Cell = tuple[int, int, int]
Content = tuple[int, int, int]
Block = list[Content | None]
ON_ITS_WAY = (-9, -9, -9)


class IdealHost:
    """A block below holds what all cells of its block on the device held when it was saved.

    A load is there at the latest possible moment, when the next plan begins; until then its target holds nothing that
    a row could use, and nobody else may write there.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._layout, self._host = layout, HostLayout(layout, 1)
        self.blocks: dict[tuple[int, int], Block] = {}
        self._group_of: dict[int, int] = {}  # page → the group that wrote to it last
        self._coming: list[tuple[int, int, Block]] = []

    def cells(self, unit: Callable[[int, int, int], list[Cell]], group: int, block: int) -> list[Cell]:
        return [cell for layer in range(len(self._layout.groups[group].layers)) for cell in unit(group, block, layer)]

    def move(
        self,
        moves: Moves | None,
        memory: dict[Cell, Content],
        unit: Callable[[int, int, int], list[Cell]],
        claim: Callable[[int, int], None],
    ) -> None:
        """Begin a plan."""
        self.finish(memory, unit)
        for group, blocks, below in moves.saves if moves else ():
            for block, place in zip(blocks, below, strict=True):
                self._own(group, place)
                self.blocks[group, place] = [memory.get(cell) for cell in self.cells(unit, group, block)]
        targets: set[tuple[int, int]] = set()
        for group, blocks, below in moves.loads if moves else ():
            for block, place in zip(blocks, below, strict=True):
                assert (group, block) not in targets, "two loads to one block"
                targets.add((group, block))
                assert (group, place) in self.blocks, f"group {group} loads block {place}, which was not saved"
                for cell in self.cells(unit, group, block):
                    claim(cell[0], group)
                    memory[cell] = ON_ITS_WAY
                self._coming.append((group, block, list(self.blocks[group, place])))
        if moves is not None and moves.awaited:
            self.finish(memory, unit)

    def finish(self, memory: dict[Cell, Content], unit: Callable[[int, int, int], list[Cell]]) -> None:
        for group, block, content in self._coming:
            for cell, held in zip(self.cells(unit, group, block), content, strict=True):
                assert memory.get(cell) == ON_ITS_WAY, "a block was written to while it was loaded"
                memory.pop(cell)
                if held is not None:
                    memory[cell] = held
        self._coming.clear()

    def spoil(
        self, moves: Moves | None, memory: dict[Cell, Content], unit: Callable[[int, int, int], list[Cell]]
    ) -> None:
        """The plan failed on the way: what it moved is anything."""
        self._coming.clear()
        for group, blocks, below in (*moves.saves, *moves.loads) if moves else ():
            for place in below if (group, blocks, below) in moves.saves else ():
                self.blocks[group, place] = [(-8, -8, -8)] * len(self.blocks[group, place])
            for block in blocks if (group, blocks, below) in moves.loads else ():
                for cell in self.cells(unit, group, block):
                    memory[cell] = (-8, -8, -8)

    def _own(self, group: int, place: int) -> None:
        page = self._host.page_of(group, place)
        if self._group_of.get(page) != group:
            self._group_of[page] = group
            for key in [key for key in self.blocks if self._host.page_of(*key) == page]:
                del self.blocks[key]

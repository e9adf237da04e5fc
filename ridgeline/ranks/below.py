"""Ranks whose blocks in the host's memory the leader reads and writes, for a disk below that memory.

Each rank has its part of every block, in memory that it shares with the leader. So a block on the disk is one record
with the parts of all ranks, under one checksum: either all ranks find it, or all compute it again. It is the same
whatever the ranks divide: matrices, layers or tokens. A rank that has requests of its own has whole blocks.

The leader reads a part once the rank has said that its copies have ended (`settled`). A rank that is killed takes the
others with it, and what was being written then are blocks that no rank changes.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from ridgeline.core.errors import DeviceLost
from ridgeline.core.plan.step import Moves
from ridgeline.core.specs.host_layout import HostLayout
from ridgeline.ranks.leader import Group
from ridgeline.ranks.messages import MoveBelow, decode_as


class RanksBelow:
    """A `core.plan.worker.KeepsBelow`: the blocks of ranks that share one engine's blocks.

    group: has loaded. ranks: of it, in the order of their parts. layout: of each rank's memory.
    """

    def __init__(self, group: Group, ranks: Sequence[int], layout: HostLayout) -> None:
        self._group, self._ranks, self._layout = group, ranks, layout
        self._parts: list[memoryview] = []
        self._sizes: list[Sequence[int]] = []  # of a rank's part, by group: stages of a pipeline have unlike ones
        for rank, answer in zip(ranks, group.ask("shared_memory", ranks), strict=True):
            number, sizes = decode_as(tuple[int, list[int]], answer)
            with group.opened(rank, number) as file:
                self._parts.append(memoryview(mmap.mmap(file.fileno(), layout.num_bytes)))
            self._sizes.append(sizes)

    def octets(self, group: int, block: int) -> list[memoryview]:
        """Return each rank's part of a block."""
        start = self._layout.offset(group, block)
        parts = zip(self._parts, self._sizes, strict=True)
        return [part[start : start + sizes[group]] for part, sizes in parts if sizes[group]]

    def settled(self) -> int:
        """Return the newest plan up to which the copies of all ranks have ended. While no plan is under way they are
        asked; else they have told with their results."""
        if self._group.lost is not None or self._group.is_busy(self._ranks):
            told = [self._group.settled_of(rank) for rank in self._ranks]
        else:
            told = [decode_as(int, answer) for answer in self._group.ask("settled", self._ranks)]
        return min(told) >> self._group.part_bits

    def end_moves(self) -> None:
        """Wait until all copies have ended."""
        if self._group.lost is None:
            self._group.ask("end_moves", self._ranks)

    def move(self, plan: int, moves: Moves) -> None:
        """Move blocks behind plans up to this one, which have all been collected."""
        message = MoveBelow(plan << self._group.part_bits, moves)  # a plan's own moves are those of its first part
        for rank in self._ranks:
            self._group.tell(rank, message)

    def move_seconds(self) -> tuple[float, float]:
        """Return the seconds that copies of the slowest rank took to the host's memory, and from it."""
        try:
            answers = self._group.ask("move_seconds", self._ranks)
        except DeviceLost:
            return 0.0, 0.0
        each = [decode_as(tuple[float, float], answer) for answer in answers]
        return max(to_host for to_host, _ in each), max(from_it for _, from_it in each)

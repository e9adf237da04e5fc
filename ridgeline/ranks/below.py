"""Ranks whose blocks in the host's memory the leader reads and writes, for a disk below that memory.

Each rank has its part of every block, in memory that it shares with the leader. So a block on the disk is one record
with the parts of all ranks, under one checksum: either all ranks find it, or all compute it again.

The leader reads a part once the rank has said that its copies have ended (`settled`). A rank that is killed takes the
others with it, and what was being written then are blocks that no rank changes.
"""

from __future__ import annotations

import mmap
from typing import Any

from ridgeline.core.errors import DeviceLost
from ridgeline.core.plan.step import Moves
from ridgeline.core.specs.host_layout import HostLayout
from ridgeline.ranks.leader import Group
from ridgeline.ranks.messages import MoveBelow, decode_as


class GroupAbove(Group):
    """A group that is a `core.plan.worker.KeepsBelow`. Its ranks divide matrices, and nothing else."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._layout: HostLayout | None = None
        self._parts: list[memoryview] = []

    def share(self, layout: HostLayout) -> None:
        """Open the memory of all ranks. layout: of each rank's."""
        numbers = [decode_as(int, answer) for answer in self._ask("shared_memory")]
        self._layout = layout
        for member, number in zip(self._members, numbers, strict=True):
            with member.opened(number) as file:
                self._parts.append(memoryview(mmap.mmap(file.fileno(), layout.num_bytes)))

    def octets(self, group: int, block: int) -> list[memoryview]:
        """Return each rank's part of a block."""
        assert self._layout is not None
        start = self._layout.offset(group, block)
        return [part[start : start + self._layout.block_bytes[group]] for part in self._parts]

    def settled(self) -> int:
        """Return the newest plan up to which the copies of all ranks have ended. While no plan is under way they are
        asked; else they have told with their results."""
        if not self._pending and self._lost is None:
            for member, answer in zip(self._members, self._ask("settled"), strict=True):
                member.settled = decode_as(int, answer)
        return min(member.settled for member in self._members)

    def end_moves(self) -> None:
        """Wait until all copies have ended."""
        if self._lost is None:
            self._ask("end_moves")

    def move(self, plan: int, moves: Moves) -> None:
        """Move blocks behind plans up to this one, which have all been collected."""
        self._tell(MoveBelow(plan, moves))

    def move_seconds(self) -> tuple[float, float]:
        """Return the seconds that copies of the slowest rank took to the host's memory, and from it."""
        try:
            each = [decode_as(tuple[float, float], answer) for answer in self._ask("move_seconds")]
        except DeviceLost:
            return 0.0, 0.0
        return max(to_host for to_host, _ in each), max(from_it for _, from_it in each)

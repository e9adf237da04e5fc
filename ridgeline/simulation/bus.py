"""The copies between a device and the host's memory on a virtual clock: one after the other, beside the steps."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.core.plan.step import MoveBlocks, Moves


class HostBus:
    """rate, memory: bytes a second over the bus, and of the device's memory. block_bytes: of a block of each group.

    The side stream of `worker/host_memory.py`: blocks that a plan saves are gathered before its rows run, then they
    travel, and then those that it loads. Rows wait for the loads of earlier plans, and for their own if these are
    awaited."""

    def __init__(self, rate: float, memory: float, block_bytes: Sequence[int]) -> None:
        self._rate, self._memory, self._block_bytes = rate, memory, block_bytes
        self._free_at = self._loaded_at = 0.0

    def begin(self, moves: Moves | None, ready: float) -> float:
        """Return the moment at which a plan's rows can begin, if the device is ready for them at `ready`."""
        ready = max(ready, self._loaded_at)
        if moves is None:
            return ready
        saved, loaded = self._bytes(moves.saves), self._bytes(moves.loads)
        gathered = ready + 2 * saved / self._memory  # read and written
        self._free_at = max(self._free_at, gathered) + (saved + loaded) / self._rate + 2 * loaded / self._memory
        if loaded:
            self._loaded_at = self._free_at
        return max(gathered, self._loaded_at) if moves.awaited else gathered

    def _bytes(self, moves: Sequence[MoveBlocks]) -> int:
        return sum(len(move.blocks) * self._block_bytes[move.group] for move in moves)

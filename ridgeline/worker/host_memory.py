"""The host's memory as a second tier of the KV cache: the moves of plans, as `engine/cache/host_tier.py` orders them.

On a GPU the memory is page-locked, so that copies take the bus's whole rate and the host does not wait for them. They
are queued on a stream of their own. On the compute stream a step waits for the loads of the plan before it, and gathers
the blocks that it saves into a ring of staging memory:

    compute   wait for the loads before | gather saves → ring | [wait for own loads] | rows
    side      wait for the gather | ring → host | host → staging | scatter loads into blocks

A part of the ring is used again once its copy to the host is done. On a CPU the thread that runs plans copies.

The copies of a plan may end after its result is there. `settled` says of which plans all have ended. Others may use the
host's blocks of such a plan then (`engine/cache/disk.py`).

Legend:
    N  blocks, in all layers
    W  words of a unit
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.reserve import Reserved, StepSizes
from ridgeline.core.plan.step import MoveBlocks, Moves
from ridgeline.core.specs.cache_layout import CacheGroup
from ridgeline.core.specs.host_layout import HostLayout, staging_bytes
from ridgeline.kernels.base.kv_format import DTYPE_BYTES
from ridgeline.worker.state.buffer import StateMemory
from ridgeline.worker.step import PlannedStep, StepPart
from ridgeline.worker.upload import staging

ALIGNMENT = 256
MEASURED = 32 << 20  # bytes of the copy that is timed


@dataclass(frozen=True)
class Staging:
    """The memory that blocks pass through on a device, as it is planned for: some to the host, some from it."""

    groups: tuple[CacheGroup, ...]

    def reserve(self, sizes: StepSizes) -> Reserved:
        dtype = next(name for name, size in DTYPE_BYTES.items() if size == sizes.itemsize)
        return Reserved(2 * staging_bytes(self.groups, dtype, sizes.max_tokens) if sizes.on_gpu else 0)


class StagedBlocks(NamedTuple):
    """Blocks of one group that travel together. start: where they begin in staging memory."""

    group: int
    blocks: Sequence[int]
    below: Sequence[int]
    start: int


class HostCopies(NamedTuple):
    """HostCopies of a plan that were queued. ahead, done: the stream has come to them, and has ended them."""

    plan: int
    to_host: bool
    ahead: torch.cuda.Event
    done: torch.cuda.Event


class HostMemory(StepPart):
    """The blocks in the host's memory.

    staged: bytes of the ring, and of the memory for loads.
    block_bytes: of this rank's part of a block, by group.
    shared: another process may look into it too. descriptor: of the file without a name that it lies in then.
    seconds: that copies took, to the host and from it.
    """

    def __init__(self, memory: StateMemory, layout: HostLayout, staged: int, *, shared: bool = False) -> None:
        self._memory, self.layout, self._device = memory, layout, memory.device
        self._streams = self._device.type == "cuda"
        units = zip(memory.layout.groups, memory.layout.unit_bytes, strict=True)
        self.block_bytes = [len(group.layers) * unit for group, unit in units]
        self._loaded: torch.cuda.Event | None = None  # of the plan before
        self._begun = 0  # the newest plan
        self._copies: deque[HostCopies] = deque()  # that may be under way
        self.seconds = [0.0, 0.0]
        self._looking = Lock()  # held by the thread that looks which copies have ended
        self.descriptor: int | None = os.memfd_create("ridgeline-kv") if shared else None
        if self.descriptor is None:
            self.bytes = _allocated(self.layout.num_bytes, pinned=self._streams)
        else:
            self.bytes = _mapped(self.descriptor, self.layout.num_bytes, pinned=self._streams)
        if self._streams:
            self.use_streams(staged)

    def use_streams(self, staged: int) -> None:
        """Take the memory that blocks pass through, and a stream for them. On a CPU only tests do."""
        self._streams = True
        size = -(-max(staged, *self.block_bytes) // ALIGNMENT) * ALIGNMENT
        self._ring, self._arriving = (torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2))
        self._side = torch.cuda.Stream(self._device)
        self._next = 0  # in the ring
        self._leaving: list[tuple[int, int, torch.cuda.Event]] = []  # parts of the ring, and when they are read

    def prepare(self, step: PlannedStep) -> None:
        if self._loaded is not None:
            self._loaded.wait()
            self._loaded = None
        if step.plan.moves is not None:
            self.move(step.plan.id, step.plan.moves)
        self._begun = step.plan.id

    @torch.inference_mode()
    def move(self, plan: int, moves: Moves) -> None:
        """Queue the moves of a plan, or others behind a plan."""
        if not self._streams:
            self._copy(moves.saves, to_host=True)
            self._copy(moves.loads, to_host=False)
            return
        if moves.saves:
            self._save(plan, moves.saves)
        if moves.loads:
            loaded = self._load(plan, moves.loads)
            if moves.awaited:
                loaded.wait()
            else:
                self._loaded = loaded

    def settled(self) -> int:
        """Return the newest plan up to which all copies have ended."""
        with self._looking:
            begun = self._begun  # before the copies are looked at, since another thread may begin a plan meanwhile
            while self._copies and self._copies[0].done.query():
                _, to_host, ahead, done = self._copies.popleft()
                self.seconds[not to_host] += ahead.elapsed_time(done) / 1e3
            return self._copies[0].plan - 1 if self._copies else begun

    def settle(self) -> None:
        """Wait until all copies have ended."""
        for copies in list(self._copies):
            copies.done.synchronize()

    def octets(self, group: int, block: int) -> memoryview:
        """Return a block's bytes, which may be written to."""
        start = self.layout.offset(group, block)
        return self.bytes.numpy().data[start : start + self.block_bytes[group]]

    def bytes_per_second(self) -> float:
        """Return the rate at which blocks come from the host, by a short copy."""
        size = min(MEASURED, len(self.bytes), len(self._arriving) if self._streams else MEASURED)
        source = self.bytes[:size]
        target = self._arriving[:size] if self._streams else torch.empty(size, dtype=torch.uint8)
        best = 0.0
        for _ in range(3):
            self._synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            self._synchronize()
            best = max(best, size / max(time.perf_counter() - start, 1e-9))
        return best

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # ---- on a CPU ---------------------------------------------------------------------------------------------

    def _copy(self, moves: Sequence[MoveBlocks], *, to_host: bool) -> None:
        start = time.perf_counter()
        for group, blocks, below in moves:
            units_NW = self._memory.units[group]
            for block, place in zip(blocks, below, strict=True) if self.block_bytes[group] else ():
                places_N = torch.tensor(self._places(group, [block]))
                held_NW = self._as_units(self.bytes, self.layout.offset(group, place), group, 1)
                if to_host:
                    torch.index_select(units_NW, 0, places_N, out=held_NW)
                else:
                    units_NW.index_copy_(0, places_N, held_NW)
        self.seconds[not to_host] += time.perf_counter() - start

    # ---- on a GPU ---------------------------------------------------------------------------------------------

    def _save(self, plan: int, saves: Sequence[MoveBlocks]) -> None:
        for batches, size in self._batches(saves, len(self._ring)):
            first = self._take_ring(size)
            for group, blocks, _, start in batches:
                units_NW = self._as_units(self._ring, first + start, group, len(blocks))
                torch.index_select(self._memory.units[group], 0, self._uploaded(group, blocks), out=units_NW)
            gathered = torch.cuda.Event()
            gathered.record()
            with torch.cuda.stream(self._side):
                gathered.wait()
                ahead = _marked()
                for part, host in self._pairs(batches, self._ring, first):
                    host.copy_(part, non_blocking=True)
                done = _marked()
            self._copies.append(HostCopies(plan, True, ahead, done))
            self._leaving.append((first, first + size, done))

    def _take_ring(self, size: int) -> int:
        """Return the first of so many bytes of the ring, which the stream may write to."""
        first = self._next if self._next + size <= len(self._ring) else 0
        for start, stop, done in self._leaving:
            if start < first + size and first < stop:
                done.wait()
        self._leaving = [each for each in self._leaving if not each[2].query()]
        self._next = first + size
        return first

    def _load(self, plan: int, loads: Sequence[MoveBlocks]) -> torch.cuda.Event:
        reached = torch.cuda.Event()
        reached.record()
        with torch.cuda.stream(self._side):
            reached.wait()
            ahead = _marked()
            for batches, _ in self._batches(loads, len(self._arriving)):
                for part, host in self._pairs(batches, self._arriving, 0):
                    part.copy_(host, non_blocking=True)
                for group, blocks, _, start in batches:
                    units_NW = self._as_units(self._arriving, start, group, len(blocks))
                    self._memory.units[group].index_copy_(0, self._uploaded(group, blocks), units_NW)
            loaded = _marked()
        self._copies.append(HostCopies(plan, False, ahead, loaded))
        return loaded

    def _batches(self, moves: Sequence[MoveBlocks], most: int) -> Iterator[tuple[list[StagedBlocks], int]]:
        """Yield blocks that fit into so many bytes together, and the bytes that they take."""
        batches, taken = list[StagedBlocks](), 0
        for group, blocks, below in moves:
            size, at = self.block_bytes[group], 0
            while size and at < len(blocks):
                if (count := min((most - taken) // size, len(blocks) - at)) <= 0:
                    yield batches, taken
                    batches, taken = [], 0
                    continue
                batches.append(StagedBlocks(group, blocks[at : at + count], below[at : at + count], taken))
                taken = min(-(-(taken + count * size) // ALIGNMENT) * ALIGNMENT, most)
                at += count
        if batches:
            yield batches, taken

    def _pairs(self, batches: Sequence[StagedBlocks], staged: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each block's bytes in staging memory and in the host's."""
        for group, _, below, start in batches:
            size = self.block_bytes[group]
            for n, place in enumerate(below):
                at, offset = first + start + n * size, self.layout.offset(group, place)
                yield staged[at : at + size], self.bytes[offset : offset + size]

    def _uploaded(self, group: int, blocks: Sequence[int]) -> Tensor:
        places = self._places(group, blocks)
        staged = staging(len(places), self._device)
        staged.numpy()[:] = places
        return staged.to(self._device, non_blocking=True).long()

    # ---- both -------------------------------------------------------------------------------------------------

    def _places(self, group: int, blocks: Sequence[int]) -> list[int]:
        """Return the places of these blocks' units, those of a block together."""
        step = self._memory.layout.layer_step(group)
        layers = range(len(self._memory.layout.groups[group].layers))
        return [block + layer * step for block in blocks for layer in layers]

    def _as_units(self, memory: Tensor, start: int, group: int, count: int) -> Tensor:
        """Return the bytes of so many blocks as units [N, W]."""
        units_NW = self._memory.units[group]
        return memory[start : start + count * self.block_bytes[group]].view(units_NW.dtype).view(-1, units_NW.shape[1])


def _marked() -> torch.cuda.Event:
    """Return an event at this place of the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _allocated(size: int, *, pinned: bool) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        raise _not_given(size, pinned=pinned) from error


def _mapped(descriptor: int, size: int, *, pinned: bool) -> Tensor:
    """Return memory that lies in a file."""
    try:
        os.ftruncate(descriptor, size)
        found = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    except OSError as error:
        raise _not_given(size, pinned=pinned) from error
    if pinned and int(torch.cuda.cudart().cudaHostRegister(found.data_ptr(), size, 0)):
        raise _not_given(size, pinned=pinned)
    return found


def _not_given(size: int, *, pinned: bool) -> InvalidConfig:
    return InvalidConfig(
        f"the host did not give {size / (1 << 30):.2f} GiB of {'page-locked ' if pinned else ''}memory for "
        "kv_offloading_size; lower it."
    )

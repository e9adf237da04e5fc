"""The rules of torch's caching allocator for GPUs, in plain Python: which requests reach cudaMalloc, and what is held.

The rules are those of torch's own page on memory (docs: CUDA semantics, memory management) and of the constants in its
header c10/core/AllocatorConfig.h. `python -m ridgeline_bench.scripts.allocator.rules` compares the model with the
allocator itself, event by event.

    request ── rounded to 512 bytes ──▶ pool (small up to 1 MiB, large) of its stream
            ── best fit among free blocks ──▶ split the rest off, or ── no fit ──▶ segment from the driver
    free    ── joined with free neighbours of the same segment; the segment stays until memory is short
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

MIB, GIB = 1 << 20, 1 << 30
LEAST = 512  # bytes of a block
SMALL = MIB  # the largest request of the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # of requests below OWN_SEGMENT
OWN_SEGMENT = 10 * MIB  # a larger request gets a segment of its own size, rounded up to ROUNDED
ROUNDED = 2 * MIB


class OutOfMemory(Exception):
    """The driver has no memory for a segment, even after all that is free was given back."""


@dataclass(frozen=True)
class Knobs:
    """The entries of PYTORCH_ALLOC_CONF that the model knows.

    max_split: bytes from which on blocks are not split; 0: all are. divisions: of the step between two powers of two,
    to whose parts requests are rounded up; 0: none. expandable: segments grow. limit: bytes that the driver gives.
    """

    max_split: int = 0
    divisions: int = 0
    expandable: bool = False
    limit: int = 0

    @property
    def text(self) -> str:
        """The entries as the variable has them; "" for the defaults."""
        named = {
            "max_split_size_mb": self.max_split // MIB,
            "roundup_power2_divisions": self.divisions,
            "expandable_segments": self.expandable,
        }
        return ",".join(f"{name}:{value}" for name, value in named.items() if value)


def block_bytes(size: int, divisions: int = 0) -> int:
    """Return the bytes of the block that a request gets: a multiple of 512, or one of `divisions` steps to the next
    power of two."""
    if size < LEAST:
        return LEAST
    if divisions > 1 and size > LEAST * divisions:
        floor = 1 << (size.bit_length() - 1)
        step = floor // divisions
        return -(-size // step) * step
    return -(-size // LEAST) * LEAST


def segment_bytes(block: int) -> int:
    """Return the bytes that are asked of the driver for a block that fits nowhere."""
    if block <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if block < OWN_SEGMENT else -(-block // ROUNDED) * ROUNDED


@dataclass(eq=False)
class Block:
    """A part of a segment. start: its offset there. request: the bytes that were asked for. used: another stream reads
    it too (`Tensor.record_stream`)."""

    segment: Segment
    start: int
    size: int
    free: bool = True
    request: int = 0
    used: bool = False


@dataclass(eq=False)
class Segment:
    """Memory from the driver, of one stream and pool, in blocks without gaps."""

    stream: int
    small: bool
    expandable: bool
    number: int
    blocks: list[Block] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def idle(self) -> bool:
        return all(block.free for block in self.blocks)


class Held(NamedTuple):
    """What an allocator holds, in bytes and calls.

    requested: what callers asked for. allocated: their blocks. reserved: all segments. mallocs, frees: calls of the
    driver that took or gave back memory. retries: requests that only fitted after all free segments were given back.
    largest_free: the largest free block. free: all free blocks.
    """

    requested: int
    allocated: int
    reserved: int
    mallocs: int
    frees: int
    retries: int
    largest_free: int
    free: int

    @property
    def fragmentation(self) -> float:
        """The share of the free bytes outside of the largest free block: 0 where all lie together."""
        return 1 - self.largest_free / self.free if self.free else 0.0


class CachingModel:
    """A caching allocator. Requests have names, by which they are given back."""

    def __init__(self, knobs: Knobs = Knobs()) -> None:
        self.knobs = knobs
        self.segments: list[Segment] = []
        self.taken: dict[str, Block] = {}
        self.waiting: list[Block] = []  # given back by their callers, and not yet by another stream
        self.mallocs = self.frees = self.retries = self._numbers = 0

    def allocate(self, name: str, size: int, stream: int = 0) -> None:
        """Take a block. Raise OutOfMemory if the limit does not allow it."""
        self._passed()
        block_size = block_bytes(size, self.knobs.divisions)
        small = block_size <= SMALL
        block = self._fit(block_size, stream, small) or self._extended(block_size, stream, small)
        if block is None:
            self.retries += 1
            self.give_back()
            block = self._extended(block_size, stream, small)
        if block is None:
            raise OutOfMemory(f"{name} wants {size} bytes, and the driver gives {self.knobs.limit} in all.")
        rest = block.size - block_size
        if self._splits(block, block_size, rest):
            block.size = block_size
            blocks = block.segment.blocks
            blocks.insert(blocks.index(block) + 1, Block(block.segment, block.start + block_size, rest))
        block.free, block.request = False, size
        self.taken[name] = block

    def use(self, name: str) -> None:
        """Let another stream use a block, which is then only free behind what that stream does."""
        self.taken[name].used = True

    def synchronize(self) -> None:
        """Let all streams end what they do. The allocator sees that when it is asked for memory the next time."""
        for block in self.waiting:
            block.used = False

    def _passed(self) -> None:
        """Join the blocks whose other stream has ended with them."""
        done = [block for block in self.waiting if not block.used]
        self.waiting = [block for block in self.waiting if block.used]
        for block in done:
            self._join(block)

    def free(self, name: str) -> None:
        """Give a block back."""
        block = self.taken.pop(name)
        if block.used:
            self.waiting.append(block)
        else:
            self._join(block)

    def _join(self, block: Block) -> None:
        block.free, block.used, block.request = True, False, 0
        blocks = block.segment.blocks
        at = blocks.index(block)
        if at + 1 < len(blocks) and blocks[at + 1].free:
            block.size += blocks.pop(at + 1).size
        if at and blocks[at - 1].free:
            blocks[at - 1].size += blocks.pop(at).size

    def give_back(self) -> None:
        """Return every segment to the driver that has no block in use (`torch.cuda.empty_cache`). It waits for all
        streams."""
        self.synchronize()
        self._passed()
        idle = [segment for segment in self.segments if segment.idle and segment.size]
        self.frees += len(idle)
        self.segments = [segment for segment in self.segments if segment not in idle]

    def held(self) -> Held:
        """Return what is held now."""
        free = [block.size for block in self._blocks() if block.free]
        return Held(
            requested=sum(block.request for block in (*self.taken.values(), *self.waiting)),
            allocated=sum(block.size for block in self.taken.values()),
            reserved=self.reserved,
            mallocs=self.mallocs,
            frees=self.frees,
            retries=self.retries,
            largest_free=max(free, default=0),
            free=sum(free),
        )

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    def _blocks(self) -> Iterator[Block]:
        return (block for segment in self.segments for block in segment.blocks)

    def _fit(self, size: int, stream: int, small: bool) -> Block | None:
        """Return the smallest free block of a stream's pool that fits."""
        own = (s for s in self.segments if s.stream == stream and s.small == small)
        fits = [b for segment in own for b in segment.blocks if b.free and b.size >= size]
        best = min(fits, key=lambda each: (self._grows(each), each.size, each.segment.number, each.start), default=None)
        most = self.knobs.max_split
        if best is None or not most or small:
            return best
        if size < most <= best.size:  # it stays whole for requests as large as itself
            return None
        return None if size >= most and best.size >= size + LARGE_SEGMENT else best

    def _grows(self, block: Block) -> bool:
        """Return True for the last block of a segment that grows, which is taken after all others."""
        return block.segment.expandable and block is block.segment.blocks[-1]

    def _splits(self, block: Block, size: int, rest: int) -> bool:
        if block.segment.small or block.segment.expandable:
            return rest >= LEAST
        return rest > SMALL and not (self.knobs.max_split and size >= self.knobs.max_split)

    def _extended(self, size: int, stream: int, small: bool) -> Block | None:
        """Return a block in new memory of the driver, or None if there is none."""
        if not self.knobs.expandable:
            wanted = segment_bytes(size)
            if self._exceeds(wanted):
                return None
            segment = Segment(stream, small, False, self._number())
            segment.blocks.append(Block(segment, 0, wanted))
            self.segments.append(segment)
            self.mallocs += 1
            return segment.blocks[0]
        segment = next((s for s in self.segments if s.stream == stream and s.small == small), None) or self._grown(
            stream, small
        )
        last = segment.blocks[-1] if segment.blocks and segment.blocks[-1].free else None
        page = SMALL_SEGMENT if small else LARGE_SEGMENT
        wanted = -(-(size - (last.size if last else 0)) // page) * page
        if self._exceeds(wanted):
            return None
        self.mallocs += 1
        if last is None:
            last = Block(segment, segment.size, 0)
            segment.blocks.append(last)
        last.size += wanted
        return last

    def _grown(self, stream: int, small: bool) -> Segment:
        """Return a segment that has addresses, and no memory yet."""
        segment = Segment(stream, small, True, self._number())
        self.segments.append(segment)
        return segment

    def _exceeds(self, wanted: int) -> bool:
        return bool(self.knobs.limit) and self.reserved + wanted > self.knobs.limit

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

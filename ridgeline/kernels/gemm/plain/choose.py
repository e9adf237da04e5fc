"""The choice of the kernel that computes a linear map, and its cut: a plain function of shapes, tuned on an H200.

It stands apart from the device code, so that tuning never touches the mathematics. It does not import torch.

    1 or 2 tokens   rows.py, norm and gate included
    3 or 4          rows.py if the matrix is small, else as below
    5 to 256        on Hopper hopper/stream.py with its gate, behind a norm kernel: folding the norm into an operand of
                    the matrix units costs more than a launch. From 129 tokens on small matrices only
    5 to 32         on other GPUs tiles.py, likewise
    more            the library
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RowsPlan:
    """A cut of rows.py: `rows` weight rows at once (of each half if gated), `block` inputs of each.

    depth: how many blocks are loaded ahead.
    programs: programs per multiprocessor, each of which takes several laps (`block` then holds whole rows). 0: there is
        a program for every `rows` weight rows.
    """

    rows: int
    tokens: int
    block: int
    warps: int
    depth: int = 1
    programs: int = 0


@dataclass(frozen=True)
class Tiles:
    """A cut of tiles.py: a tile is `rows` weight rows (of both halves together if gated) by `tokens`.

    split: how many programs share a tile's inputs.
    ahead: how many inputs of its rows a program prefetches into the cache before the kernel before it has ended.
    """

    rows: int
    tokens: int
    block: int
    stages: int
    warps: int
    split: int = 1
    ahead: int = 0


@dataclass(frozen=True)
class Stream:
    """A cut of hopper/stream.py: a tile is `rows` weight rows, 64 or 128 (of each half if gated), by `tokens`.

    block: inputs of a stage.
    split: how many programs share a tile's inputs.
    promote: sums of E4M3 products leave the matrix units after each 128 inputs, which keeps them exact to float32.
    """

    rows: int
    tokens: int
    block: int
    stages: int
    split: int = 1
    promote: bool = False

    @property
    def named(self) -> dict[str, int]:
        """Return the constants of the kernel."""
        return {
            "ROWS": self.rows, "TOKENS": self.tokens, "BLOCK": self.block, "STAGES": self.stages, "SPLIT": self.split
        }  # fmt: skip

    def items(self, tokens: int, outputs: int) -> int:
        """Return the shares of tiles of a product with so many outputs, of each half if gated."""
        return -(-outputs // self.rows) * -(-tokens // self.tokens) * self.split


@dataclass(frozen=True)
class LibraryProduct:
    """The product of the vendor's library."""


def fits(cut: RowsPlan | Stream | LibraryProduct, tokens: int, inputs: int, *, gated: bool) -> bool:
    """Return True if a cut of a file computes a whole product of 16-bit numbers, and its stages fit a program."""
    if isinstance(cut, RowsPlan):
        powers = all(each > 0 and each & (each - 1) == 0 for each in (cut.rows, cut.tokens, cut.block, cut.warps))
        whole = cut.tokens >= tokens and (not cut.programs or cut.block >= inputs)
        return powers and whole and cut.depth > 0 and cut.rows <= 8 and cut.block <= MOST_BLOCK and cut.warps <= 32
    if isinstance(cut, Stream):
        parts = 2 if gated else 1
        stage, sums = (cut.rows * parts + cut.tokens) * cut.block * 2, cut.tokens * parts // 2
        known = cut.rows in (64, 128) and cut.tokens in (8, 16, 32, 64, 128, 256) and cut.block in (64, 128, 256)
        return known and sums <= 128 and cut.stages >= 2 and cut.stages * stage <= RING and 1 <= cut.split <= 8
    return True


MOST_BLOCK = 1 << 14  # inputs of a block of rows.py
TILES_TOKENS = 32  # with more tokens tiles without TMA tie with cuBLAS or lose (docs/log.md)
STREAM_TOKENS = 256  # with more tokens kernels of our own were not reliably faster than the library's (docs/log.md)
RING = 217_000  # bytes of shared memory for the stages of a ring; barriers and turned tiles need a few thousand more


def choose(
    tokens: int,
    inputs: int,
    outputs: int,
    *,
    itemsize: int = 2,
    shared: int = 232_448,
    norm: bool = False,
    gated: bool = False,
    hopper: int = 0,
    adapters: bool = False,
) -> RowsPlan | Tiles | Stream | None:
    """Return the cut for a matrix of `outputs` rows (of each half if gated). None: the library's product is as fast.

    shared: bytes of shared memory that a program may have.
    norm: the op includes a norm. Only `RowsPlan` does that in one kernel.
    hopper: the multiprocessors of a Hopper GPU; 0 for other GPUs.
    adapters: their products are made beside it, which the library's product cannot do. At 256 tokens a layer of an 8B
        model takes 199 µs either way without adapters.
    """
    most = STREAM_TOKENS if hopper else TILES_TOKENS
    if not tokens or inputs < 64 or inputs % 8 or outputs < 16 or tokens > most or itemsize != 2:
        return None
    if tokens <= 2:
        return _rows(tokens, inputs, outputs, norm, gated)
    if tokens <= 4 and outputs <= 2048 and inputs <= 4096 and not gated:
        block = max(256, min(power_of_two(inputs), 2048))
        if block == power_of_two(inputs) == 2048:
            return RowsPlan(8, 4, block, 4, programs=2)
        return RowsPlan(1 if outputs <= 1024 else 2, 4, block, min(2, block // 256))
    if hopper:
        return _stream(tokens, inputs, outputs, gated, hopper, adapters)
    tiles = _tiles(max(16, power_of_two(tokens)), inputs, outputs * (2 if gated else 1))
    while (tiles.rows + tiles.tokens) * tiles.block * itemsize * tiles.stages > shared:
        tiles = replace(tiles, block=tiles.block // 2) if tiles.block > 128 else replace(tiles, stages=tiles.stages - 1)
    return tiles


def _rows(tokens: int, inputs: int, outputs: int, norm: bool, gated: bool) -> RowsPlan:
    """Return the cut for one or two tokens.

    Programs of this kernel and the first ones of the next kernel should fit the device together. Small programs leave
    their places early. Programs that take several laps are few, so the kernel is soon over.

    The numbers were tuned on an H200. docs/log.md ("Where a decode step's time was") has layers before and after: with
    one token 14.2 → 13.4 µs for Qwen3-0.6B, 35.2 → 33.8 µs for Llama-3.2-1B, and 108.4 → 104.5 µs for Llama-3.1-8B.
    """
    block = max(256, power_of_two(inputs))
    if block > 4096 or (inputs % 1024 == 0 and inputs < block):
        return _long_rows(tokens, inputs, norm, gated)
    many = outputs >= 32_768  # so many that the start and the end of the kernel do not count
    if block <= 1024:
        if tokens == 2 and gated:
            return RowsPlan(2, 2, block, min(2, block // 256), programs=6)
        return RowsPlan(4, tokens, block, 1 if norm and not gated else min(2, block // 256))
    if block == 2048:
        if tokens == 1 and not gated and outputs > 1024:
            return RowsPlan(4 if norm else 2, 1, block, 2)
        if many:
            return RowsPlan(4, tokens, block, 4)
        return RowsPlan(2 if tokens == 2 and gated else 4, tokens, block, 4, programs=2 + tokens)
    if gated:
        return RowsPlan(2, 1, block, 8) if tokens == 1 else RowsPlan(1, 2, block, 4, programs=3)
    return RowsPlan(2 * tokens, tokens, block, 8) if many else RowsPlan(4, tokens, block, 8, programs=2)


def _long_rows(tokens: int, inputs: int, norm: bool, gated: bool) -> RowsPlan:
    """Return the cut, in blocks, for rows that fill no power of two well."""
    if norm:
        return RowsPlan(1 if gated else 2, tokens, 1024, 4, depth=4)
    if inputs <= 4096:
        return RowsPlan(2 // tokens, tokens, 1024, 4, depth=3)
    if tokens == 2:
        return RowsPlan(2, 2, 1024, 4, depth=8 if inputs <= 8192 else 4)
    return RowsPlan(1, 1, 1024, 1, depth=4) if inputs <= 8192 else RowsPlan(1, 1, 2048, 4, depth=3)


def _tiles(tokens: int, inputs: int, rows: int) -> Tiles:
    """Return the cut of tiles.py. Few tiles are split until about 100 programs share the memory; each then has long
    blocks in flight."""
    tiles = -(-rows // 64)
    if tiles >= 192:
        return Tiles(64, tokens, 128, 4, 4) if tokens <= 16 else Tiles(128, tokens, 128, 4, 8)
    if tiles >= 96 or (tiles >= 64 and inputs <= 2048):
        return Tiles(64, tokens, 256, 3, 4, ahead=1024) if tokens <= 16 else Tiles(64, tokens, 128, 6, 4, ahead=1024)
    return Tiles(64, tokens, 256, 3, 4, 2 if tiles >= 48 or inputs < 1024 else 4, ahead=512)


def _stream(
    tokens: int, inputs: int, outputs: int, gated: bool, processors: int, adapters: bool = False
) -> Stream | None:
    """Return the cut of hopper/stream.py, or None. Half of the multiprocessors read about all that the memory gives,
    and few programs read x less often.

    If tiles are few, the tokens are split, provided that this alone gives enough programs: weights are then read twice,
    but from the cache. Otherwise the inputs are split, for which the programs of a tile must meet at its end.

    The numbers were tuned on an H200. docs/log.md ("Where a decode step's time was") has layers of 8 to 256 tokens
    before and after; at 64 tokens Llama-3.1-8B went from 136.0 to 122.9 µs.
    """
    if tokens > 128 and not adapters and (2 if gated else 1) * outputs * inputs > 1 << 24:
        return None
    long = not gated and inputs >= (8192 if tokens > 16 else 4096)
    padded, tiles = max(16, power_of_two(tokens)), -(-outputs // 64)
    if not long and tokens > 32 and processors // 3 < tiles * -(-tokens // 32) <= processors // 2:
        padded = 32
    elif not long and tokens > 64:
        padded = 64 if tiles * -(-tokens // 64) <= processors else 128
    elif tokens > 128:
        padded = 128
    rows = 64
    if tiles * -(-tokens // padded) > processors:
        rows, tiles = 128, -(-outputs // 128)
    programs, split = tiles * -(-tokens // padded), 1
    while programs * split * 2 <= (processors if long else processors // 2) and split < 8 and split * 512 <= inputs:
        split *= 2
    if gated:
        block = 128 if rows == 128 and padded == 16 else 64
    else:
        block = 128 if padded <= 64 or (padded == 128 and rows == 64 and programs * split >= 100) else 64
    most = RING // ((rows * (2 if gated else 1) + padded) * block * 2)
    return Stream(rows, padded, block, min(most, 16, max(2, -(-inputs // (block * split)))), split)


def power_of_two(n: int) -> int:
    """Return the least power of two that is no less than n."""
    return 1 << (n - 1).bit_length()

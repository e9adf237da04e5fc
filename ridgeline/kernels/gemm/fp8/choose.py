"""The choice of the kernel for a product with 8-bit weights, and its cut: plain functions of shapes, without torch.

On Hopper a kernel rounds the activations, with the norm before if there is one. Then come

up to 64 tokens      hopper/stream.py
up to some hundreds  hopper/stream.py, if one lap of its tiles of 128 x 128 is enough
more                 hopper_tiles.py, or library.py

On other GPUs tiles.py multiplies in 16 bits. The rules are those which won in benchmarks/results/h200-fp8.jsonl.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.kernels.base.tuned import ShapeClass
from ridgeline.kernels.gemm.plain.choose import RING, Stream, power_of_two
from ridgeline.kernels.gemm.plain.predict import ProductShape

PANEL = 128  # inputs in one swizzled row of shared memory, and inputs of a block with a scale of its own
RING_AND_SCALES = 222_000  # bytes of shared memory like RING where up to 64 tokens are turned, which takes less
STREAM_TOKENS = 64  # up to that, tiles have no more columns than there are tokens
GROUPED_INPUTS = 32_768  # the scales of longer rows would take the place of weights in shared memory
ROUNDED_TOKENS = 64  # the rounding of 256 tokens takes 3 µs; what it saves to do it before was not measured
LIBRARY_TOKENS = 1024
LIBRARY_INPUTS = 16_384


@dataclass(frozen=True)
class Tiles:
    """A cut of hopper_tiles.py: tiles of 128 tokens by 256 weight rows; with `promote` of 128 or 256 tokens by 128 rows
    (half of the rows are gates if gated)."""

    stages: int = 4
    promote: bool = False
    tokens: int = 128


@dataclass(frozen=True)
class Tile:
    """A cut of tiles.py, for any GPU: a program computes rows x tokens outputs, `block` inputs at a step."""

    rows: int
    tokens: int
    block: int = 128
    warps: int = 4
    stages: int = 3


def choose_hopper(
    tokens: int,
    inputs: int,
    outputs: int,
    *,
    gated: bool,
    processors: int,
    blocked: bool = False,
    between: bool = False,
) -> Stream | Tiles:
    """Return the cut for rounded activations on Hopper.

    outputs: of each half if gated.
    between: activations have a scale for each 128 inputs beside weights with one for each output, or results are
        rounded. Only hopper/stream.py does this.
    """
    if tokens > STREAM_TOKENS:
        columns = -(-tokens // 128)
        # Gates, ups and their partial sums for 128 tokens would not fit the registers of hopper/stream.py
        if blocked and gated:
            return _tiles_in_blocks(tokens, gated)
        # A tile of hopper_tiles.py costs two of 128 x 128, so it must save half of the laps
        if tokens > 128 and -(-outputs // 128) * columns > processors and not between:
            return _tiles_in_blocks(tokens, gated) if blocked else Tiles()
        rows = 128 if -(-outputs // 64) * columns > processors else 64
        tiles = -(-outputs // rows) * columns
        return stream(rows, 128, inputs, tiles, gated=gated, processors=processors, long=not gated and inputs >= 8192)
    # Programs that share a tile's inputs take longer to meet than 4096 inputs do
    long = not gated and inputs >= 8192
    padded, rows = max(16, power_of_two(tokens)), 64
    tiles = -(-outputs // 64)
    if tiles > processors:
        rows, tiles = 128, -(-outputs // 128)
    return stream(rows, padded, inputs, tiles, gated=gated, processors=processors, long=long)


def class_of(of: ProductShape, *, blocked: bool, between: bool) -> ShapeClass:
    """Return the class of shapes for which one cut is kept, with a norm before or without. between: as
    `choose_hopper` takes it."""
    words = (("blocks", blocked), ("between", between), ("gate", of.gated))
    sizes = power_of_two(of.tokens), of.inputs, of.outputs
    return ShapeClass(" ".join(word for word, there in words if there), sizes)


def rounded_before(tokens: int, inputs: int) -> bool:
    """Return True where the op before had better round this product's activations, with a scale for each 128 inputs.

    A kernel that only rounds costs 1 to 1.7 µs in a chain of dependent kernels at 8 tokens, and sums that are promoted
    0.1 to 1 µs in all (benchmarks/results/h200-fp8.jsonl).
    """
    return tokens <= ROUNDED_TOKENS and inputs % PANEL == 0 and inputs <= GROUPED_INPUTS


def _tiles_in_blocks(tokens: int, gated: bool) -> Tiles:
    """Return tiles for scales of blocks: of 256 tokens where these are many enough to fill the device with them. The
    end of a gated product would then spill registers, which doubles its time."""
    return Tiles(4, promote=True, tokens=256) if tokens >= 1024 and not gated else Tiles(6, promote=True)


def library_wins(tokens: int, inputs: int, *, gated: bool) -> bool:
    """Return True where cuBLAS' product of E4M3 numbers is faster: its tiles overlap the end of one with the begin of
    the next, which matters less the longer the rows are, and it has no gate."""
    return tokens >= LIBRARY_TOKENS and inputs < LIBRARY_INPUTS and not gated


def stream(
    rows: int, tokens: int, inputs: int, programs: int, *, gated: bool, processors: int, long: bool = False
) -> Stream:
    """Return a cut with so many rows and tokens of a tile, and with as many stages as fit."""
    split, least = 1, 4096 if 16 < tokens <= 64 else 1024  # the more sums a tile has, the longer its programs meet
    while programs * split * 2 <= (processors if long else processors // 2) and split < 8 and split * least <= inputs:
        split *= 2
    parts = 2 if gated else 1
    block = 256 if rows * parts <= 128 and tokens <= 64 and inputs >= 256 * split * 2 else 128
    most = RING // ((rows * parts + tokens) * block)
    return Stream(rows, tokens, block, min(most, 16, max(2, -(-inputs // (block * split)))), split)


def groups(plan: Stream, inputs: int) -> int:
    """Return the rows of the table of scales in shared memory: at least a program's blocks of 128 inputs."""
    blocks = -(-inputs // plan.block)
    most = (blocks + plan.split - 1) // plan.split  # of one program that shares a tile
    return power_of_two(most * (plan.block // PANEL))


def fitting(plan: Stream, parts: int, groups: int) -> Stream:
    """Return the plan with as many of its stages as fit beside a table of scales. parts: 2 if gated."""
    if not groups:
        return plan
    stage = (plan.rows * parts + plan.tokens) * plan.block
    left = (RING_AND_SCALES - 4 * groups * parts * plan.tokens) // stage
    if left < 2:
        raise ValueError(f"{plan}: no room for two stages beside {groups} scales for each of {parts} parts")
    return replace(plan, stages=min(plan.stages, left))


def choose_tile(tokens: int, outputs: int) -> Tile:
    """Return the cut for GPUs without a kernel of their own."""
    if tokens <= 16:
        return Tile(64, 16)
    if tokens <= 64 or outputs <= 2048:
        return Tile(64, 64)
    return Tile(128, 128, 64, warps=8)


FIXED = Tile(64, 64)  # one cut for any number of tokens: an output's bits then depend on its own token alone

"""The choice of the kernel for a product with 8-bit weights, and its cut: plain functions of shapes, without torch.

1 or 2 tokens   rows.py, norm and gate included; activations stay as they are
3 to 128        on Hopper hopper_stream.py, behind a kernel that rounds the activations
more            on Hopper hopper_tiles.py, likewise
elsewhere       tiles.py, which multiplies in 16 bits
"""

from __future__ import annotations

from dataclasses import dataclass

PANEL = 128  # inputs in one swizzled row of shared memory, and inputs of a block with a scale of its own
RING = 217_000  # bytes of shared memory for stages; barriers and turned tiles need a few thousand more
ROWS_TOKENS = 2
STREAM_TOKENS = 128
MOST_INPUTS = 16_384  # a program of rows.py holds a whole row


@dataclass(frozen=True)
class Rows:
    """A cut of rows.py: `rows` weight rows at once (of each half if gated). programs: on each multiprocessor."""

    rows: int
    tokens: int
    block: int
    warps: int
    programs: int


@dataclass(frozen=True)
class Stream:
    """A cut of hopper_stream.py: a tile is `rows` weight rows, 64 or 128 (of each half if gated), by `tokens`.

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


@dataclass(frozen=True)
class Tiles:
    """A cut of hopper_tiles.py: tiles of 128 tokens by 256 weight rows (128 of each half if gated)."""

    stages: int = 4
    promote: bool = False


@dataclass(frozen=True)
class Tile:
    """A cut of tiles.py, for any GPU: a program computes rows x tokens outputs, `block` inputs at a step."""

    rows: int
    tokens: int
    block: int = 128
    warps: int = 4
    stages: int = 3


def choose_rows(tokens: int, inputs: int, outputs: int, *, gated: bool) -> Rows | None:
    """Return the cut for one or two tokens, or None. outputs: of each half if gated."""
    if not 0 < tokens <= ROWS_TOKENS or inputs > MOST_INPUTS or inputs % 16:
        return None
    block = max(512, _power_of_two(inputs))
    if block > 4096:
        return Rows(1, tokens, block, 16, 2)
    rows = (2 if gated else 4) // (tokens if block == 4096 else 1)
    return Rows(rows, tokens, block, max(1, block // 512), 4 if block == 4096 else 6)


def choose_hopper(tokens: int, inputs: int, outputs: int, *, gated: bool, processors: int) -> Stream | Tiles:
    """Return the cut for rounded activations on Hopper. outputs: of each half if gated.

    If tiles of hopper_stream.py are few, the tokens are split where that alone gives enough programs, and the inputs
    otherwise. The rules are those of gemm/choose.py with half of the bytes.
    """
    if tokens > STREAM_TOKENS:
        return Tiles()
    long = not gated and inputs >= 4096
    padded, tiles = max(16, _power_of_two(tokens)), -(-outputs // 64)
    if not long and tokens > 32 and processors // 3 < tiles * -(-tokens // 32) <= processors // 2:
        padded = 32
    rows = 64
    if tiles * -(-tokens // padded) > processors:
        rows, tiles = 128, -(-outputs // 128)
    return stream(rows, padded, inputs, tiles * -(-tokens // padded), gated=gated, processors=processors, long=long)


def stream(
    rows: int, tokens: int, inputs: int, programs: int, *, gated: bool, processors: int, long: bool = False
) -> Stream:
    """Return a cut with so many rows and tokens of a tile, and with as many stages as fit."""
    split = 1
    while programs * split * 2 <= (processors if long else processors // 2) and split < 8 and split * 1024 <= inputs:
        split *= 2
    parts = 2 if gated else 1
    block = 256 if rows * parts <= 128 and tokens <= 64 and inputs >= 256 * split * 2 else 128
    most = RING // ((rows * parts + tokens) * block)
    return Stream(rows, tokens, block, min(most, 16, max(2, -(-inputs // (block * split)))), split)


def choose_tile(tokens: int, outputs: int) -> Tile:
    """Return the cut for GPUs without a kernel of their own."""
    if tokens <= 16:
        return Tile(64, 16)
    if tokens <= 64 or outputs <= 2048:
        return Tile(64, 64)
    return Tile(128, 128, 64, warps=8)


FIXED = Tile(64, 64)  # one cut for any number of tokens: an output's bits then depend on its own token alone


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()

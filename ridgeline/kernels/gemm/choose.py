"""Which kernel computes a linear map, and how it is cut up: a plain function of shapes, tuned on an H200.

Apart from the device code, so that tuning never touches the mathematics. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rows:
    """rows.py: `rows` weight rows per program (of each half if gated), `block` inputs per step."""

    rows: int
    tokens: int
    block: int
    warps: int


@dataclass(frozen=True)
class Tiles:
    """tiles.py: a tile of `rows` weight rows (of each half if gated) by `tokens`, `split` programs along the inputs.

    ahead: how many inputs of its rows a program asks into the cache before it may start.
    """

    rows: int
    tokens: int
    block: int
    stages: int
    warps: int
    split: int = 1
    ahead: int = 0


ROWS_TOKENS = 4  # beyond that the vector units, not the memory, limit rows.py
TILES_TOKENS = 64


def choose(tokens: int, inputs: int, outputs: int, *, gated: bool = False) -> Rows | Tiles | None:
    """None: the library's product is as fast. outputs: rows of each half if gated."""
    if not tokens or inputs < 64 or outputs < 16 or inputs % 8 or tokens > TILES_TOKENS:
        return None
    if tokens <= ROWS_TOKENS:
        block = min(_power_of_two(inputs), 4096)
        return Rows(1, _power_of_two(tokens), block, 4 if block >= 1024 else 1)
    return Tiles(16 if outputs <= 8192 else 64, max(16, _power_of_two(tokens)), 128 if inputs >= 128 else 64, 4, 4)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()

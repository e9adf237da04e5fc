"""The cuts of the kernels that route: a plain function of shapes. It does not import torch.

up to 64 tokens   few.py: one launch
more              a norm, many.py's scores and choices, many.py's order: three launches
"""

from __future__ import annotations

from dataclasses import dataclass

FEW_TOKENS = 64  # one program chooses for all of them, and 64 tokens take it 2 µs
CELLS = 8192  # the largest tile of tokens by experts that a program keeps in registers, with 8 warps


@dataclass(frozen=True)
class Few:
    """A cut of few.py: a program multiplies `rows` experts' rows with `each` tokens.

    block: at least a whole row.
    tokens, experts: the tile in which the last program chooses, powers of two. It has a row for each warp, so that no
        row is spread over warps, which would have to wait for each other with every choice.
    """

    rows: int
    each: int
    block: int
    tokens: int
    experts: int
    warps: int


@dataclass(frozen=True)
class Many:
    """A cut of many.py: a tile is `tokens` tokens by all experts, and `block` inputs at a step.

    programs: at most so many programs put the pairs in order.
    """

    tokens: int
    experts: int
    block: int
    warps: int
    stages: int
    programs: int = 128


def choose(tokens: int, width: int, experts: int, *, fixed: bool = False) -> Few | Many:
    """Return the cut. fixed: it does not depend on the number of tokens."""
    few = None if fixed else _few(tokens, width, experts)
    return few or _many(tokens, experts, fixed)


def _few(tokens: int, width: int, experts: int) -> Few | None:
    """Return the cut of few.py, or None. About 128 programs share the work of up to 32 tokens, one for each
    multiprocessor. A thread keeps 32 weights, or more where 8 warps hold a longer row."""
    block, tile, padded = max(256, _power_of_two(width)), _power_of_two(tokens), max(16, _power_of_two(experts))
    if tokens > FEW_TOKENS or tile * padded > CELLS or block > 16_384:
        return None
    rows = max(1, min(4, tile // 4, 16_384 // block))
    each = max(1, min(tile, 8, tile * padded // (rows * 128)))
    threads = max(rows * block // 32, tile * padded // 32)
    warps = _power_of_two(max(1, min(8, threads // 32)))
    return Few(rows, each, block, max(tile, warps), padded, warps)


def _many(tokens: int, experts: int, fixed: bool) -> Many:
    """Return the cut of many.py. Each tile reads the whole router, so tiles are as large as they can be while there are
    as many as multiprocessors."""
    padded = max(16, _power_of_two(experts))
    most = max(16, min(64, CELLS // padded))
    tile = most
    while not fixed and tile > 16 and -(-tokens // tile) < 96:
        tile //= 2
    return Many(tile, padded, 64 if padded <= 256 else 32, 4 if tile * padded <= 4096 else 8, 3)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()

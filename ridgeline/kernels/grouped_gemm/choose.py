"""The cuts of the portable kernels for experts' products: plain functions of shapes. They do not import torch.

    1 to 4 tokens   rows.py: the touched experts' rows on the vector units, one launch for each op
    more            tiles.py on the matrix units; `grouped_down` then adds up each token's pairs in a launch of its own

Where hopper.py supports a product of more tokens than rows.py takes, that runs instead (see triton.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ROWS_TOKENS = 4  # with more tokens experts are shared by several of them, whose rows would be read for each
CELLS = 32_768  # weights that a program of 8 warps keeps in registers, 128 a thread


@dataclass(frozen=True)
class Rows:
    """A cut of rows.py: a program computes `rows` outputs, of one pair (gate and up), or of one token (down).

    block: at least a whole row.
    """

    rows: int
    block: int
    warps: int


@dataclass(frozen=True)
class Tiles:
    """A cut of tiles.py: a tile is `rows` weight rows of one expert (of gate and up together) by `tokens` pairs, and
    `block` inputs at a step."""

    rows: int
    tokens: int
    block: int
    warps: int
    stages: int


FIXED = Tiles(64, 64, 64, 4, 4)  # for any number of tokens, where results must not depend on it


def choose_gate_up(
    tokens: int, inputs: int, inner: int, *, experts: int, used: int, itemsize: int = 2, shared: int = 232_448
) -> Rows | Tiles:
    """Return the cut of the first op. shared: bytes of shared memory that a program may have."""
    block = max(256, _power_of_two(inputs))
    if tokens <= ROWS_TOKENS and 2 * block <= CELLS:
        rows = min(2 if block <= 4096 else 1, _power_of_two(inner))
        return Rows(rows, block, max(1, min(8, 2 * rows * block // 2048)))
    return _tiles(tokens, experts, used, itemsize, shared)


def choose_down(
    tokens: int, inner: int, outputs: int, *, experts: int, used: int, itemsize: int = 2, shared: int = 232_448
) -> Rows | Tiles:
    """Return the cut of the second op. A program of rows.py reads the rows of all experts of a token at once."""
    block, choices = max(256, _power_of_two(inner)), _power_of_two(used)
    if tokens <= ROWS_TOKENS and choices * block <= CELLS:
        # Of 1, 2 and 4 rows two were the fastest for 1, 2 and 4 tokens (docs/log.md)
        rows = max(1, min(2, CELLS // (choices * block), _power_of_two(outputs)))
        return Rows(rows, block, max(1, min(8, choices * rows * block // 4096)))
    return _tiles(tokens, experts, used, itemsize, shared)


def row_tiles(pairs: int, experts: int, tokens: int) -> int:
    """Return the most tiles of `tokens` pairs that experts with `pairs` pairs in all can fill or begin."""
    begun = min(experts, pairs)
    return begun + (pairs - begun) // tokens


def _tiles(tokens: int, experts: int, used: int, itemsize: int, shared: int) -> Tiles:
    """Return the cut of tiles.py. A tile holds an expert's pairs, if counts are about even, so that most weights are
    read once."""
    each = tokens * used / min(experts, tokens * used)
    held = max(16, min(128, _power_of_two(int(1.5 * each))))
    plan = Tiles(128, held, 64, 8, 4) if held >= 64 else Tiles(64, held, 128, 4, 4)
    while (plan.rows + plan.tokens) * plan.block * itemsize * plan.stages > shared and plan.stages > 1:
        plan = replace(plan, stages=plan.stages - 1)
    while (plan.rows + plan.tokens) * plan.block * itemsize * plan.stages > shared:
        plan = replace(plan, block=plan.block // 2)
    return plan


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()

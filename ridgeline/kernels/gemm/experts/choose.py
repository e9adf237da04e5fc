"""The cuts of the portable kernels for experts' products: plain functions of shapes. They do not import torch.

    1 to 4 tokens   rows.py: the touched experts' rows on the vector units, one launch for each op; on Hopper the second
                    op takes them through shared memory (hopper_rows.py)
    more            tiles.py on the matrix units; `grouped_down` then adds up each token's pairs in a launch of its own

Where hopper.py supports a product of more tokens than rows.py takes, that runs instead (see triton.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.kernels.gemm.plain.choose import power_of_two

ROWS_TOKENS = 4  # with more tokens experts are shared by several of them, whose rows would be read for each
SHARED_PART = 256  # inputs of a part of hopper_rows.py
SHARED_PARTS = 32  # of all experts' rows for one output
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
class SharedRows:
    """A cut of hopper_rows.py: a program of four warps computes `rows` outputs of one token, 1, 2 or 4."""

    rows: int


@dataclass(frozen=True)
class Tiles:
    """A cut of tiles.py: a tile is `rows` weight rows of one expert (of gate and up together) by `tokens` pairs, and
    `block` inputs at a step."""

    rows: int
    tokens: int
    block: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Widened:
    """Matrices in FP8 or codes become 16 bits wide in memory, some experts' at a time, and are multiplied as plain ones
    are. It pays for many pairs, since tiles would widen them in registers for every 64 pairs."""


WIDENED = 256  # pairs of each expert above which it does
FP8_ROWS = 2  # tokens up to which rows of FP8 are read by the first product on Hopper
FIXED = Tiles(64, 64, 64, 4, 4)  # for any number of tokens, where results must not depend on it


def choose_gate_up(
    tokens: int, inputs: int, inner: int, *, experts: int, used: int, itemsize: int = 2, shared: int = 232_448
) -> Rows | Tiles:
    """Return the cut of the first op. shared: bytes of shared memory that a program may have."""
    block = max(256, power_of_two(inputs))
    if tokens <= ROWS_TOKENS and 2 * block <= CELLS:
        rows = min(2 if block <= 4096 else 1, power_of_two(inner))
        return Rows(rows, block, max(1, min(8, 2 * rows * block // 2048)))
    return choose_tiles(tokens, experts=experts, used=used, itemsize=itemsize, shared=shared)


def choose_down(
    tokens: int, inner: int, outputs: int, *, experts: int, used: int, itemsize: int = 2, shared: int = 232_448
) -> Rows | Tiles:
    """Return the cut of the second op. A program of rows.py reads the rows of all experts of a token at once."""
    block, choices = max(256, power_of_two(inner)), power_of_two(used)
    if tokens <= ROWS_TOKENS and choices * block <= CELLS:
        # Of 1, 2 and 4 rows two were the fastest for 1, 2 and 4 tokens (docs/log.md)
        rows = max(1, min(2, CELLS // (choices * block), power_of_two(outputs)))
        return Rows(rows, block, max(1, min(8, choices * rows * block // 4096)))
    return choose_tiles(tokens, experts=experts, used=used, itemsize=itemsize, shared=shared)


def choose_shared(tokens: int, inner: int, used: int, itemsize: int) -> SharedRows | None:
    """Return the cut of the second op on Hopper, or None where rows.py or tiles run. Of 1, 2 and 4 outputs one was the
    fastest for 1, 2 and 4 tokens of Qwen3-30B-A3B (docs/log.md). Wider experts than these were not timed."""
    choices, parts = power_of_two(used), -(-inner // SHARED_PART)
    fits = itemsize == 2 and inner % SHARED_PART == 0 and choices % 4 == 0 and choices * parts <= SHARED_PARTS
    return SharedRows(1) if tokens <= ROWS_TOKENS and fits else None


def choose_quantized(
    tokens: int, inputs: int, outputs: int, *, together: int, experts: int, used: int, per_byte: int, itemsize: int = 2
) -> Rows | Tiles | Widened:
    """Return the cut of an op with matrices in FP8 or codes.

    together: how many matrices a program of rows_quantized.py reads at once.
    """
    codes = per_byte > 1  # of which a row at a time takes more instructions than the matrix units' operands do
    if tokens <= ROWS_TOKENS and not (codes and together == 2):
        return _quantized_rows(inputs, outputs, together, per_byte)
    if tokens * used > WIDENED * experts:
        return Widened()
    each = tokens * used / min(experts, tokens * used)
    held = max(16, min(64, power_of_two(int(1.5 * each))))
    return Tiles(64, held, 128 if itemsize == 2 and inputs % 128 == 0 else 64, 4, 3)


def _quantized_rows(inputs: int, outputs: int, together: int, per_byte: int) -> Rows:
    """Return the cut of rows_quantized.py. A program reads 4 kB of a block, of codes 8 kB. Blocks are so long that the
    last one of a row is nearly full."""
    size = 4096 if per_byte == 1 else 8192
    block = 2048
    while block > 256 and -(-inputs // block) * block > 1.1 * inputs:
        block //= 2
    rows = max(1, min(power_of_two(size * per_byte // (together * block)), 8, power_of_two(outputs)))
    return Rows(rows, block, max(1, min(8, together * rows * block // per_byte * 4 // size)))


def row_tiles(pairs: int, experts: int, tokens: int) -> int:
    """Return the most tiles of `tokens` pairs that experts with `pairs` pairs in all can fill or begin."""
    begun = min(experts, pairs)
    return begun + (pairs - begun) // tokens


def choose_tiles(tokens: int, *, experts: int, used: int, itemsize: int, shared: int) -> Tiles:
    """Return the cut of tiles.py. A tile holds an expert's pairs, if counts are about even, so that most weights are
    read once."""
    each = tokens * used / min(experts, tokens * used)
    held = max(16, min(128, power_of_two(int(1.5 * each))))
    plan = Tiles(128, held, 64, 8, 4) if held >= 64 else Tiles(64, held, 128, 4, 4)
    while (plan.rows + plan.tokens) * plan.block * itemsize * plan.stages > shared and plan.stages > 1:
        plan = replace(plan, stages=plan.stages - 1)
    while (plan.rows + plan.tokens) * plan.block * itemsize * plan.stages > shared:
        plan = replace(plan, block=plan.block // 2)
    return plan

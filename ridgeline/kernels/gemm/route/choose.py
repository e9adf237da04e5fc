"""The cuts of the kernels that route: a plain function of shapes. It does not import torch.

up to 128 tokens  few.py: one launch; on Hopper up to 256, on the matrix units from 40 on
more              a norm, many.py's scores and choices, many.py's order: three launches
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.kernels.base.tuned import ShapeClass

FEW_TOKENS = 128  # beyond, three launches are faster than few.py on the vector units
MATRIX_TOKENS = range(40, 257)  # for which few.py is faster on the matrix units
MANY_EXPERTS = 128
MATRIX_BLOCK = 4096  # the longest row that 16 warps hold beside those of 16 experts
MOST_TOKENS, MOST_EXPERTS = 256, 1024  # for which few.py has memory where its programs meet
ONE_GROUP = 2048  # the largest tile of tokens by experts in which one program chooses for all tokens
CELLS = 8192  # the largest tile of tokens by experts that a program keeps in registers, with 8 warps

STAGED = 98_304  # bytes of shared memory for operands of 2 bytes that are on their way


@dataclass(frozen=True)
class Few:
    """A cut of few.py: a program multiplies `rows` experts' rows with `each` tokens.

    block: at least a whole row.
    tokens, experts: powers of two that cover them.
    group: tokens for which one program chooses, all of them or each program's, and at least one for each warp, so that
        no token is spread over warps, which would have to wait for each other with every choice.
    """

    rows: int
    each: int
    block: int
    tokens: int
    experts: int
    group: int
    warps: int
    matrix: bool = False

    @property
    def slices(self) -> int:
        """The slices of inputs, each of which a warp multiplies on the matrix units. 0: the vector units multiply."""
        return self.warps if self.matrix else 0


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

    @property
    def spread(self) -> bool:
        """True if a warp does not get whole rows of the product, since there is less than its 16 rows for each."""
        return self.tokens < 16 * self.warps


def class_of(tokens: int, width: int, experts: int) -> ShapeClass:
    """Return the class of shapes for which one cut is kept."""
    return ShapeClass("", (power_of_two(tokens), width, experts))


def choose(
    tokens: int, width: int, experts: int, *, fixed: bool = False, itemsize: int = 2, hopper: bool = False
) -> Few | Many:
    """Return the cut. fixed: it does not depend on the number of tokens. itemsize: of the router's numbers. hopper: the
    GPU is one of Hopper, where few.py was timed on the matrix units."""
    few = _matrix(tokens, width, experts) if hopper and not fixed and itemsize == 2 else None
    return few or (None if fixed else _few(tokens, width, experts)) or _many(experts)


def _matrix(tokens: int, width: int, experts: int) -> Few | None:
    """Return the cut of few.py on the matrix units, or None. A program takes the least that fills one of their
    products, 16 experts and 8 tokens, but 32 experts of many for many tokens. For up to 128 tokens of fewer experts
    than 128 the vector units were faster (benchmarks/results/h200-tune.jsonl)."""
    block, tile, padded = max(256, power_of_two(width)), power_of_two(tokens), max(16, power_of_two(experts))
    each, warps = 8, block // 256
    group = max(each, warps)
    if tokens not in MATRIX_TOKENS or group * padded > CELLS or not 1024 <= block <= MATRIX_BLOCK:
        return None
    if tokens <= FEW_TOKENS and padded < MANY_EXPERTS:
        return None
    rows = 32 if tokens > FEW_TOKENS and padded >= MANY_EXPERTS and block <= 2048 else 16
    return Few(rows, each, block, tile, padded, group, warps, matrix=True)


def _few(tokens: int, width: int, experts: int) -> Few | None:
    """Return the cut of few.py, or None. About 128 programs share the work of up to 16 tokens, one for each
    multiprocessor. A thread keeps up to 128 weights, which it asks for early, and 32 inputs of tokens: with more, a
    multiprocessor would hold fewer programs."""
    block, tile, padded = max(256, power_of_two(width)), power_of_two(tokens), max(16, power_of_two(experts))
    if tokens > FEW_TOKENS or padded > MOST_EXPERTS or block > 16_384:
        return None
    if tile == 1 and block <= MATRIX_BLOCK:  # wider rows were not timed so
        warps = max(1, min(8, block // 1024))
        return Few(4 if padded >= MANY_EXPERTS else 1, 1, block, 1, padded, warps, warps)
    short = tile == 8 and block <= 2048  # of which a warp takes more inputs, so that fewer have to meet
    warps = max(1, min(8, block // (1024 if short else 512)))
    kept = block // (32 * warps)  # inputs of a thread
    share = max(1, tile * padded // 128)
    each = max(1, min(2, tile, (64 if short else 32) // kept, share if tile == 8 else share // 2))
    rows = min(8, padded, 128 // kept, max(1, share // each))
    group = tile if tile <= 8 and tile * padded <= ONE_GROUP and not short else each
    return Few(rows, each, block, tile, padded, max(group, warps), warps)


def _many(experts: int) -> Many:
    """Return the cut of many.py. The matrix unit of a warpgroup takes 64 tokens, of which a warp then has whole rows.
    Fewer tokens a tile, for more programs, were slower even where these left most multiprocessors idle."""
    padded = max(16, power_of_two(experts))
    tile = max(16, min(64, CELLS // padded))
    block = 128 if padded <= 128 else 64 if padded <= 256 else 32
    stages = max(3, min(6, STAGED // (2 * (tile + padded) * block)))
    return Many(tile, padded, block, 4 if tile == 64 or tile * padded <= 4096 else 8, stages)


def power_of_two(n: int) -> int:
    """Return the least power of two that is no less than n."""
    return 1 << (n - 1).bit_length()

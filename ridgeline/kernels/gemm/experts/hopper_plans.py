"""The choice of the Hopper kernel for experts' products, and its cut: plain functions of shapes.

The counts of pairs are on the device, so a cut follows from their average, and kernels deal with any others. This
module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ridgeline.kernels.base.tuned import ShapeClass
from ridgeline.kernels.gemm.plain.choose import RING, power_of_two

# Pairs per expert up to which weights are streamed. At 32 of them tiles were 3 % faster, at 16 they were slower
# (Qwen3-30B-A3B on an H200, docs/log.md).
STREAMED = 24
PANEL = 64  # inputs in one swizzled row of shared memory, of a 16-bit type; twice as many of an 8-bit type
CODED_BLOCK = 128  # inputs of a block of codes


@dataclass(frozen=True)
class Stream:
    """A cut of hopper_stream.py: a tile is `rows` weight rows, 64 or 128 (of each half if gated), by up to `tokens`
    pairs.

    narrow: tiles with no more pairs than this take fewer columns, a multiple of 8.
    block: inputs of a stage.
    resident: programs on a multiprocessor, 1 to 4.
    apart: codes are multiplied by single warps, four of them, and one more gathers rows of x.
    """

    rows: int
    tokens: int
    narrow: int
    block: int
    stages: int
    resident: int = 1
    apart: bool = False

    @property
    def warps(self) -> int:
        """The warps that multiply."""
        return 4 if self.apart else self.rows // 16

    @property
    def gatherers(self) -> int:
        """The warps that gather rows of x."""
        return 1 if self.apart else 4

    @property
    def registers(self) -> int | None:
        """The registers per thread of all warps on average. None: one program may take all there are."""
        if self.resident == 1:
            return None
        warps = self.warps + self.gatherers + 1
        return 65_536 // self.resident // (32 * -(-warps // 4) * 4) // 8 * 8


@dataclass(frozen=True)
class Tiles:
    """A cut of hopper_tiles.py: tiles of 128 pairs by `rows` weight rows (half of them ups if gated)."""

    stages: int = 4
    rows: int = 256


def choose(pairs: int, experts: int, inputs: int, *, gated: bool) -> Stream | Tiles:
    """Return the cut for so many pairs."""
    average = pairs / experts
    if average > STREAMED:
        return Tiles()
    tokens = max(16, power_of_two(ceil(2 * average)))
    resident = 2 if tokens == 16 and not gated else 1
    return stream(64, tokens, max(8, tokens // 4), 64 if gated else 128, inputs, gated=gated, resident=resident)


def class_of(form: str, pairs: int, experts: int, inputs: int, outputs: int, *, gated: bool) -> ShapeClass:
    """Return the class of shapes for which one cut is kept. form: of the weights. outputs: of each half if gated."""
    return ShapeClass(form + (" gate" if gated else ""), (power_of_two(pairs), experts, inputs, outputs))


def choose_fp8(pairs: int, experts: int, inputs: int, *, gated: bool, blocked: bool) -> Stream | Tiles:
    """Return the cut for FP8 weights beside rounded activations. blocked: weights have a scale for each 128 × 128, so
    sums leave the matrix units, and a tile of 256 rows and its partial sums would not fit the registers."""
    cut = choose(pairs, experts, inputs, gated=gated)
    if isinstance(cut, Tiles):
        return Tiles(6, 128) if blocked else cut
    return stream(
        64, cut.tokens, cut.narrow, 128 if gated else 256, inputs, gated=gated, resident=cut.resident, itemsize=1
    )  # fmt: skip


def choose_coded(pairs: int, experts: int, *, gated: bool, levels: bool = False) -> Stream:
    """Return the cut for so many pairs with matrices of MXFP4, or of levels.

    Single warps multiply up to 16 columns, all levels, and products without a gate of MXFP4 with 32 columns. Tiles of
    128 rows by 32 pairs suit them then, even for 32 pairs of each expert, which two tiles take. Elsewhere two programs
    share a multiprocessor with 32 columns, so one makes operands while the other multiplies. Tiles of 128 pairs are the
    largest whose sums fit the registers, gated ones with 64 rows; making operands then takes a third of the products'
    time.
    """
    tokens = min(128, max(16, power_of_two(ceil(2 * pairs / experts))))
    if tokens == 16:
        return coded(64 if gated else 128, tokens, 8, gated=gated, resident=3, apart=True)
    if (levels and tokens <= 64) or (tokens == 32 and not gated):
        return coded(128, 32, 16, gated=gated, resident=2 if gated else 3, apart=True)
    if levels:
        return coded(64, 64, 32, gated=gated, resident=2, apart=True)
    rows = 128 if tokens == 64 or (tokens == 128 and not gated) else 64
    return coded(rows, tokens, tokens // 2, gated=gated, resident=2 if tokens == 32 else 1)


def choose_mxfp8(pairs: int, experts: int, inputs: int, *, gated: bool) -> Stream:
    """Return the cut for so many pairs with matrices of MXFP8 beside rounded activations. Sums leave the matrix units
    for each 32 inputs, so tiles stay as narrow as their registers ask for."""
    tokens = min(64, max(16, power_of_two(ceil(2 * pairs / experts))))
    resident = 2 if tokens == 16 and not gated else 1
    block = 128 if gated else 256
    return stream(64, tokens, max(8, tokens // 4), block, inputs, gated=gated, resident=resident, itemsize=1)


def stream(
    rows: int, tokens: int, narrow: int, block: int, inputs: int, *, gated: bool, resident: int = 1, itemsize: int = 2
) -> Stream:
    """Return a cut with as many stages as fit, and with two blocks of inputs at least (see `hopper.supports`)."""
    while block > PANEL * 2 // itemsize and inputs <= block:
        block //= 2
    stage = (rows * (2 if gated else 1) + tokens) * block * itemsize
    beside = tokens * block // 32 if itemsize == 1 else 0  # scales of x, where they travel along
    return Stream(rows, tokens, narrow, block, min(RING // resident // (stage + beside), 16), resident)


def coded(rows: int, tokens: int, narrow: int, *, gated: bool, resident: int, apart: bool = False) -> Stream:
    """Return a cut for MXFP4 or levels with as many stages as fit: of weights a byte for two inputs, and one for 32."""
    stage = rows * (2 if gated else 1) * (CODED_BLOCK // 2 + CODED_BLOCK // 32) + tokens * CODED_BLOCK * 2
    return Stream(rows, tokens, narrow, CODED_BLOCK, min(RING // resident // stage, 12), resident, apart)

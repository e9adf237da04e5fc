"""The choice of the Hopper kernel for experts' products, and its cut: plain functions of shapes.

The counts of pairs are on the device, so a cut follows from their average, and kernels deal with any others. This
module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

RING = 217_000  # bytes of shared memory for stages; barriers and turned tiles need a few thousand more
# Pairs per expert up to which weights are streamed. At 32 of them tiles were 3 % faster, at 16 they were slower
# (Qwen3-30B-A3B on an H200, docs/log.md).
STREAMED = 24
WIDE_BLOCK = 128  # inputs of a block whose weights are widened in registers
PANEL = 64  # inputs in one swizzled row of shared memory


@dataclass(frozen=True)
class Stream:
    """A cut of hopper_stream.py: a tile is `rows` weight rows, 64 or 128 (of each half if gated), by up to `tokens`
    pairs.

    narrow: tiles with no more pairs than this take fewer columns, a multiple of 8.
    block: inputs of a stage.
    resident: programs on a multiprocessor, 1 or 2.
    """

    rows: int
    tokens: int
    narrow: int
    block: int
    stages: int
    resident: int = 1

    @property
    def warps(self) -> int:
        """The warps that multiply."""
        return self.rows // 16

    @property
    def registers(self) -> int | None:
        """The registers per thread of all warps on average. None: one program may take all there are."""
        return None if self.resident == 1 else 65_536 // self.resident // (32 * (self.warps + 8)) // 8 * 8


@dataclass(frozen=True)
class Tiles:
    """A cut of hopper_tiles.py: tiles of 128 pairs by 256 weight rows (128 of each half if gated)."""

    stages: int = 4


def choose(pairs: int, experts: int, inputs: int, *, gated: bool) -> Stream | Tiles:
    """Return the cut for so many pairs."""
    average = pairs / experts
    if average > STREAMED:
        return Tiles()
    tokens = max(16, _power_of_two(2 * average))
    resident = 2 if tokens == 16 and not gated else 1
    return stream(64, tokens, max(8, tokens // 4), 64 if gated else 128, inputs, gated=gated, resident=resident)


def stream(rows: int, tokens: int, narrow: int, block: int, inputs: int, *, gated: bool, resident: int = 1) -> Stream:
    """Return a cut with as many stages as fit, and with two blocks of inputs at least (see `hopper.supports`)."""
    while block > PANEL and inputs <= block:
        block //= 2
    stage = (rows * (2 if gated else 1) + tokens) * block * 2
    return Stream(rows, tokens, narrow, block, min(RING // resident // stage, 16), resident)


def choose_widening(pairs: int, experts: int, inputs: int, *, gated: bool) -> Stream:
    """Return the cut for so many pairs with matrices in FP8 or codes."""
    tokens = min(64, max(16, _power_of_two(2 * pairs / experts)))
    return widening(64, tokens, max(8, tokens // 4), gated=gated)


def widening(rows: int, tokens: int, narrow: int, *, gated: bool, resident: int = 2) -> Stream:
    """Return a cut with as many stages as fit. A stage is counted as if numbers took a byte and a bit."""
    stage = rows * (2 if gated else 1) * (WIDE_BLOCK + 8) + tokens * WIDE_BLOCK * 2
    return Stream(rows, tokens, narrow, WIDE_BLOCK, min(RING // resident // stage, 16), resident)


def _power_of_two(n: float) -> int:
    return 1 << (max(1, -int(-n // 1)) - 1).bit_length()

"""The choice of the cut of fragments_kernel.py or wide.py, or of the library behind dequantized weights: plain
functions of shapes. They stand apart from the device code, so that tuning never touches the mathematics. It does not
import torch.

With `mma.sync` a tile of 16 × 16 codes takes the matrix units 1.6 cycles for each 8 tokens, and the memory 7 cycles, so
from about 32 tokens on time grows with them. Dequantizing writes and reads 2 bytes a code where the memory had half a
byte: 4.2 ms for Llama-3.1-8B on an H200, which is what 128 more tokens cost.
"""

from __future__ import annotations

from dataclasses import dataclass

FRAGMENT_TOKENS = 192  # with more tokens dequantizing and the library's product cost less than `mma.sync`
WIDE_TOKENS = range(17, 1025)  # for which the warpgroup products of wide.py cost least on Hopper
SHARED = 225_000  # bytes of shared memory that a program on Hopper takes


@dataclass(frozen=True)
class Cut:
    """A program owns `many` tiles of 16 rows (of each half if gated) by `tokens`, which its `warps` share by inputs.

    depth: units that each warp loads ahead; divides the steps of a warp.
    solo: one token is held in shared memory, normalised there if the op has a norm.
    """

    many: int
    tokens: int
    depth: int
    warps: int
    solo: bool = False

    @property
    def late(self) -> bool:
        """Return True if all of a unit's x would fill the registers."""
        return self.tokens > 16


def choose(tokens: int, tiles: int, units: int, *, words: int, parts: int, processors: int, same: bool = False) -> Cut:
    """Return the cut for a matrix of `tiles` tiles of 16 rows (of each half, if there are two parts). The bounds are
    those that were fastest on an H200.

    units: of a row. words: 32-bit registers of a thread that a unit's codes take.
    same: how inputs are shared, which decides the order of sums, does not depend on the tokens.
    """
    size = next(s for s in (8, 16, 32) if s >= min(tokens, 32))
    many = 2 if size == 32 or (size == 16 and parts == 1 and tiles >= 2 * processors) else 1
    many = many if tiles % many == 0 else 1
    warps = 8 if units >= 64 and tiles * 8 <= 24 * processors else 4
    if not same and parts == 2 and (tokens == 1 or size == 32):
        warps = 2  # tiles are many, so that programs with few warps fill the processors
    elif not same and size == 32:
        warps = 4
    while warps > 1 and warps > units:
        warps //= 2
    room = {8: 64, 16: 32, 32: 32}[size]  # registers for what is under way
    if parts == 2:
        room = 32 if tokens == 1 else 16
    elif size == 8 and tokens > 1 and warps == 8:
        room = 16
    elif size == 32 and units >= 64 and warps == 4:
        room = 64
    steps = -(-units // warps)
    depth = max(d for d in range(1, steps + 1) if steps % d == 0 and (d == 1 or d * words * parts * many <= room))
    return Cut(many, size, depth, warps, solo=tokens == 1)


@dataclass(frozen=True)
class Wide:
    """A cut of wide.py: a program's two warpgroups own `many` · 64 rows each, by `tokens`.

    depth: units of codes that are asked for ahead.
    stages: units of x in shared memory.
    split: programs that share the inputs of a tile.
    """

    many: int
    tokens: int
    depth: int
    stages: int
    split: int = 1

    @property
    def registers(self) -> int:
        """Return a thread's number of registers at its start: few enough that a program of a norm or of attention fits
        beside it, unless it needs them all."""
        return 128 if self.many * (64 + self.tokens // 2) <= 96 else 168

    def shared(self, inputs: int, bits: int, gated: bool) -> int:
        """Return the bytes of shared memory that are taken. inputs: of a unit."""
        codes = 16 * self.depth * self.many * inputs * bits
        return self.stages * self.tokens * inputs * 2 + codes + (256 * self.many * self.tokens if gated else 0)


def choose_wide(
    tokens: int, outputs: int, units: int, *, unit: int, bits: int, gated: bool, processors: int
) -> Wide | None:
    """Return the cut of wide.py with the least cycles by the model below, or None if the outputs are not whole tiles.
    units: of `unit` inputs, of a row.

    Of what `ridgeline bench sweep coded_linear` tried on an H200 it took the fastest, or one 11 % slower at most.
    """
    found = wide_cuts(tokens, outputs, units, unit=unit, bits=bits, gated=gated, processors=processors)
    return min(found, key=lambda cut: cycles(cut, tokens, outputs, units, unit, gated, processors), default=None)


def wide_cuts(
    tokens: int, outputs: int, units: int, *, unit: int, bits: int, gated: bool, processors: int
) -> list[Wide]:
    """Return the cuts that fit registers and shared memory, with as many codes ahead as go in."""
    found = []
    for size in (16, 32, 64, 128, 256):
        if (tokens <= 128 and size != max(16, 1 << (tokens - 1).bit_length())) or (tokens > 128 and size < 128):
            continue  # weights would be widened more often, or more tokens multiplied, than need be
        for many in (1, 2):
            each = (64 if gated else 128) * many
            if outputs % each or many * (64 + size // 2) > 192:
                continue
            programs = outputs // each * -(-tokens // size)
            for split in (1,) if gated else (1, 2, 4):
                whole = units % split == 0 and units >= 4 * split
                if split > 1 and (programs * split > processors or not whole or size // split < 8):
                    continue
                cuts = (
                    Wide(many, size, depth, stages, split)
                    for stages, depth in ((4, 8), (3, 8), (3, 6), (3, 4), (2, 6), (2, 4), (2, 3), (2, 2))
                )
                fitting = (cut for cut in cuts if cut.shared(unit, bits, gated) <= SHARED)
                found.extend(list(fitting)[:1])
    return found


def cycles(cut: Wide, tokens: int, outputs: int, units: int, unit: int, gated: bool, processors: int) -> float:
    """Return an estimate of the cycles that a product takes on a multiprocessor.

    In a step of two warpgroups the matrix units need half a cycle for each token of each 16 inputs of 64 rows, most of
    which is behind the instructions that make numbers of codes. The start of a program takes about 2 µs. Programs that
    share a tile write their sums, and the last of them reads and adds up all. The factors are those of 30 products with
    4-bit codes on an H200 (benchmarks/results/h200-split-products.jsonl), most of which they give within 15 %.
    """
    steps = units // cut.split
    items = outputs // ((64 if gated else 128) * cut.many) * -(-tokens // cut.tokens) * cut.split
    matrix = 2 * cut.many * (unit // 16) * cut.tokens / 2
    issued = (325 + 615 * cut.many) * unit / 128
    meeting = 32 * cut.many * cut.tokens * cut.split if cut.split > 1 else 0
    return -(-items // processors) * steps * (issued + 0.62 * matrix) + 4100 + meeting

"""The choice of the cut of fragments_kernel.py, or of the library behind dequantized weights: a plain function of
shapes. It stands apart from the device code, so that tuning never touches the mathematics. It does not import torch.

With `mma.sync` a tile of 16 × 16 codes takes the matrix units 1.6 cycles for each 8 tokens, and the memory 7 cycles, so
from about 32 tokens on time grows with them. Dequantizing writes and reads 2 bytes a code where the memory had half a
byte: 4.2 ms for Llama-3.1-8B on an H200, which is what 128 more tokens cost.
"""

from __future__ import annotations

from dataclasses import dataclass

FRAGMENT_TOKENS = 192  # with more tokens dequantizing and the library's product cost less


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
    """A cut of hopper.py: a program's two warpgroups own `many` · 64 rows each, by `tokens`.

    depth: units of codes that each warp loads ahead; divides the units of a part.
    stages: units of x in shared memory.
    split: programs that share the inputs of a tile.
    """

    many: int
    tokens: int
    depth: int
    stages: int
    split: int = 1

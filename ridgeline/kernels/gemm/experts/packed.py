"""Experts' matrices of MXFP4 in the order in which Hopper's matrix units take them from registers.

Rows come in tiles of 64, inputs in panels of 64. A panel of a tile is contiguous: 16 bytes for each of a warpgroup's
128 threads, which are its parts of four products' left operands, of 16 inputs each. A word of 16 bits holds the codes
of one place in the four products, with their bits where few moves make a bfloat16 of each:

    15 14 13 12 11 10 9  8 7 6  5 4 3  2 1 0
    s0 s3 s2 s1  -- 3 -  -- 0   -- 1   -- 2     (signs, and the three bits of magnitudes)

The scales of a panel follow each other likewise, four bytes for each two rows that a thread has.

Legend:
    O  outputs
    I  inputs
    G  groups of a row
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.gemm.codes.op import Coded

TILE = 64  # rows, and inputs of a panel
PIECE = 1 << 24  # codes that are put in order at once
MAGNITUDE = (6, 3, 0, 9)  # the place of the bits of each product's code
SIGN = (15, 12, 13, 14)


def fits(weight: Coded) -> bool:
    """Return True if the weight can be put in this order: MXFP4 with whole tiles and panels."""
    how, outputs = weight.format, weight.code_OB.shape[-2]
    known = how.values == "e2m1" and how.bits == 4 and how.group == 32 and not how.nested
    plain = known and weight.scale_OG.dtype == torch.uint8 and weight.zero_OG is None and weight.order_I is None
    return plain and outputs % TILE == 0 and weight.inputs % TILE == 0


class Packed(Coded):
    """A weight whose codes and scales lie in memory as this file says. Shapes and bytes are those of `Coded`."""

    __slots__ = ()

    def codes(self) -> Tensor:
        word = self.code_OB.contiguous().view(torch.int16).int().view(-1, self.inputs // TILE, TILE * 16)
        codes = [word >> MAGNITUDE[j] & 7 | (word >> SIGN[j] & 1) << 3 for j in range(4)]
        # tile, panel, warp, row of 8, thread of a row, half of the inputs, half of the rows, pair, product
        x = torch.stack(codes, -1).view(len(word), -1, 4, 8, 4, 2, 2, 2, 4)
        x = x.permute(0, 2, 6, 3, 1, 8, 5, 4, 7)
        return x.to(torch.uint8).reshape(*self.code_OB.shape[:-1], self.inputs)

    def scales(self) -> tuple[Tensor, Tensor | None]:
        x = self.scale_OG.reshape(-1, self.inputs // TILE, 4, 8, 2, 2)  # tile, panel, warp, row of 8, half, group
        plain = x.permute(0, 2, 4, 3, 1, 5).reshape(self.scale_OG.shape)
        return Coded(*self._replace(scale_OG=plain)).scales()


def packed(weight: Coded) -> Packed:
    """Return the weight in this order, in fresh memory. Raises ValueError if it does not fit."""
    if not fits(weight):
        raise ValueError(f"{weight.format} of {tuple(weight.code_OB.shape)} bytes does not fit tiles of {TILE} rows.")
    flat, panels = weight.code_OB.reshape(-1, weight.code_OB.shape[-1]), weight.inputs // TILE
    code_OB = torch.empty_like(flat)
    rows = max(TILE, PIECE // weight.inputs // TILE * TILE)
    for first in range(0, len(flat), rows):
        piece = weight._replace(code_OB=flat[first : first + rows])
        code_OB[first : first + rows] = _words(piece.codes(), panels)
    x = weight.scale_OG.reshape(-1, 4, 2, 8, panels, 2)
    scale_OG = x.permute(0, 4, 1, 3, 2, 5).reshape(weight.scale_OG.shape).contiguous()
    return Packed(*weight._replace(code_OB=code_OB.view(weight.code_OB.shape), scale_OG=scale_OG))


def _words(code_OI: Tensor, panels: int) -> Tensor:
    """Return the bytes of these rows: [O, I / 2]."""
    # tile, warp, half of the rows, row of 8, panel, product, half of the inputs, thread of a row, pair
    x = code_OI.view(-1, 4, 2, 8, panels, 4, 2, 4, 2).permute(0, 4, 1, 3, 7, 6, 2, 8, 5).int()
    word = sum((x[..., j] & 7) << MAGNITUDE[j] | x[..., j] >> 3 << SIGN[j] for j in range(4))
    assert isinstance(word, Tensor)
    return word.to(torch.int16).reshape(len(code_OI), -1).view(torch.uint8)

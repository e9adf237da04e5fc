"""Experts' matrices of MXFP4 and of four-bit levels in the order in which Hopper's matrix units take them.

Rows come in tiles of 64, inputs in panels of 64. A panel of a tile is contiguous: 16 bytes for each of a warpgroup's
128 threads, which are its parts of four products' left operands, of 16 inputs each. A word of 16 bits holds the codes
of one place in the four products, with their bits where few moves make a bfloat16 of each:

    15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    s0 m1 m1 m1 m3 m3 s2 m0 m0 m0 s1 m3 s3 m2 m2 m2     (signs, and the three bits of magnitudes)

The signs s1 and s3 are those of the other word of the two that make a register: turning it brings them to their number.

Of levels a word holds the four codes one after the other, the first product's in the low bits.

The scales of a panel, of levels those of two panels and their zeros, follow each other likewise, neighbours for each
two rows that a thread has.

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
PAIR = 128  # inputs of two panels
# Of each product's magnitudes, bits that stay together: which, and how far they move
FIELDS = (((7, 6),), ((7, 12),), ((7, 0),), ((3, 10), (4, 2)))
SIGNS = (15, 5, 9, 3)  # the places of signs
CROSSED = (False, True, False, True)  # whether that sign is in the other word of a register
GROUPS = (64, 128)  # inputs that share a scale of levels


def fits(weight: Coded) -> bool:
    """Return True if the weight can be put in this order: MXFP4 with whole tiles and panels; levels with whole tiles
    and pairs of panels, groups of `GROUPS`, scales of 16 bits, and zeros that are levels if there are any."""
    how, outputs, inputs = weight.format, weight.code_OB.shape[-2], weight.inputs
    if how.bits != 4 or how.nested or how.zeros == "minimum" or weight.order_I is not None or outputs % TILE:
        return False
    if how.values == "levels":
        halves = weight.scale_OG.dtype in (torch.float16, torch.bfloat16)
        return halves and how.group in GROUPS and inputs % PAIR == 0
    return how.values == "e2m1" and how.group == 32 and weight.scale_OG.dtype == torch.uint8 and inputs % TILE == 0


class Packed(Coded):
    """A weight whose codes and scales lie in memory as this file says. Shapes and bytes are those of `Coded`."""

    __slots__ = ()

    def codes(self) -> Tensor:
        word = self.code_OB.contiguous().view(torch.int16).int().view(-1, self.inputs // TILE, TILE * 16)
        if self.format.values == "levels":
            codes = [word >> 4 * j & 15 for j in range(4)]
        else:
            codes = [_code(word, j) for j in range(4)]
        # tile, panel, warp, row of 8, thread of a row, half of the inputs, half of the rows, pair, product
        x = torch.stack(codes, -1).view(len(word), -1, 4, 8, 4, 2, 2, 2, 4)
        x = x.permute(0, 2, 6, 3, 1, 8, 5, 4, 7)
        return x.to(torch.uint8).reshape(*self.code_OB.shape[:-1], self.inputs)

    def scales(self) -> tuple[Tensor, Tensor | None]:
        count, each = _scales_of(self)

        def plain(x_OG: Tensor) -> Tensor:
            x = x_OG.reshape(-1, count, 4, 8, 2, each)  # tile, place, warp, row of 8, half of the rows, group
            return x.permute(0, 2, 4, 3, 1, 5).reshape(x_OG.shape)

        zero_OG = None if self.zero_OG is None else plain(self.zero_OG)
        return Coded(*self._replace(scale_OG=plain(self.scale_OG), zero_OG=zero_OG)).scales()


def _code(word: Tensor, product: int) -> Tensor:
    """Return the codes of a product. word: words of a register are neighbours."""
    signed = word.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if CROSSED[product] else word
    return sum((word >> left & bits for bits, left in FIELDS[product]), (signed >> SIGNS[product] & 1) << 3)


def _scales_of(weight: Coded) -> tuple[int, int]:
    """Return (how many panels, or pairs of them, have their scales together in a row; groups of each)."""
    unit = PAIR if weight.format.values == "levels" else TILE
    return weight.inputs // unit, unit // weight.format.group


def packed(weight: Coded) -> Packed:
    """Return the weight in this order, in fresh memory. Raises ValueError if it does not fit."""
    if not fits(weight):
        raise ValueError(f"{weight.format} of {tuple(weight.code_OB.shape)} bytes does not fit tiles of {TILE} rows.")
    flat, panels = weight.code_OB.reshape(-1, weight.code_OB.shape[-1]), weight.inputs // TILE
    code_OB = torch.empty_like(flat)
    rows = max(TILE, PIECE // weight.inputs // TILE * TILE)
    for first in range(0, len(flat), rows):
        piece = weight._replace(code_OB=flat[first : first + rows])
        code_OB[first : first + rows] = _words(piece.codes(), panels, levels=weight.format.values == "levels")

    def together(x_OG: Tensor) -> Tensor:
        x = x_OG.reshape(-1, 4, 2, 8, *_scales_of(weight))
        return x.permute(0, 4, 1, 3, 2, 5).reshape(x_OG.shape).contiguous()

    zero_OG = None if weight.zero_OG is None else together(weight.zero_OG)
    code_OB = code_OB.view(weight.code_OB.shape)
    return Packed(*weight._replace(code_OB=code_OB, scale_OG=together(weight.scale_OG), zero_OG=zero_OG))


def _words(code_OI: Tensor, panels: int, *, levels: bool) -> Tensor:
    """Return the bytes of these rows: [O, I / 2]."""
    # tile, warp, half of the rows, row of 8, panel, product, half of the inputs, thread of a row, pair
    x = code_OI.view(-1, 4, 2, 8, panels, 4, 2, 4, 2).permute(0, 4, 1, 3, 7, 6, 2, 8, 5).int()
    word = sum(x[..., j] << 4 * j if levels else _placed(x[..., j], j) for j in range(4))
    assert isinstance(word, Tensor)
    return word.to(torch.int16).reshape(len(code_OI), -1).view(torch.uint8)


def _placed(code: Tensor, product: int) -> Tensor:
    """Return the words with the bits of a product's codes, of which the last dimension is that of a register."""
    signed = code.flip(-1) if CROSSED[product] else code
    return sum(((code & bits) << left for bits, left in FIELDS[product]), signed >> 3 << SIGNS[product])

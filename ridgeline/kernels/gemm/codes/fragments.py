"""Weights in codes, in the order in which the matrix units of NVIDIA's GPUs take them: one copy serves all kernels.

Rows come in tiles of 16, inputs in units of 128 or 256. A unit of a tile is contiguous: for each plane the words of 16
bits that the 32 threads of a warp need, 8 words (16 bytes) a thread. A word holds codes of one place in neighbouring
slices. A slice is 16 inputs, the depth of one product of the matrix units. Which input stands at which place of a slice
is free, as long as x is read in the same order; here each thread's inputs are neighbours.

Legend:
    O  outputs
    G  groups, or runs of 256 inputs, of a row
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.base.weight_format import CodedFormat
from ridgeline.kernels.gemm.codes.op import Coded

TILE = 16  # rows
SLICE = 16  # inputs
PIECE = 1 << 24  # codes that are turned at once when a weight is loaded


def unit(how: CodedFormat) -> int:
    """Return the number of inputs of a unit: enough to fill a word of the plane with the fewest bits."""
    return max(128, SLICE * 16 // min(how.planes()))


def span(how: CodedFormat) -> int:
    """Return the number of neighbouring inputs that the four threads of a row share: slices of one span are in one
    group."""
    return 32 if how.group % 32 == 0 else 16


def fits(weight: Coded) -> bool:
    """Return True if the weight can be put in this order: tiles and units are whole, and no slice is in two groups."""
    how, inputs, outputs = weight.format, weight.inputs, weight.code_OB.shape[-2]
    group = how.group or inputs
    whole = outputs % TILE == 0 and inputs % unit(how) == 0
    return whole and (group % unit(how) == 0 or (unit(how) % group == 0 and group % SLICE == 0))


class Fragments(Coded):
    """A weight whose codes, scales and zeros lie in memory as this file says. Shapes and bytes are those of `Coded`."""

    __slots__ = ()

    def codes(self) -> Tensor:
        how, rows = self.format, self.code_OB.shape[:-1]
        words = self.code_OB.view(torch.int16).flatten(0, -2).view(-1, self.inputs // unit(how), unit(how) * how.bits)
        codes, shift, start = None, 0, 0
        for bits in how.planes():
            size = unit(how) * bits
            plane = _outside(words[:, :, start : start + size].int() & 0xFFFF, bits, how) << shift
            codes = plane if codes is None else codes | plane
            start, shift = start + size, shift + bits
        assert codes is not None
        return codes.to(torch.uint8).view(*rows, self.inputs)

    def scales(self) -> tuple[Tensor, Tensor | None]:
        return Coded(*_each(self, _untwisted)).scales()


def arranged(weight: Coded) -> Fragments:
    """Return the weight in this order, in fresh memory. Raises ValueError if it does not fit."""
    if not fits(weight):
        raise ValueError(f"codes of {tuple(weight.code_OB.shape)} bytes do not fit tiles of {TILE} rows.")
    how, shape = weight.format, weight.code_OB.shape
    flat = weight.code_OB.flatten(0, -2)
    code_OB = torch.empty_like(flat)
    rows = max(TILE, PIECE // weight.inputs // TILE * TILE)
    for first in range(0, len(flat), rows):
        piece = weight._replace(code_OB=flat[first : first + rows])
        code_OB[first : first + rows] = _words(piece.codes(), how)
    return Fragments(*_each(weight._replace(code_OB=code_OB.view(shape)), _twisted))


def rows(weight: Coded, first: int, last: int) -> Coded:
    """Return some rows of a weight, whole tiles of them if it is in fragments."""
    tensors = {
        name: x[first:last]
        for name in ("code_OB", "scale_OG", "zero_OG", "outer_OS", "outer_minimum_OS")
        if (x := getattr(weight, name)) is not None
    }
    return weight._replace(**tensors)


def _each(weight: Coded, change: Callable[[Tensor, int], Tensor]) -> Coded:
    """Return the weight with its scales and zeros changed."""
    groups = unit(weight.format) // weight.format.group if weight.format.group else 0
    found: dict[str, Any] = {
        name: None if x is None else change(x, max(1, groups) if name.endswith("G") else 1)
        for name in ("scale_OG", "zero_OG", "outer_OS", "outer_minimum_OS")
        for x in [getattr(weight, name)]
    }
    return weight._replace(**found)


def _twisted(x_OG: Tensor, groups: int) -> Tensor:
    """Return the numbers of a tile's 16 rows side by side, `groups` groups (those of a unit) of a row together."""
    x = x_OG.flatten(0, -2).unflatten(0, (-1, TILE)).unflatten(2, (-1, groups))
    return x.transpose(1, 2).contiguous().view(x_OG.shape)


def _untwisted(x_OG: Tensor, groups: int) -> Tensor:
    x = x_OG.reshape(-1, x_OG.shape[-1] // groups, TILE, groups)
    return x.transpose(1, 2).contiguous().view(x_OG.shape)


def _words(code_OI: Tensor, how: CodedFormat) -> Tensor:
    """Return the bytes of these rows: [O, B]."""
    rows, planes, shift = len(code_OI), [], 0
    for bits in how.planes():
        plane = _inside(code_OI >> shift & (1 << bits) - 1, bits, how)
        word = sum(_placed(plane[:, :, :, j].int(), bits, j, how) for j in range(16 // bits))
        assert isinstance(word, Tensor)
        planes.append(word.to(torch.int16).flatten(2))
        shift += bits
    return torch.cat(planes, 2).view(torch.uint8).view(rows, -1)


def _placed(code: Tensor, bits: int, j: int, how: CodedFormat) -> Tensor:
    """Return the codes at the place of the j-th slice of a word. Magnitudes of E2M1 come first, then all signs."""
    return (code & 7) << 3 * j | code >> 3 << 12 + j if how.values == "e2m1" else code << bits * j


def _taken(word: Tensor, bits: int, j: int, how: CodedFormat) -> Tensor:
    if how.values == "e2m1":
        return word >> 3 * j & 7 | (word >> 12 + j & 1) << 3
    return word >> bits * j & (1 << bits) - 1


def _inside(plane_OI: Tensor, bits: int, how: CodedFormat) -> Tensor:
    """Return a plane as [tile, unit, words of a thread's slices, slice in a word, 256 places]."""
    slices, each = span(how) // SLICE, unit(how) // span(how)
    x = plane_OI.view(len(plane_OI) // TILE, 2, 8, -1, each, 4, slices, 2, 2)  # tile, half, row, unit, span, thread, …
    x = x.permute(0, 3, 4, 6, 2, 5, 7, 1, 8)  # tile, unit, span, slice, row, thread, half of the slice, half, pair
    return x.reshape(len(x), x.shape[1], -1, 16 // bits, 256)


def _outside(word: Tensor, bits: int, how: CodedFormat) -> Tensor:
    """Return the codes [O, I] of a plane's words, which are [tile, unit, words]."""
    slices, each = span(how) // SLICE, unit(how) // span(how)
    tiles, units = word.shape[:2]
    word = word.view(tiles, units, -1, 256)
    plane = torch.stack([_taken(word, bits, j, how) for j in range(16 // bits)], 3)
    x = plane.view(tiles, units, each, slices, 8, 4, 2, 2, 2).permute(0, 7, 4, 1, 2, 5, 3, 6, 8)
    return x.reshape(tiles * TILE, units * unit(how))

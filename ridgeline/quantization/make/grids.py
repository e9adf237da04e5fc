"""The numbers that weights can be rounded to.

A grid works on a slab: the inputs of a matrix that share a scale. Every method fits scales to slabs, rounds columns to
codes, and lets the grid put codes and scales together into the form that multiplies.

Legend:
    I  inputs
    O  outputs
    J  inputs of a slab
    G  slabs of a matrix
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ridgeline.kernels.base.weight_format import BLOCK, CodedFormat, Fp8Format
from ridgeline.kernels.gemm.codes.op import TABLES, Coded, packed
from ridgeline.kernels.gemm.fp8.op import LARGEST, Fp8
from ridgeline.kernels.gemm.plain.levels import LEVELS, Levels

LARGEST_E2M1 = 6.0
_E2M1_POWER = 2  # exponent of E2M1's largest number


Form = Coded | Fp8 | Levels


class Scales(NamedTuple):
    """The scale of each row of a slab, and its zero if the grid has zeros: float32 [O, 1]."""

    scale: Tensor
    zero: Tensor | None = None

    def where(self, mask_O1: Tensor, other: Scales) -> Scales:
        """Return these scales in rows of the mask, and others elsewhere."""
        zero = self.zero
        if zero is not None and other.zero is not None:
            zero = torch.where(mask_O1, zero, other.zero)
        return Scales(torch.where(mask_O1, self.scale, other.scale), zero)


class Rounded(NamedTuple):
    """A matrix after rounding.

    code_OI: codes of the grid, float32 whole numbers (or E4M3 numbers).
    scale_OG, zero_OG: of each slab of columns.
    order_I: the input that each column multiplies, if not in order.
    """

    code_OI: Tensor
    scale_OG: Tensor
    zero_OG: Tensor | None
    order_I: Tensor | None = None


class NumberGrid(Protocol):
    """One way to round.

    group: inputs that share a scale; 0: the whole row.
    """

    @property
    def group(self) -> int: ...

    def fitted(self, weight_OI: Tensor) -> NumberGrid:
        """Return the grid for this matrix, which may have a scale of its own."""

    def fit(self, slab_OJ: Tensor, shrink: float = 1.0) -> Scales:
        """Return scales with which `shrink` times the slab's range is reached, as they will be stored."""

    def stored(self, scale: Tensor) -> Tensor:
        """Return positive scales as they will be stored."""

    def codes(self, slab_OJ: Tensor, scales: Scales) -> Tensor:
        """Return the nearest codes."""

    def values(self, code_OJ: Tensor, scales: Scales) -> Tensor:
        """Return the numbers that codes stand for, float32."""

    def form(self, made: Rounded) -> Form:
        """Return the weight in the form that multiplies."""


def slab_width(grid: NumberGrid, inputs: int) -> int:
    """Return the inputs of a slab."""
    return grid.group or inputs


def dequantized(grid: NumberGrid, made: Rounded) -> Tensor:
    """Return the rounded weight in float32, with columns in the order of the inputs."""
    inputs = made.code_OI.shape[1]
    each = slab_width(grid, inputs)
    scale, zero = (None if x is None else x.repeat_interleave(each, 1)[:, :inputs] for x in made[1:3])
    assert scale is not None
    values_OI = grid.values(made.code_OI, Scales(scale, zero))
    if made.order_I is None:
        return values_OI
    return torch.empty_like(values_OI).index_copy_(1, made.order_I, values_OI)


def _positive(scale: Tensor) -> Tensor:
    """Return the scales, 1 instead of 0, which rows of zeros have."""
    return torch.where(scale == 0, 1.0, scale)


@dataclass(frozen=True)
class LevelGrid:
    """Whole numbers of `bits` bits, times a scale: weight = scale * (code - zero). Zero is the middle code if the grid
    is symmetric; otherwise each slab has its own, from 1 on, since GPTQ's files store one less.

    dtype: the scales' dtype. Scales of bfloat16 are exact in float16 too (from 2^-17 on), which GPTQ's and AWQ's files
        hold.
    """

    bits: int
    group: int
    symmetric: bool
    dtype: torch.dtype

    @property
    def last(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def fitted(self, weight_OI: Tensor) -> LevelGrid:
        return self

    def fit(self, slab_OJ: Tensor, shrink: float = 1.0) -> Scales:
        if self.symmetric:
            largest_O1 = slab_OJ.abs().amax(1, keepdim=True) * shrink
            return Scales(self.stored(_positive(2 * largest_O1 / self.last)))
        low_O1 = slab_OJ.amin(1, keepdim=True).clamp(max=0) * shrink
        high_O1 = slab_OJ.amax(1, keepdim=True).clamp(min=0) * shrink
        scale_O1 = self.stored(_positive((high_O1 - low_O1) / self.last))
        return Scales(scale_O1, (-low_O1 / scale_O1).round().clamp(1, self.last))

    def stored(self, scale: Tensor) -> Tensor:
        half = scale.to(self.dtype).to(torch.float16).float()
        return half.clamp(min=2.0**-24, max=torch.finfo(torch.float16).max)

    def codes(self, slab_OJ: Tensor, scales: Scales) -> Tensor:
        zero = self.middle if scales.zero is None else scales.zero
        return (slab_OJ / scales.scale + zero).round().clamp(0, self.last)

    def values(self, code_OJ: Tensor, scales: Scales) -> Tensor:
        zero = self.middle if scales.zero is None else scales.zero
        return (code_OJ - zero) * scales.scale

    def form(self, made: Rounded) -> Coded:
        how = CodedFormat(bits=self.bits, group=self.group, zeros="middle" if self.symmetric else "levels")
        zero_OG = None if made.zero_OG is None else made.zero_OG.to(torch.uint8)
        code_OB = packed(made.code_OI.to(torch.uint8), self.bits)
        order_I = None if made.order_I is None else made.order_I.int()
        return Coded(code_OB, made.scale_OG.to(self.dtype), zero_OG, None, None, None, order_I, how)


@dataclass(frozen=True)
class TableGrid:
    """Sixteen values, times a scale: NF4 (QLoRA, Dettmers et al., arXiv 2305.14314), MXFP4 (OCP Microscaling Formats
    1.0) and NVFP4.

    scales: the dtype of scales. float32; uint8 for powers of two; float8_e4m3fn for scales that a scale of the whole
        matrix multiplies.
    whole: that scale.
    """

    table: str
    group: int
    scales: torch.dtype
    whole: float = 1.0

    def fitted(self, weight_OI: Tensor) -> TableGrid:
        if self.scales != torch.float8_e4m3fn:
            return self
        largest = float(weight_OI.abs().max())
        return replace(self, whole=largest / (LARGEST * LARGEST_E2M1) or 1.0)

    def fit(self, slab_OJ: Tensor, shrink: float = 1.0) -> Scales:
        largest_O1 = _positive(slab_OJ.abs().amax(1, keepdim=True) * shrink)
        if self.scales == torch.uint8:  # the standard's rule: powers of two that let the largest exponents meet
            return Scales(self.stored(torch.exp2(torch.floor(torch.log2(largest_O1)) - _E2M1_POWER)))
        return Scales(self.stored(largest_O1 / max(TABLES[self.table])))

    def stored(self, scale: Tensor) -> Tensor:
        if self.scales == torch.uint8:
            return torch.exp2(torch.log2(scale).round().clamp(-127, 127))
        if self.scales == torch.float8_e4m3fn:
            least = 2.0**-9  # E4M3's smallest number
            return (scale / self.whole).clamp(least, LARGEST).to(self.scales).float() * self.whole
        return scale.to(self.scales).float()

    def codes(self, slab_OJ: Tensor, scales: Scales) -> Tensor:
        values, codes = torch.tensor(TABLES[self.table], device=slab_OJ.device).sort(stable=True)
        middles = (values[1:] + values[:-1]) / 2
        return codes[torch.bucketize(slab_OJ / scales.scale, middles)].float()

    def values(self, code_OJ: Tensor, scales: Scales) -> Tensor:
        return torch.tensor(TABLES[self.table], device=code_OJ.device)[code_OJ.int()] * scales.scale

    def form(self, made: Rounded) -> Coded:
        how = CodedFormat(bits=4, group=self.group, values="nf4" if self.table == "nf4" else "e2m1")
        scale_OG, whole = made.scale_OG, None
        if self.scales == torch.uint8:
            scale_OG = (torch.log2(scale_OG) + 127).round().to(torch.uint8)
        elif self.scales == torch.float8_e4m3fn:
            scale_OG = (scale_OG / self.whole).to(self.scales)
            whole = torch.tensor(self.whole, device=scale_OG.device)
        order_I = None if made.order_I is None else made.order_I.int()
        return Coded(packed(made.code_OI.to(torch.uint8), 4), scale_OG, None, None, None, whole, order_I, how)


@dataclass(frozen=True)
class Int8Grid:
    """The levels -127 … 127 with a scale for each output."""

    group: int = 0

    def fitted(self, weight_OI: Tensor) -> Int8Grid:
        return self

    def fit(self, slab_OJ: Tensor, shrink: float = 1.0) -> Scales:
        return Scales(_positive(slab_OJ.abs().amax(1, keepdim=True) * shrink / LEVELS))

    def stored(self, scale: Tensor) -> Tensor:
        return scale

    def codes(self, slab_OJ: Tensor, scales: Scales) -> Tensor:
        return (slab_OJ / scales.scale).round().clamp(-LEVELS, LEVELS)

    def values(self, code_OJ: Tensor, scales: Scales) -> Tensor:
        return code_OJ * scales.scale

    def form(self, made: Rounded) -> Levels:
        return Levels(made.code_OI.to(torch.int8), made.scale_OG[:, 0].contiguous())


@dataclass(frozen=True)
class Fp8Grid:
    """E4M3 numbers with a scale for each output, or for each block of 128 outputs by 128 inputs."""

    format: Fp8Format

    @property
    def group(self) -> int:
        return BLOCK if self.format.block else 0

    def fitted(self, weight_OI: Tensor) -> Fp8Grid:
        return self

    def fit(self, slab_OJ: Tensor, shrink: float = 1.0) -> Scales:
        largest_O1 = slab_OJ.abs().amax(1, keepdim=True)
        if self.format.block:
            rows = len(largest_O1)
            padded = torch.nn.functional.pad(largest_O1[:, 0], (0, -rows % BLOCK)).unflatten(0, (-1, BLOCK))
            largest_O1 = padded.amax(1, keepdim=True).repeat_interleave(BLOCK, 0)[:rows]
        return Scales(_positive(largest_O1 * shrink / LARGEST))

    def stored(self, scale: Tensor) -> Tensor:
        return scale

    def codes(self, slab_OJ: Tensor, scales: Scales) -> Tensor:
        return (slab_OJ / scales.scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()

    def values(self, code_OJ: Tensor, scales: Scales) -> Tensor:
        return code_OJ * scales.scale

    def form(self, made: Rounded) -> Fp8:
        scale_SC = made.scale_OG[::BLOCK].contiguous() if self.format.block else made.scale_OG
        return Fp8(made.code_OI.to(torch.float8_e4m3fn), scale_SC, None, self.format)

"""A linear map of a weight in codes of a few bits, alone or with the norm before it and the gated activation behind it.

Legend:
    T  tokens
    I  inputs
    O  outputs
    B  bytes of a row of codes
    G  groups of a row
    S  runs of 256 inputs of a row
    N  codes of a plane in a byte
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, has_byte_products, on_gpu
from ridgeline.kernels.base.weight_format import CodedFormat
from ridgeline.kernels.gemm.plain.op import linear, norm_linear_of

TABLES = {
    "e4m3": tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()),
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    "fp4": (
        0.0, 0.0625 / 12, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25,
        -0.0, -0.0625 / 12, -2 / 3, -1.0, -1 / 3, -0.5, -1 / 6, -0.25,
    ),
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    # GGUF's IQ1, IQ2, IQ3_XXS and IQ3_S: magnitudes of their grids (IQ2's in eighths, IQ3_XXS' in quarters), then the
    # negative ones. Those of IQ1 are -1, 0 and 1, moved up by an eighth, then down
    "iq1": (-0.875, 0.125, 1.125, *(0.0,) * 5, -1.125, -0.125, 0.875, *(0.0,) * 5),
    "iq2": (1.0, 3.125, 5.375, *(0.0,) * 5, -1.0, -3.125, -5.375, *(0.0,) * 5),
    "iq3": (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.5, -1.0, -3.0, -5.0, -7.0, -9.0, -11.0, -13.0, -15.5),
    "iq3_s": (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, -1.0, -3.0, -5.0, -7.0, -9.0, -11.0, -13.0, -15.0),
    "iq4": (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
}  # fmt: skip


class Coded(NamedTuple):
    """A weight in codes. Stacks of experts have one more dimension in front of each tensor.

    code_OB: uint8. The planes of a row follow each other, the one of the low bits first; within a plane the codes
        follow each other, the first in the low bits of a byte.
    scale_OG: float16, bfloat16, float32 or float8_e4m3fn; uint8 exponents of two with the bias 127 (E8M0); or int8 if
        scales are nested.
    zero_OG: uint8 if zeros are "levels"; minima in a dtype of scales if they are "minimum" (int8 if nested); else None.
    outer_OS: float16, if scales are nested: a scale is outer_OS * scale_OG.
    outer_minimum_OS: float16, likewise for minima.
    scale: float32 [], a factor of the whole weight (NVFP4 has one), or None.
    order_I: int32, if the columns are not in the order of the inputs: column c multiplies input order_I[c].
    """

    code_OB: Tensor
    scale_OG: Tensor
    zero_OG: Tensor | None
    outer_OS: Tensor | None
    outer_minimum_OS: Tensor | None
    scale: Tensor | None
    order_I: Tensor | None
    format: CodedFormat

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self if isinstance(x, Tensor))

    @property
    def stored(self) -> Tensor:
        return self.code_OB

    @property
    def inputs(self) -> int:
        return self.code_OB.shape[-1] * 8 // self.format.bits

    def codes(self) -> Tensor:
        """Return the codes, uint8 [..., O, I]."""
        planes, start, shift = self.format.planes(), 0, 0
        codes = None
        for bits in planes:
            size = self.inputs * bits // 8
            plane = unpacked(self.code_OB[..., start : start + size], bits) << shift
            codes = plane if codes is None else codes | plane
            start, shift = start + size, shift + bits
        assert codes is not None
        return codes

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """Return the scale of each group, and its zero or minimum: float32 [..., O, G]."""
        scale_OG = exponents(self.scale_OG) if self.scale_OG.dtype == torch.uint8 else self.scale_OG.float()
        zero_OG = None if self.zero_OG is None else self.zero_OG.float()
        if self.outer_OS is not None:
            each = scale_OG.shape[-1] // self.outer_OS.shape[-1]
            scale_OG = scale_OG * self.outer_OS.float().repeat_interleave(each, -1)
            if zero_OG is not None and self.outer_minimum_OS is not None:
                zero_OG = zero_OG * self.outer_minimum_OS.float().repeat_interleave(each, -1)
        return (scale_OG if self.scale is None else scale_OG * self.scale), zero_OG

    def dequantized(self) -> Tensor:
        """Return the weight in float32, with its columns in the order of the inputs."""
        how, codes = self.format, self.codes()
        scale_OG, zero_OG = self.scales()
        each = self.inputs // scale_OG.shape[-1]
        scale, zero = (None if x is None else x.repeat_interleave(each, -1) for x in (scale_OG, zero_OG))
        assert scale is not None
        if how.values != "levels":
            weight = scale * torch.tensor(TABLES[how.values], device=codes.device)[codes.int()]
        elif how.zeros == "minimum":
            assert zero is not None
            weight = scale * codes.float() - zero
        else:
            weight = scale * (codes.float() - (2.0 ** (how.bits - 1) if zero is None else zero))
        if self.order_I is None:
            return weight
        return torch.empty_like(weight).index_copy_(-1, self.order_I.long(), weight)


def unpacked(bytes_B: Tensor, bits: int) -> Tensor:
    """Return the codes of a plane: uint8 [..., 8 / bits · B], the first from the low bits of a byte."""
    shift_N = torch.arange(0, 8, bits, dtype=torch.uint8, device=bytes_B.device)
    return (bytes_B.unsqueeze(-1) >> shift_N & (1 << bits) - 1).flatten(-2)


def packed(code_OI: Tensor, bits: int) -> Tensor:
    """Return the codes of a weight in the layout of `Coded.code_OB`, for codes of `bits` bits."""
    planes, shift = [], 0
    for width in CodedFormat(bits=bits, group=0).planes():
        plane = code_OI.to(torch.uint8) >> shift & (1 << width) - 1
        count = 8 // width
        planes.append(reduce(or_, (plane[..., n::count] << n * width for n in range(count))))
        shift += width
    return torch.cat(planes, -1)


def exponents(scale: Tensor) -> Tensor:
    """Return the powers of two that E8M0 bytes stand for, in float32; 255 stands for NaN."""
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
    powers[255] = torch.nan
    return powers.to(scale.device)[scale.int()]


def coded_linear(x_TI: Tensor, weight: Coded, bias_O: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias: [T, O] in the dtype of `x_TI`. Sums are in float32.

    An implementation may round the dequantized weight to x's dtype. One for CPUs may round activations to int8, each 32
    neighbouring inputs of a token to steps of 1/127 of their largest magnitude.
    """
    return linear(x_TI, weight.dequantized(), bias_O)


coded_norm_linear = norm_linear_of(coded_linear)

W4 = CodedFormat(bits=4, group=128)
W4_ZEROS = CodedFormat(bits=4, group=128, zeros="levels")
W8 = CodedFormat(bits=8, group=128)
NF4 = CodedFormat(bits=4, group=64, values="nf4")
MXFP4 = CodedFormat(bits=4, group=32, values="e2m1")
MXFP8 = CodedFormat(bits=8, group=32, values="e4m3")
NVFP4 = CodedFormat(bits=4, group=16, values="e2m1")
Q2_K = CodedFormat(bits=2, group=16, zeros="minimum", nested=True)
Q3_K = CodedFormat(bits=3, group=16, nested=True)
Q4_K = CodedFormat(bits=4, group=32, zeros="minimum", nested=True)
Q5_K = CodedFormat(bits=5, group=32, zeros="minimum", nested=True)
Q6_K = CodedFormat(bits=6, group=16, nested=True)
IQ4_XS = CodedFormat(bits=4, group=32, values="iq4", nested=True)
IQ2_S = CodedFormat(bits=4, group=16, values="iq2", nested=True)


CODED_LINEAR = Op(
    "coded_linear",
    coded_linear,
    (
        Implementation("triton", "ridgeline.kernels.gemm.codes.triton:coded_linear", on_gpu),
        Implementation("panels", "ridgeline.kernels.gemm.codes.panels:coded_linear", has_byte_products),
        Implementation("torch", "ridgeline.kernels.gemm.codes.torch_ops:coded_linear"),
        Implementation("batch_invariant", "ridgeline.kernels.gemm.codes.batch_invariant:coded_linear", on_gpu),
    ),
    matrix=True,
)
CODED_NORM_LINEAR = CODED_LINEAR.fused("coded_norm_linear", coded_norm_linear)

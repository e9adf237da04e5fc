"""Descriptions, for kernels, of experts' matrices in FP8 or codes, and the reading of stored numbers.

A stored number becomes a float32 by moving its bits: the exponent's bits land at the low end of a float32's, so the
number is right but for a power of two, 2^-120 for E4M3 and 2^-126 for E2M1. `LIFT` is the root of that power. It is
applied twice, once to scales and once to x or to sums, because neither factor nor a product may leave float32's range.
GPUs that know E4M3 convert it with one instruction for two numbers, where moving bits takes five for one; nothing is
missing then.

Legend:
    E  experts
    O  outputs of an expert's matrix
    G  groups of a row
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.launch import compute_capability
from ridgeline.kernels.base.weight_format import BLOCK
from ridgeline.kernels.gemm.experts.matrices import Quantized, is_mxfp8
from ridgeline.kernels.gemm.experts.packed import Packed
from ridgeline.kernels.gemm.fp8.op import Fp8

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Form:
    """A form of matrices, which a kernel is compiled for.

    kind: "fp8"; "levels" or "e2m1" in four bits.
    group: inputs that share a scale.
    span: outputs that share a row of scales.
    scales: "float", "e8m0" or "e4m3".
    zeros: there is a zero for each scale; otherwise levels have their zero in the middle.
    factor: there is a factor for each expert.
    native: E4M3 numbers are converted by the GPU's own instructions.
    """

    kind: str
    group: int
    span: int = 1
    scales: str = "float"
    zeros: bool = False
    factor: bool = False
    native: bool = False

    @property
    def per_byte(self) -> int:
        """Inputs in a byte."""
        return 1 if self.kind == "fp8" else 2

    @property
    def run(self) -> int:
        """The bytes that a thread of rows_quantized.py adds up by itself."""
        return min(16, self.group // self.per_byte)

    @property
    def lift(self) -> float:
        """The root of what stored numbers are too small by."""
        return 1.0 if self.native else {"fp8": 2.0**60, "e2m1": 2.0**63, "levels": 1.0}[self.kind]

    def constants(self) -> dict[str, Any]:
        return {"KIND": self.kind, "GROUP": self.group, "SPAN": self.span, "SCALES": self.scales} | {
            "ZEROS": self.zeros, "FACTOR": self.factor, "LIFT": self.lift,
        }  # fmt: skip


PLAIN = {"KIND": "", "GROUP": 1, "SPAN": 1, "SCALES": "", "ZEROS": False, "FACTOR": False, "LIFT": 1.0}


def form_of(weight: Quantized) -> Form | None:
    """Return the form of matrices that the portable kernels can read, or None."""
    if isinstance(weight, Packed):
        return None
    if isinstance(weight, Fp8):
        inputs = weight.weight_OI.shape[-1]
        native = compute_capability(weight.weight_OI.device) >= (8, 9)
        group, span = (BLOCK, BLOCK) if weight.format.block else (inputs, 1)
        return Form("fp8", group, span, native=native)
    how, inputs = weight.format, weight.inputs
    group = how.group or inputs
    if is_mxfp8(weight):
        native = compute_capability(weight.code_OB.device) >= (8, 9)
        return Form("fp8", group, 1, "e8m0", factor=weight.scale is not None, native=native)
    fits = how.bits == 4 and not how.nested and how.values in ("levels", "e2m1") and how.zeros != "minimum"
    cut = inputs % 32 == 0 and (group == inputs or (group >= 16 and group & (group - 1) == 0))
    known = weight.scale_OG.dtype in (*FLOATS, torch.uint8, torch.float8_e4m3fn)
    if weight.order_I is not None or not (fits and cut and known):
        return None
    scales = {torch.uint8: "e8m0", torch.float8_e4m3fn: "e4m3"}.get(weight.scale_OG.dtype, "float")
    return Form(how.values, group, 1, scales, weight.zero_OG is not None, weight.scale is not None)


def tensors(weight: Quantized) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (stored bytes, scales, zeros, factors) for a kernel. Any tensor will do in place of one that is not
    there."""
    if isinstance(weight, Fp8):
        stored = weight.weight_OI.view(torch.uint8).contiguous()
        return stored, weight.scale_SC.contiguous(), stored, stored
    scale = weight.scale_OG.contiguous()
    scale = scale.view(torch.uint8) if scale.dtype == torch.float8_e4m3fn else scale
    zero = scale if weight.zero_OG is None else weight.zero_OG.contiguous()
    return weight.code_OB.contiguous(), scale, zero, scale if weight.scale is None else weight.scale


@triton.jit
def e4m3(byte, LIFT: tl.constexpr):
    """Return the values of E4M3 bytes over LIFT². (Bits that are moved do not tell NaN from 480: files that have it are
    refused.)"""
    if LIFT == 1.0:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        tl.static_assert(LIFT == 1152921504606846976.0)  # 2^60
        word = byte.to(tl.uint32)
        return (((word & 0x80) << 24) | ((word & 0x7F) << 20)).to(tl.float32, bitcast=True)


@triton.jit
def e2m1(byte, SHIFT: tl.constexpr):
    """Return the values of the E2M1 codes from bit SHIFT (0 or 4) on, times 2^-126."""
    word = byte.to(tl.uint32)
    return (((word << (28 - SHIFT)) & 0x80000000) | ((word << (22 - SHIFT)) & 0x01C00000)).to(tl.float32, bitcast=True)


@triton.jit
def level(byte, SHIFT: tl.constexpr):
    """Return the levels in the four bits from SHIFT on, plus 128."""
    word = byte.to(tl.uint32)
    return (((word << (16 - SHIFT)) & 0x000F0000) | 0x43000000).to(tl.float32, bitcast=True)


@triton.jit
def scale_at(expert, line, group, LINES: tl.constexpr, GROUPS: tl.constexpr):
    """Return the index of a group's scale. line: a row of scales of the expert, of LINES."""
    return (expert * LINES + line) * GROUPS + group


@triton.jit
def load_scales(pointers, mask, SCALES: tl.constexpr):
    """Load scales as float32."""
    stored = tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0)
    if SCALES == "e8m0":
        return (stored.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    elif SCALES == "e4m3":
        return e4m3(stored, 1152921504606846976.0) * 1.329227995784916e36  # 2^60, and its square
    else:
        return stored.to(tl.float32)

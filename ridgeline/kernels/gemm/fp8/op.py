"""A linear map of an FP8 weight, alone or with the norm before it and the gated activation behind it.

The methods: FP8 Formats for Deep Learning (Micikevicius et al., arXiv 2209.05433) with one scale for each output and
each token, and DeepSeek-V3's blocks (arXiv 2412.19437), whose partial sums are promoted to float32.

Legend:
    T  tokens
    I  inputs
    O  outputs
    S  rows of scales: O, or blocks of 128 outputs
    C  columns of scales: 1, or blocks of 128 inputs
    B  inputs of a block
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, Platform, on_gpu
from ridgeline.kernels.base.weight_format import BLOCK, Fp8Format
from ridgeline.kernels.gemm.plain.op import norm_linear_of
from ridgeline.kernels.gemm.plain.rounded import Rounded

LARGEST = 448.0  # of E4M3
BY_TOKEN = Fp8Format()
IN_BLOCKS = Fp8Format(block=True, activations="block")


class Fp8(NamedTuple):
    """A weight in FP8. Stacks of experts have one more dimension in front of each tensor.

    weight_OI: float8_e4m3fn.
    scale_SC: float32 [O, 1], or [ceil(O / 128), ceil(I / 128)] in blocks.
    x_scale: float32 [], the scale of all activations if they are "static".
    """

    weight_OI: Tensor
    scale_SC: Tensor
    x_scale: Tensor | None
    format: Fp8Format

    @property
    def nbytes(self) -> int:
        return self.weight_OI.nbytes + self.scale_SC.nbytes

    @property
    def stored(self) -> Tensor:
        return self.weight_OI

    def dequantized(self) -> Tensor:
        """Return the weight in float32, of any number of dimensions."""
        weight_OI, scale_SC = self.weight_OI.float(), self.scale_SC
        if self.format.block:
            rows, columns = weight_OI.shape[-2:]
            scale_SC = scale_SC.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
        return weight_OI * scale_SC


def round_activations(x_TI: Tensor, fp8: Fp8Format, x_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x in E4M3 and its float32 scales: [T, 1], or [T, ceil(I / 128)] in blocks.

    A scale is the largest magnitude over 448, or `x_scale`, with which larger numbers saturate. Zeros have the scale 1,
    so a row of zeros stays one. NaN stays NaN, and an infinity makes its row (or block) NaN.
    """
    x = x_TI.float()
    if fp8.activations == "static":
        assert x_scale is not None
        scale_TC = x_scale.float().expand(len(x), 1)
        largest = x.new_tensor(LARGEST)
        return (x / scale_TC).clamp(-largest, largest).to(torch.float8_e4m3fn), scale_TC
    if fp8.activations == "block":
        rest = -x.shape[1] % BLOCK
        x_TCB = torch.nn.functional.pad(x, (0, rest)).unflatten(1, (-1, BLOCK))
    else:
        x_TCB = x[:, None]
    scale_TC = x_TCB.abs().amax(-1) / LARGEST
    scale_TC = torch.where(scale_TC == 0, 1.0, scale_TC)
    rounded = (x_TCB / scale_TC[..., None]).clamp(-LARGEST, LARGEST).flatten(1)[:, : x.shape[1]]
    return rounded.to(torch.float8_e4m3fn), scale_TC


def rounded(x_TI: Tensor, fp8: Fp8Format, x_scale: Tensor | None) -> Tensor:
    """Return x after rounding, in float32."""
    if fp8.activations is None:
        return x_TI.float()
    q_TI, scale_TC = round_activations(x_TI, fp8, x_scale)
    each = BLOCK if fp8.activations == "block" else x_TI.shape[1]
    return q_TI.float() * scale_TC.repeat_interleave(each, 1)[:, : x_TI.shape[1]]


def in_buffer(y_TO: Tensor, buffer: Rounded | None) -> Tensor:
    """Return y, or if there is a buffer the numbers in E4M3 that are written there."""
    if buffer is None:
        return y_TO
    q_TO, scale_TC = round_activations(y_TO, IN_BLOCKS, None)
    buffer.scale.copy_(scale_TC.T)
    return buffer.q_TI.copy_(q_TO)


def fp8_linear(x_TI: Tensor | Rounded, weight: Fp8, bias_O: Tensor | None) -> Tensor:
    """Return round(x) · weightᵀ + bias: [T, O] in the dtype of x. Sums are in float32.

    An implementation may leave activations unrounded, which is nearer to the truth. Those which the op before has
    rounded are taken as they are, whatever the format says.
    """
    x = x_TI.wide() if isinstance(x_TI, Rounded) else rounded(x_TI, weight.format, weight.x_scale)
    y_TO = x @ weight.dequantized().T
    if bias_O is not None:
        y_TO = y_TO + bias_O.float()
    return y_TO.to(x_TI.dtype)


fp8_norm_linear = norm_linear_of(fp8_linear, in_buffer)


def to_fp8(matrix_OI: Tensor, fp8: Fp8Format, x_scale: Tensor | None = None) -> Fp8:
    """Round a matrix, or a stack of them, to FP8: scales are the largest magnitudes over 448."""
    matrix = matrix_OI.float()
    if not fp8.block:
        scale_SC = (matrix.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        return Fp8((matrix / scale_SC).to(torch.float8_e4m3fn), scale_SC, x_scale, fp8)
    rows, columns = matrix.shape[-2:]
    padded = torch.nn.functional.pad(matrix, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., S, 128, C, 128]
    scale_SC = (blocks.abs().amax((-3, -1)) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    levels = (blocks / scale_SC[..., :, None, :, None]).flatten(-4, -3).flatten(-2)[..., :rows, :columns]
    return Fp8(levels.contiguous().to(torch.float8_e4m3fn), scale_SC, x_scale, fp8)


def has_e4m3(platform: Platform) -> bool:
    """Return True on GPUs for which Triton compiles E4M3: NVIDIA's from Ada and Hopper on, and AMD's."""
    return on_gpu(platform) and not platform.arch.startswith(("sm_80", "sm_86", "sm_87"))


FP8_LINEAR = Op(
    "fp8_linear",
    fp8_linear,
    (
        Implementation("triton", "ridgeline.kernels.gemm.fp8.triton:fp8_linear", has_e4m3),
        Implementation("torch", "ridgeline.kernels.gemm.fp8.torch_ops:fp8_linear"),
        Implementation("batch_invariant", "ridgeline.kernels.gemm.fp8.batch_invariant:fp8_linear", has_e4m3),
    ),
    matrix=True,
)
FP8_NORM_LINEAR = FP8_LINEAR.fused("fp8_norm_linear", fp8_norm_linear)

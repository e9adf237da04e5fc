"""The scheme "w4a16": weights are rounded to the nearest of sixteen levels, with a scale for each 128 inputs.

Legend:
    I  inputs
    O  outputs
    G  groups of a row
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.op import anywhere
from ridgeline.kernels.base.weight_format import CodedFormat
from ridgeline.kernels.gemm.codes.op import Coded, packed
from ridgeline.kernels.ops import Ops
from ridgeline.quantization.layout import laid_out
from ridgeline.quantization.scheme import Scheme
from ridgeline.quantization.weight import Weight, weight_of

MIDDLE = 8
GROUPS = (128, 64, 32, 16, 8)
PIECE = 4096  # rows that are rounded at once, since rounding takes float32 copies of them


def round_to_levels(weight_OI: Tensor) -> Coded | None:
    """Return the weight in four bits, or None if its inputs divide into no group."""
    inputs = weight_OI.shape[1]
    group = next((size for size in GROUPS if inputs % size == 0), None)
    if group is None:
        return None
    pieces = [_rounded(rows, group) for rows in weight_OI.detach().split(PIECE)]
    code_OB, scale_OG = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return Coded(code_OB, scale_OG, None, None, None, None, None, CodedFormat(bits=4, group=group))


def _rounded(weight_OI: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the packed codes, and the scales.

    Levels go from -8 to 7, and the number of the largest magnitude, of either sign, is the level -8: so all levels are
    used, and scales may be negative.
    """
    groups = weight_OI.float().unflatten(1, (-1, group))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = (largest / -MIDDLE).to(weight_OI.dtype)
    scale = torch.where(scale == 0, 1.0, scale)
    level = (groups / scale.float()).round().clamp(-MIDDLE, MIDDLE - 1) + MIDDLE
    return packed(level.flatten(1).to(torch.uint8), 4), scale[..., 0]


def prepare(ops: Ops, weight_OI: Tensor) -> Weight:
    """Round a weight. One whose inputs divide into no group stays as it is."""
    coded = round_to_levels(weight_OI)
    return weight_of(ops, weight_OI) if coded is None else laid_out(ops, coded, weight_OI.dtype)


W4A16 = Scheme(name="w4a16", prepare=prepare, supports=anywhere, needs="nothing", weight_bytes=1, product_bytes=0.5)

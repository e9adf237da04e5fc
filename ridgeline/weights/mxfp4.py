"""Conversion of MXFP4 to numbers (OCP Microscaling Formats, version 1.0).

32 values of a row share a scale. A value has four bits (E2M1): sign, two bits of exponent and one of mantissa. Two are
in a byte, the first in the low bits. A scale is a power of two in eight bits (E8M0), of which 255 is NaN.

Legend:
    N  groups of values with one scale, in any number of dimensions
    B  bytes of a group
"""

from __future__ import annotations

import torch
from torch import Tensor

MXFP4 = "MXFP4"
GROUP_BYTES = 16

_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.bfloat16)
_VALUES = torch.cat((_MAGNITUDES, -_MAGNITUDES))
_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), -1).contiguous()  # by byte
_SCALES = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
_SCALES[255] = torch.nan
_AT_ONCE = 1 << 12  # groups: temporaries stay in the processor's cache and are far smaller than the tensor


def dequantized(blocks_NB: Tensor, scales_N: Tensor) -> Tensor:
    """Return the values in bfloat16, which holds all of them exactly but for the smallest and largest scales. The
    groups of a row follow each other: [..., groups, 16] becomes [..., 32 · groups]."""
    pairs, bytes_NB = _PAIRS.view(torch.int32).flatten(), blocks_NB.reshape(-1, GROUP_BYTES)
    values = torch.empty(len(bytes_NB), 2 * GROUP_BYTES, dtype=torch.bfloat16)
    for some, scales, out in zip(*(x.split(_AT_ONCE) for x in (bytes_NB, scales_N.flatten(), values)), strict=True):
        two = pairs[some.int()].view(torch.bfloat16)
        torch.mul(two, _SCALES[scales.int()][:, None], out=out)
    return values.view(*blocks_NB.shape[:-2], -1)

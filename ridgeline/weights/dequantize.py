"""Conversion of ggml's block formats to numbers (https://github.com/ggml-org/ggml, ggml-common.h has the layouts).

A block holds values of one row that share a scale. The formats without K hold 32 values in two halves that share bytes:
the low four bits are the first half. The K formats hold 256 values in groups. Each group has a scale of its own and
often a minimum, which are small integers times the block's.

Arithmetic is in float32, in the order that gives the same bits as ggml's own.

Legend:
    N  blocks
    B  bytes of a block
    V  values of a block
    G  groups of a block
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.formats.gguf_file import TensorType

_AT_ONCE = 1 << 19  # values: temporaries stay in the processor's cache and are far smaller than the tensor

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantize(data_B: Tensor, type: TensorType) -> Tensor:
    """Return the values of a flat uint8 tensor, flat: in float32, or in the type itself if that is plain floats."""
    if type.name in _PLAIN:
        return data_B.view(_PLAIN[type.name])
    if type.name not in _BLOCKS:
        raise ModelLoadError(f"tensors of type {type.name} cannot be dequantized; known: {', '.join(_BLOCKS)}.")
    blocks_NB = data_B.view(-1, type.bytes)
    values_NV = torch.empty(len(blocks_NB), type.block)
    step = _AT_ONCE // type.block
    for start in range(0, len(blocks_NB), step):
        part = slice(start, start + step)
        values_NV[part] = _BLOCKS[type.name](blocks_NB[part])
    return values_NV.view(-1)


def _half(bytes_N2: Tensor) -> Tensor:
    """Return two bytes as a float16, in float32: [N, 1]."""
    return bytes_N2.contiguous().view(torch.float16).float()


def _bits(bytes_: Tensor, width: int) -> Tensor:
    """Split bytes into fields of `width` bits, lowest first, as a dimension before the last.

    [..., K] -> [..., 8 / width, K].
    """
    mask = (1 << width) - 1  # shifts by a number are vectorized, and those by a tensor are not
    return torch.stack([(bytes_ >> shift) & mask for shift in range(0, 8, width)], -2)


def _nibbles(bytes_: Tensor) -> Tensor:
    """Return both halves of a small block: [N, 16] -> [N, 32]."""
    return _bits(bytes_, 4).flatten(1)


def _fifth_bits(bytes_N4: Tensor) -> Tensor:
    """Return 32 bits, one for each value of a small block, as 0 or 16: [N, 32]."""
    return _bits(bytes_N4.unsqueeze(-1), 1).flatten(1) << 4


def _q4_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (_nibbles(b[:, 2:]).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * _nibbles(b[:, 4:]).float() + _half(b[:, 2:4])


def _q5_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * ((_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])).float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])).float() + _half(b[:, 2:4])


def _q8_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * b[:, 2:].view(torch.int8).float()


def _q4_k(b: Tensor) -> Tensor:
    values_NGV = _bits(b[:, 16:].unflatten(1, (4, 32)), 4).flatten(1, 2)
    return _scaled(b, values_NGV)


def _q5_k(b: Tensor) -> Tensor:
    low_NGV = _bits(b[:, 48:].unflatten(1, (4, 32)), 4).flatten(1, 2)
    return _scaled(b, low_NGV | (_bits(b[:, 16:48], 1) << 4))  # bit g of the 32 bytes belongs to group g


def _scaled(b: Tensor, values_NGV: Tensor) -> Tensor:
    """Scale eight groups of 32 values, each with six bits of scale and six of minimum.

    Those of the first four groups stand in the low bits of bytes 0-3 and 4-7. Of the others the low four bits are in
    bytes 8-11 (scale low, minimum high), and the upper two in the bits that are left in bytes 0-7.
    """
    first, second, rest = b[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scale_NG = torch.cat([first & 63, (rest & 15) | (first >> 6 << 4)], 1)
    least_NG = torch.cat([second & 63, (rest >> 4) | (second >> 6 << 4)], 1)
    scale_NG1 = (_half(b[:, :2]) * scale_NG.float()).unsqueeze(-1)
    least_NG1 = (_half(b[:, 2:4]) * least_NG.float()).unsqueeze(-1)
    return (scale_NG1 * values_NGV.float() - least_NG1).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    """Return sixteen groups of 16 values, with signed scales. Of each 128 values four bits are in 64 bytes and two in
    32."""
    low = _bits(b[:, :128].unflatten(1, (2, 64)), 4).flatten(1)
    high = _bits(b[:, 128:192].unflatten(1, (2, 32)), 2).flatten(1)
    values_NGV = ((low | (high << 4)).float() - 32).unflatten(1, (16, 16))
    scale_NG = _half(b[:, 208:]) * b[:, 192:208].view(torch.int8).float()
    return (scale_NG.unsqueeze(-1) * values_NGV).flatten(1)


_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

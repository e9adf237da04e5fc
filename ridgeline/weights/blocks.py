"""ggml's block formats taken apart (https://github.com/ggml-org/ggml, ggml-common.h has the layouts).

A block holds values of one row that share a scale. The formats without K hold 32 values in two halves that share bytes:
the low four bits are the first half. The K formats hold 256 values in groups. Each group has a scale of its own and
often a minimum, which are small integers times the block's.

Legend:
    N  blocks
    B  bytes of a block
    V  values of a block
    G  groups of a block
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base.weight_format import CodedFormat, Values
from ridgeline.weights import iq_blocks as iq


class Scales(NamedTuple):
    """The scales of blocks: each is outer · scale, or scale alone. Minima likewise.

    scale_NG: float16, or int8 if there are outer ones, or uint8 exponents of two (E8M0). minimum_NG: likewise.
    outer_N1, outer_minimum_N1: float16.
    """

    scale_NG: Tensor
    minimum_NG: Tensor | None = None
    outer_N1: Tensor | None = None
    outer_minimum_N1: Tensor | None = None


@dataclass(frozen=True)
class Blocks:
    """A block format. codes: takes bytes [N, B] and returns codes, uint8 [N, V]; scales: returns the scales, of the
    dtype `kept`."""

    format: CodedFormat
    codes: Callable[[Tensor], Tensor]
    scales: Callable[[Tensor], Scales]
    kept: str = "float16"


def _half(bytes_N2: Tensor) -> Tensor:
    """Return two bytes as a float16: [N, 1]."""
    return bytes_N2.contiguous().view(torch.float16)


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


def _one(b: Tensor) -> Scales:
    return Scales(_half(b[:, :2]))


def _two(b: Tensor) -> Scales:
    """Return a scale and what is added, of which the minimum is the opposite."""
    return Scales(_half(b[:, :2]), -_half(b[:, 2:4]))


def _quarters(bytes_NB: Tensor) -> Tensor:
    """Return 256 values of two bits: each 32 bytes hold four times 32 values."""
    return _bits(bytes_NB.unflatten(1, (2, 32)), 2).flatten(1)


def _q2_k(b: Tensor) -> Scales:
    return Scales(
        (b[:, :16] & 15).view(torch.int8), (b[:, :16] >> 4).view(torch.int8), _half(b[:, 80:82]), _half(b[:, 82:])
    )


def _q3_k(b: Tensor) -> Scales:
    """Return sixteen scales of six bits: the low four in eight bytes, the upper two in four."""
    low = _bits(b[:, 96:104], 4).flatten(1)
    high = _bits(b[:, 104:108], 2).flatten(1)
    return Scales(_less_32(low | high << 4), None, _half(b[:, 108:]))


def _less_32(bytes_NG: Tensor) -> Tensor:
    return bytes_NG.view(torch.int8) - 32


def _six_bits(b: Tensor) -> Scales:
    """Return eight scales and eight minima of six bits each.

    Those of the first four groups stand in the low bits of bytes 0-3 and 4-7. Of the others the low four bits are in
    bytes 8-11 (scale low, minimum high), and the upper two in the bits that are left in bytes 0-7.
    """
    first, second, rest = b[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scale_NG = torch.cat([first & 63, (rest & 15) | (first >> 6 << 4)], 1)
    least_NG = torch.cat([second & 63, (rest >> 4) | (second >> 6 << 4)], 1)
    return Scales(scale_NG.view(torch.int8), least_NG.view(torch.int8), _half(b[:, :2]), _half(b[:, 2:4]))


def _groups_of_32(bytes_NB: Tensor) -> Tensor:
    """Return eight groups of 32 values of four bits: each 32 bytes hold two groups."""
    return _bits(bytes_NB.unflatten(1, (4, 32)), 4).flatten(1)


def _q6_k_codes(b: Tensor) -> Tensor:
    """Return sixteen groups of 16 values. Of each 128 values four bits are in 64 bytes and two in 32."""
    low = _bits(b[:, :128].unflatten(1, (2, 64)), 4).flatten(1)
    return low | _quarters(b[:, 128:192]) << 4


def _iq4_xs(b: Tensor) -> Scales:
    """Return eight scales of six bits: the low four in bytes 4-7, the upper two in bytes 2-3."""
    low = _bits(b[:, 4:8].unsqueeze(-1), 4).flatten(1)
    high = _bits(b[:, 2:4].unsqueeze(-1), 2).flatten(1)
    return Scales(_less_32(low | high << 4), None, _half(b[:, :2]))


def _levels(bits: int, group: int, zeros: str = "middle", nested: bool = False) -> CodedFormat:
    return CodedFormat(bits=bits, group=group, zeros="minimum" if zeros == "minimum" else "middle", nested=nested)


def _table(values: Values, group: int) -> CodedFormat:
    return CodedFormat(bits=4, group=group, values=values, nested=True)


def _ternary(d_N2: Tensor) -> Scales:
    """Return the scale of codes 0, 1 and 2 that stand for -1, 0 and 1."""
    return Scales(_half(d_N2), _half(d_N2))


def _tq1_0(b: Tensor) -> Tensor:
    """Return digits to the base of three. A byte has five of them (the last four bytes have four) as a fraction of 256,
    whose first digit three times the fraction is."""
    parts = (b[:, :32], 5), (b[:, 32:48], 5), (b[:, 48:52], 4)
    digits = [(part * 3**digit).int() * 3 >> 8 for part, count in parts for digit in range(count)]
    return torch.cat(digits, 1).to(torch.uint8)


BLOCKS: dict[str, Blocks] = {
    "Q4_0": Blocks(_levels(4, 32), lambda b: _nibbles(b[:, 2:]), _one),
    "Q4_1": Blocks(_levels(4, 32, "minimum"), lambda b: _nibbles(b[:, 4:]), _two),
    "Q5_0": Blocks(_levels(5, 32), lambda b: _nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6]), _one),
    "Q5_1": Blocks(_levels(5, 32, "minimum"), lambda b: _nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8]), _two),
    "Q8_0": Blocks(_levels(8, 32), lambda b: b[:, 2:] ^ 128, _one),
    "Q2_K": Blocks(_levels(2, 16, "minimum", nested=True), lambda b: _quarters(b[:, 16:80]), _q2_k),
    "Q3_K": Blocks(
        _levels(3, 16, nested=True), lambda b: _quarters(b[:, 32:96]) | _bits(b[:, :32], 1).flatten(1) << 2, _q3_k
    ),
    "Q4_K": Blocks(_levels(4, 32, "minimum", nested=True), lambda b: _groups_of_32(b[:, 16:]), _six_bits),
    "Q5_K": Blocks(  # bit g of the 32 bytes belongs to group g
        _levels(5, 32, "minimum", nested=True),
        lambda b: _groups_of_32(b[:, 48:]) | _bits(b[:, 16:48], 1).flatten(1) << 4,
        _six_bits,
    ),
    "Q6_K": Blocks(
        _levels(6, 16, nested=True),
        _q6_k_codes,
        lambda b: Scales(b[:, 192:208].view(torch.int8), None, _half(b[:, 208:])),
    ),
    "IQ4_NL": Blocks(CodedFormat(bits=4, group=32, values="iq4"), lambda b: _nibbles(b[:, 2:]), _one),
    "IQ4_XS": Blocks(
        _table("iq4", 32),
        lambda b: _bits(b[:, 8:].unflatten(1, (8, 16)), 4).flatten(1),
        _iq4_xs,
    ),
    "TQ1_0": Blocks(_levels(2, 256, "minimum"), _tq1_0, lambda b: _ternary(b[:, 52:])),
    "TQ2_0": Blocks(_levels(2, 256, "minimum"), lambda b: _quarters(b[:, :64]), lambda b: _ternary(b[:, 64:])),
    "MXFP4": Blocks(
        CodedFormat(bits=4, group=32, values="e2m1"), lambda b: _nibbles(b[:, 1:]), lambda b: Scales(b[:, :1]), "uint8"
    ),
    "IQ2_XXS": Blocks(_table("iq2", 32), iq.iq2_xxs, lambda b: Scales(iq.iq2_xxs_scales(b), None, _half(b[:, :2]))),
    "IQ2_XS": Blocks(
        _table("iq2", 16), iq.iq2_xs, lambda b: Scales(iq.nibble_scales(b[:, 66:]), None, _half(b[:, :2]))
    ),
    "IQ2_S": Blocks(_table("iq2", 16), iq.iq2_s, lambda b: Scales(iq.nibble_scales(b[:, 74:]), None, _half(b[:, :2]))),
    "IQ3_XXS": Blocks(_table("iq3", 32), iq.iq3_xxs, lambda b: Scales(iq.iq3_xxs_scales(b), None, _half(b[:, :2]))),
    "IQ3_S": Blocks(
        _table("iq3_s", 32), iq.iq3_s, lambda b: Scales(iq.nibble_scales(b[:, 106:]), None, _half(b[:, :2]))
    ),
    "IQ1_S": Blocks(_table("iq1", 32), iq.iq1_s, lambda b: Scales(iq.iq1_s_scales(b), None, _half(b[:, :2]))),
    "IQ1_M": Blocks(_table("iq1", 16), iq.iq1_m, lambda b: Scales(iq.iq1_m_scales(b), None, iq.iq1_m_outer(b))),
}

"""ggml's IQ formats of one to three bits taken apart. 256 values share a float16 scale, groups of them have scales of
three or four bits, and values stand in eights or fours, each of which is a point of a grid.

A grid is a table that ggml chose, of up to 2,048 points with three or eight magnitudes (iq_grids.bin, from
https://github.com/ggml-org/ggml, MIT License). Most formats store signs beside it. Here every value gets four bits: the
number of its magnitude, and above it its sign. They take twice the file's bytes, and are multiplied like other codes.

Legend:
    N  blocks
    B  bytes of a block
    P  points of a block
    C  values of a point
    V  values of a block
    G  groups of a block
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.kernels.gemm.codes.op import unpacked

GRIDS = {  # in the order of the file: points, values of a point, bits of a value
    "iq1": (2048, 8, 2),
    "iq2_xxs": (256, 8, 2),
    "iq2_xs": (512, 8, 2),
    "iq2_s": (1024, 8, 2),
    "iq3_xxs": (256, 4, 4),
    "iq3_s": (512, 4, 4),
}


@cache
def grid(name: str) -> Tensor:
    """Return the numbers of the magnitudes of each point: uint8 [P, C]."""
    data = Path(__file__).with_name("iq_grids.bin").read_bytes()
    for each, (points, values, bits) in GRIDS.items():
        size = points * values * bits // 8
        if each == name:
            return unpacked(torch.frombuffer(bytearray(data[:size]), dtype=torch.uint8), bits).view(points, values)
        data = data[size:]
    raise KeyError(name)


def _fields(numbers: Tensor, width: int, count: int) -> Tensor:
    """Return the first fields of so many bits of each number, the low one first: [..., count]."""
    return torch.stack([numbers >> width * field & (1 << width) - 1 for field in range(count)], -1)


def _words(bytes_NB: Tensor, size: int) -> Tensor:
    """Return little-endian numbers of `size` bytes: int64 [N, B / size]."""
    parts = bytes_NB.unflatten(1, (-1, size)).long()
    return sum((parts[..., i] << 8 * i for i in range(1, size)), parts[..., 0])


def _signed(magnitude_NPC: Tensor, negative_NV: Tensor) -> Tensor:
    """Return codes: uint8 [N, V]."""
    return magnitude_NPC.flatten(1) | negative_NV.to(torch.uint8) << 3


def _seven_signs(numbers: Tensor) -> Tensor:
    """Return the signs of eight values, of which seven are stored and the number of negative ones is even."""
    seven = _fields(numbers, 1, 7)
    return torch.cat([seven, seven.sum(-1, keepdim=True) & 1], -1).flatten(1)


def _odd(scale_NG: Tensor) -> Tensor:
    """Return 2 s + 1, by which scales count halves of a step: int8."""
    return (2 * scale_NG + 1).to(torch.int8)


def _high_bits(bytes_NB: Tensor, width: int) -> Tensor:
    """Return the ninth and higher bits of the numbers of points: int64 [N, P]."""
    return _fields(bytes_NB.long(), width, 8 // width).flatten(1) << 8


def iq2_xxs(b: Tensor) -> Tensor:
    point_N88, words_N8 = b[:, 2:].unflatten(1, (8, 8))[..., :4].int(), _words(b[:, 2:], 4)[:, 1::2]
    return _signed(grid("iq2_xxs")[point_N88], _seven_signs(_fields(words_N8, 7, 4)))


def iq2_xxs_scales(b: Tensor) -> Tensor:
    return _odd(_words(b[:, 2:], 4)[:, 1::2] >> 28)


def iq2_xs(b: Tensor) -> Tensor:
    words_NP = _words(b[:, 2:66], 2)
    return _signed(grid("iq2_xs")[words_NP & 511], _seven_signs(words_NP >> 9))


def iq2_s(b: Tensor) -> Tensor:
    point_NP = b[:, 2:34] | _high_bits(b[:, 66:74], 2)
    return _signed(grid("iq2_s")[point_NP], _fields(b[:, 34:66], 1, 8).flatten(1))


def nibble_scales(b: Tensor) -> Tensor:
    """Return scales of four bits, of which the block's last bytes are full. b: those bytes."""
    return _odd(_fields(b, 4, 2).flatten(1))


def iq3_xxs(b: Tensor) -> Tensor:
    return _signed(grid("iq3_xxs")[b[:, 2:66].int()], _seven_signs(_fields(_words(b[:, 66:], 4), 7, 4)))


def iq3_xxs_scales(b: Tensor) -> Tensor:
    return _odd(_words(b[:, 66:], 4) >> 28)


def iq3_s(b: Tensor) -> Tensor:
    point_NP = b[:, 2:66] | _high_bits(b[:, 66:74], 1)
    return _signed(grid("iq3_s")[point_NP], _fields(b[:, 74:106], 1, 8).flatten(1))


def iq1_s(b: Tensor) -> Tensor:
    """Return codes whose sign is that of an eighth, which all values of a group are moved by."""
    words_NG = _words(b[:, 34:], 2)
    point_NP = b[:, 2:34] | _fields(words_NG, 3, 4).flatten(1) << 8
    return _signed(grid("iq1")[point_NP], (words_NG >> 15).repeat_interleave(32, 1))


def iq1_s_scales(b: Tensor) -> Tensor:
    return _odd(_words(b[:, 34:], 2) >> 12 & 7)


def iq1_m(b: Tensor) -> Tensor:
    """Return codes likewise; every eight values are moved by themselves."""
    nibble_NP = _fields(b[:, 32:48].long(), 4, 2).flatten(1)
    point_NP = b[:, :32] | (nibble_NP & 7) << 8
    return _signed(grid("iq1")[point_NP], (nibble_NP >> 3).repeat_interleave(8, 1))


def iq1_m_scales(b: Tensor) -> Tensor:
    return _odd(_fields(_words(b[:, 48:], 2), 3, 4).flatten(1))


def iq1_m_outer(b: Tensor) -> Tensor:
    """Return the block's scale, whose four parts are the high bits of four words: float16 [N, 1]."""
    part_N4 = _words(b[:, 48:], 2) >> 12
    number_N = sum((part_N4[:, i] << 4 * i for i in range(1, 4)), part_N4[:, 0])
    return number_N.to(torch.uint16).view(torch.float16)[:, None]

"""Weights as GGUF's Q4_K_M rounds them, for their quality: each number to the nearest of its block's grid.

Layouts are those of ggml (https://github.com/ggml-org/ggml, ggml-common.h). llama.cpp's own encoder also searches for
scales that lessen the error, so its files are somewhat better than these numbers.

Legend:
    O  outputs
    I  inputs
    N  blocks of 256 weights
    G  groups of a block
    V  weights of a group
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.core.errors import InvalidConfig

BLOCK = 256
BITS = {"Q4_K": 4.5, "Q6_K": 6.5625}  # of a weight, with its scales


class Q4K(NamedTuple):
    """Eight groups of 32: scale · levels · code - minimum · depths. codes: 0 … 15. levels, depths: 0 … 63. scale,
    minimum: float16."""

    code_NGV: Tensor
    level_NG: Tensor
    depth_NG: Tensor
    scale_N: Tensor
    minimum_N: Tensor

    def values(self) -> Tensor:
        step_NG, low_NG = self.grid()
        return step_NG[:, :, None] * self.code_NGV - low_NG[:, :, None]

    def grid(self) -> tuple[Tensor, Tensor]:
        """Return the distance of a group's numbers, and how far below 0 they begin."""
        return self.scale_N.float()[:, None] * self.level_NG, self.minimum_N.float()[:, None] * self.depth_NG


def q4_k(weight_OI: Tensor) -> Q4K:
    """Round weights. Raise InvalidConfig if rows are not whole blocks."""
    x_NGV = _blocks(weight_OI, 8)
    low_NG, high_NG = x_NGV.amin(-1).clamp(max=0), x_NGV.amax(-1)
    wanted_NG = ((high_NG - low_NG) / 15).clamp(min=0)
    scale_N, minimum_N = ((each.amax(1) / 63).half() for each in (wanted_NG, -low_NG))
    level_NG, depth_NG = _levels(wanted_NG, scale_N, 63), _levels(-low_NG, minimum_N, 63)
    rounded = Q4K(torch.zeros_like(x_NGV), level_NG, depth_NG, scale_N, minimum_N)
    step_NG, begin_NG = rounded.grid()
    code_NGV = ((x_NGV + begin_NG[:, :, None]) / step_NG.clamp(min=1e-12)[:, :, None]).round().clamp(0, 15)
    return rounded._replace(code_NGV=code_NGV)


class Q6K(NamedTuple):
    """Sixteen groups of 16: scale · levels · code. codes: -32 … 31. levels: int8. scale: float16."""

    code_NGV: Tensor
    level_NG: Tensor
    scale_N: Tensor

    def values(self) -> Tensor:
        return self.grid()[:, :, None] * self.code_NGV

    def grid(self) -> Tensor:
        return self.scale_N.float()[:, None] * self.level_NG


def q6_k(weight_OI: Tensor) -> Q6K:
    """Round weights. Raise InvalidConfig if rows are not whole blocks."""
    x_NGV = _blocks(weight_OI, 16)
    wanted_NG = x_NGV.abs().amax(-1) / 31
    scale_N = (wanted_NG.amax(1) / 127).half()
    rounded = Q6K(torch.zeros_like(x_NGV), _levels(wanted_NG, scale_N, 127), scale_N)
    code_NGV = (x_NGV / rounded.grid().clamp(min=1e-12)[:, :, None]).round().clamp(-32, 31)
    return rounded._replace(code_NGV=code_NGV)


def type_of(part: str, layer: int, layers: int) -> str:
    """Return the type that Q4_K_M gives to a matrix of a layer. Values and `down` have Q6_K in the first and the last
    eighth of the layers, and in every third one between.

    part: the last word of the matrix' name in a checkpoint, without "_proj".
    """
    if part not in ("v", "down"):
        return "Q4_K"
    eighth = layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if more else "Q4_K"


def rounded(weight_OI: Tensor, kind: str) -> Tensor:
    """Return the weights as a file of this type has them. [O, I]"""
    found = q4_k(weight_OI) if kind == "Q4_K" else q6_k(weight_OI)
    return found.values().view(weight_OI.shape)


def _blocks(weight_OI: Tensor, groups: int) -> Tensor:
    if weight_OI.shape[1] % BLOCK:
        raise InvalidConfig(f"rows of {weight_OI.shape[1]} weights are no whole blocks of {BLOCK}, as K formats have.")
    return weight_OI.float().reshape(-1, groups, BLOCK // groups)


def _levels(wanted_NG: Tensor, scale_N: Tensor, most: int) -> Tensor:
    """Return the whole numbers by which a block's scale is multiplied."""
    return (wanted_NG / scale_N.float().clamp(min=1e-12)[:, None]).round().clamp(0, most)

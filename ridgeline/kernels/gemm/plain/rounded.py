"""Activations in 8 bits with their scales, as they pass from one op to the next.

The op before a linear map may round its own results, if the map gives it a buffer for them. Each 128 neighbouring
inputs of a token then have a scale of their own: a program of that op has all of them at hand, where a scale for the
whole token would have to wait for the other programs.

Legend:
    T  tokens
    I  inputs
    C  blocks of 128 inputs
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.base.weight_format import BLOCK

TILE_TOKENS = 256  # the most of a tile


class Rounded(NamedTuple):
    """Activations in 8 bits: q [T, I], and the float32 scales [T], or [C, T] in blocks.

    dtype: of the numbers that were rounded, and of what a linear map makes of them.
    """

    q_TI: Tensor
    scale: Tensor
    dtype: torch.dtype

    @property
    def grouped(self) -> bool:
        """Each 128 inputs have their own scale."""
        return self.scale.ndim == 2

    def wide(self) -> Tensor:
        """Return the numbers that these stand for, in float32."""
        if not self.grouped:
            return self.q_TI.float() * self.scale[:, None]
        return self.q_TI.float() * self.scale.T.repeat_interleave(BLOCK, 1)[:, : self.q_TI.shape[1]]


def buffer(tokens: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Rounded:
    """Return memory for rounded activations, with a scale for each 128 inputs."""
    q_TI = torch.empty(tokens, inputs, dtype=torch.float8_e4m3fn, device=device)
    return Rounded(q_TI, group_scales(tokens, inputs, device), dtype)


def group_scales(tokens: int, inputs: int, device: torch.device) -> Tensor:
    """Return memory for a scale for each 128 inputs, [C, T], behind which a tile of tokens may read on."""
    groups = -(-inputs // BLOCK)
    memory = torch.empty(groups * tokens + TILE_TOKENS, dtype=torch.float32, device=device)
    return memory[: groups * tokens].view(groups, tokens)

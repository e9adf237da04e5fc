"""NVFP4 in torch: 4-bit numbers, a scale for each 16 of them, and one for the matrix.

A number is E2M1, a scale of 16 is E4M3, that of the matrix float32. Scales lie in tiles of 128 rows and 4 blocks, as
cuBLAS wants them (its documentation, "1D block scaling factors layout").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 16
SIZES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of the codes 0 to 7; 8 to 15 are below zero
LARGEST = 6.0 * 448.0  # number times scale


@dataclass(frozen=True)
class Fp4Matrix:
    """A matrix in NVFP4.

    codes: [M, K] uint8, below 16. scales: [M, K / 16] float8_e4m3fn, not negative. scale: of all numbers.
    """

    codes: Tensor
    scales: Tensor
    scale: float

    def values(self) -> Tensor:
        """Return the numbers that the matrix stands for: [M, K] float64."""
        signs = torch.where(self.codes < 8, 1.0, -1.0).double()
        sizes = SIZES.double()[(self.codes % 8).long()]
        return self.scale * signs * sizes * self.scales.double().repeat_interleave(BLOCK, 1)

    def packed(self) -> Tensor:
        """Return two numbers a byte, the first in its lower half: [M, K / 2] uint8."""
        return self.codes[:, ::2] | self.codes[:, 1::2] << 4

    def tiled_scales(self) -> Tensor:
        """Return the scales in tiles of 128 x 4, filled up with zeros: [rows of tiles, tiles of a row, 512] uint8.

        Byte 16 (r % 32) + 4 (r / 32) + c of a tile is the scale of its row r and its block c.
        """
        rows, blocks = self.scales.shape
        down, across = -(-rows // 128), -(-blocks // 4)
        whole = torch.zeros(down * 128, across * 4, dtype=torch.uint8)
        whole[:rows, :blocks] = self.scales.view(torch.uint8)
        return whole.view(down, 4, 32, across, 4).permute(0, 3, 2, 1, 4).reshape(down, across, 512).contiguous()


def quantize(x_MK: Tensor) -> Fp4Matrix:
    """Round a matrix to NVFP4: the largest number of a block becomes 6 or near it. K is a multiple of 16."""
    blocks = x_MK.double().unflatten(1, (-1, BLOCK))
    scale = float(blocks.abs().amax()) / LARGEST or 1.0
    scales = (blocks.abs().amax(2) / 6 / scale).float().to(torch.float8_e4m3fn)
    wide = (scale * scales.double()).clamp(min=1e-300)[..., None]
    sizes = (blocks / wide).abs().clamp(max=6)
    middles = (SIZES[1:] + SIZES[:-1]).double() / 2
    codes = torch.bucketize(sizes, middles)  # a tie goes down, or up to the even code
    tie = (codes < 7) & (sizes == middles[codes.clamp(max=6)]) & (codes % 2 == 1)
    codes = codes + tie.long() + 8 * (blocks < 0).long()
    return Fp4Matrix(codes.flatten(1).to(torch.uint8), scales, scale)

"""A tower that makes tokens of pictures.

Legend:
    T  patches of the pictures, and so tokens
    X  numbers of a patch
    C  channels
    y  rows of places of one picture
    x  columns of them
    s  all of its places
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.core.specs.coded import CodedTowerSpec, Convolution, flat
from ridgeline.layers.build import Build
from ridgeline.layers.codec import coded
from ridgeline.layers.precision import in_float32

GROUPS = 32  # of the channels that a norm normalizes together
EPS = 1e-6


class PictureConv(nn.Module):
    """A convolution with a bias. Its weight is a matrix [outputs, inputs · taps · taps]."""

    def __init__(self, spec: Convolution, build: Build) -> None:
        super().__init__()
        self.kernel = (spec.outputs, spec.inputs, spec.taps, spec.taps)
        self.weight = build.parameter(spec.outputs, spec.inputs * spec.taps**2)
        self.bias = build.parameter(spec.outputs)

    def forward(self, x_1Cyx: Tensor, stride: int = 1) -> Tensor:
        """Return the output, as large as the input, or half as large with a stride of 2."""
        padding = self.kernel[-1] // 2 if stride == 1 else 0
        with in_float32():
            return F.conv2d(x_1Cyx, self.weight.view(self.kernel), self.bias, stride, padding)


class GroupNorm(nn.Module):
    """The norm of a picture's channels, group by group."""

    def __init__(self, width: int, build: Build) -> None:
        super().__init__()
        self.weight, self.bias = build.parameter(width), build.parameter(width)

    def forward(self, x_1Cyx: Tensor) -> Tensor:
        return F.group_norm(x_1Cyx, GROUPS, self.weight, self.bias, EPS)


class CodedTower(nn.Module):
    """The encoder and its codes, whole on every rank. Its parameters are uninitialised."""

    tokens: Tensor
    endings: Tensor | None = None

    def __init__(self, spec: CodedTowerSpec, build: Build) -> None:
        super().__init__()
        self.spec, self.ops, self.dtype, self.ranks = spec, build.ops, build.dtype, build.mesh.tp
        self.filters = nn.ModuleDict({flat(each.name): PictureConv(each, build) for each in spec.convolutions})
        self.norms = nn.ModuleDict({flat(name): GroupNorm(width, build) for name, width in spec.group_norms})
        self.book = build.parameter(len(spec.tokens), spec.code_width)
        self.register_buffer("tokens", torch.tensor(spec.tokens, device=build.device), persistent=False)

    def forward(self, patches_TX: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """Return the tokens of pictures of so many rows and columns of patches: int64 [T, 1]. Each picture runs by
        itself, so no other one decides a close choice of a code."""
        pictures = patches_TX.to(self.dtype).split([rows * columns for rows, columns in grids])
        codes = [self._codes(each_TX, *grid) for each_TX, grid in zip(pictures, grids, strict=True)]
        return self.tokens[self._agreed(torch.cat(codes))][:, None]

    def _agreed(self, code_T: Tensor) -> Tensor:
        """Return the first rank's codes: a close choice may come out otherwise on another device."""
        if self.ranks.size == 1:
            return code_T
        own_T1 = code_T.float()[:, None]  # whole numbers up to 2 ** 24 are exact, and so is their sum with zeros
        return self.ranks.all_reduce(own_T1 if self.ranks.rank == 0 else torch.zeros_like(own_T1))[:, 0].long()

    def _codes(self, patches_TX: Tensor, rows: int, columns: int) -> Tensor:
        """Return the nearest code of each patch of one picture: int64 [T]."""
        spec, side = self.spec, self.spec.patch
        pixels = patches_TX.view(rows, columns, 3, side, side).permute(2, 0, 3, 1, 4)
        x_1Cyx = self._filtered("conv_in", pixels.reshape(1, 3, rows * side, columns * side))
        for level in range(len(spec.channels)):
            for block in range(spec.blocks):
                x_1Cyx = self._residual(f"down.{level}.block.{block}", x_1Cyx)
                if level in spec.seeing:
                    x_1Cyx = self._seen(f"down.{level}.attn.{block}", x_1Cyx)
            if level + 1 < len(spec.channels):
                x_1Cyx = self._filtered(f"down.{level}.downsample.conv", F.pad(x_1Cyx, (0, 1, 0, 1)), 2)
        x_1Cyx = self._residual("mid.block_1", x_1Cyx)
        if spec.middle_sees:
            x_1Cyx = self._seen("mid.attn_1", x_1Cyx)
        x_1Cyx = self._swished("norm_out", self._residual("mid.block_2", x_1Cyx))
        x_1Cyx = self._filtered("quant_conv", self._filtered("conv_out", x_1Cyx))
        return coded(x_1Cyx[0].flatten(1), [self.book])[0]

    def _filtered(self, name: str, x_1Cyx: Tensor, stride: int = 1) -> Tensor:
        found: Tensor = self.filters[flat(name)](x_1Cyx, stride)
        return found

    def _swished(self, name: str, x_1Cyx: Tensor) -> Tensor:
        return F.silu(self.norms[flat(name)](x_1Cyx))

    def _residual(self, name: str, x_1Cyx: Tensor) -> Tensor:
        y_1Cyx = self._filtered(f"{name}.conv1", self._swished(f"{name}.norm1", x_1Cyx))
        y_1Cyx = self._filtered(f"{name}.conv2", self._swished(f"{name}.norm2", y_1Cyx))
        if flat(shortcut := f"{name}.nin_shortcut") in self.filters:
            x_1Cyx = self._filtered(shortcut, x_1Cyx)
        return x_1Cyx + y_1Cyx

    def _seen(self, name: str, x_1Cyx: Tensor) -> Tensor:
        """Return x with what its places see in each other."""
        normed_1Cyx = self.norms[flat(f"{name}.norm")](x_1Cyx)
        q_1sC, k_1sC, v_1sC = (self._filtered(f"{name}.{part}", normed_1Cyx).flatten(2).mT for part in "qkv")
        y_1sC = F.scaled_dot_product_attention(q_1sC, k_1sC, v_1sC)
        return x_1Cyx + self._filtered(f"{name}.proj_out", y_1sC.mT.reshape(x_1Cyx.shape))

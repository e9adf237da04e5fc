"""The tower that sees a picture as tiles: layers over all of its tiles, then gated ones, and outputs of some between.

Legend:
    B  pictures
    K  tiles of a picture, those that are filled up included
    P  places of a tile: its class token, its patches, and what is filled up
    T  places of all pictures
    X  numbers of a patch
    W  width of the tower
    M  numbers of a vector
    L  vectors
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.core.specs.tiled import TiledTowerSpec
from ridgeline.kernels.attention.packed.op import PackedRows
from ridgeline.layers.build import Build
from ridgeline.layers.encoder.packed import MaskedViews
from ridgeline.layers.encoder.tower import Projector, summed
from ridgeline.layers.layer import Layer
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm


class TiledTower(nn.Module):
    """A tiled tower with its projector, whole on every rank. Its parameters are uninitialised."""

    endings: Tensor | None = None

    def __init__(self, spec: TiledTowerSpec, build: Build) -> None:
        super().__init__()
        build = build.undivided()
        self.spec, self.ops, self.dtype = spec, build.ops, build.dtype
        width, shapes = spec.width, len(spec.shapes) + 1
        self.patch = Linear(spec.patch_width, (width,), spec.patch_bias, build.within("patch"))
        self.class_token = build.parameter(width)
        self.positions = build.parameter(spec.patches, width)
        self.positions_gate = build.parameter(1)
        self.tile_positions = build.parameter(shapes, spec.tiles * spec.patches * width)
        self.before = build.parameter(shapes, spec.tiles * width)
        self.before_gate = build.parameter(1)
        self.between = build.parameter(shapes, spec.tiles * width)
        self.between_gate = build.parameter(1)
        assert spec.embed_norm is not None
        assert spec.final_norm is not None
        self.embed_norm = Norm(spec.embed_norm, width, build)
        self.final_norm = Norm(spec.final_norm, width, build)
        self.layers, self.global_layers = (
            nn.ModuleList(Layer(layer, width, build.within(f"{name}.{n}")) for n, layer in enumerate(layers))
            for name, layers in (("layers", spec.layers), ("global_layers", spec.global_layers))
        )
        self.projector = Projector(spec.projector, spec.read, build.within("projector"))

    def forward(self, patches_TX: Tensor, tilings: Sequence[tuple[int, int]]) -> Tensor:
        """Return the vectors of pictures of so many rows and columns of tiles: [L, M], class tokens among them. Their
        patches come tile by tile."""
        spec, count = self.spec, len(tilings)
        tiles = [rows * columns for rows, columns in tilings]
        real_BK = np.arange(spec.tiles) < np.array(tiles)[:, None]
        real_BKP = np.zeros((count, spec.tiles, spec.filled), np.bool_)
        real_BKP[:, :, : spec.patches] = real_BK[:, :, None]
        device = patches_TX.device
        real_T = torch.from_numpy(real_BKP.reshape(-1)).to(device)
        shape_B = torch.tensor([spec.shapes.index(each) + 1 for each in tilings], device=device)
        x_TW = self._embedded(patches_TX, torch.from_numpy(real_BK).to(device), shape_B)
        rows = PackedRows.of(np.full(count, spec.tiles * spec.filled))
        state, positions_T = MaskedViews(self.ops, rows, ~real_T, ~real_T), torch.arange(len(x_TW), device=device)
        residual_TW, tapped = None, list[Tensor]()
        for index, layer in enumerate(self.layers):
            x_TW, residual_TW = layer(x_TW, residual_TW, positions_T, state, None)
            if index in spec.taps:
                tapped.append(summed(x_TW, residual_TW)[real_T])
        x_TW, residual_TW = self.final_norm(x_TW, residual_TW)[0], None
        between_BKW = self._tile_rows(self.between, self.between_gate, shape_B)
        x_TW = (x_TW.view(count, spec.tiles, spec.filled, -1) + between_BKW[:, :, None]).flatten(0, 2)
        for layer in self.global_layers:
            x_TW, residual_TW = layer(x_TW, residual_TW, positions_T, state, None)
        last_LW = summed(x_TW, residual_TW)[real_T]
        return self.projector(torch.cat((last_LW, torch.stack(tapped, dim=-1).flatten(1)), dim=1))

    def _embedded(self, patches_TX: Tensor, real_BK: Tensor, shape_B: Tensor) -> Tensor:
        """Return the input of the first layer: [T, W]. The patches of tiles that are filled up are zeros."""
        spec, (count, tiles) = self.spec, real_BK.shape
        x_TW = self.patch(patches_TX.to(self.dtype))
        x_BKPW = x_TW.new_zeros(count, tiles, spec.patches - 1, spec.width)
        x_BKPW[real_BK] = x_TW.view(-1, spec.patches - 1, spec.width)
        x_BKPW = x_BKPW + self._tile_rows(self.before, self.before_gate, shape_B)[:, :, None]
        x_BKPW = torch.cat((self.class_token.expand(count, tiles, 1, -1), x_BKPW), dim=2)
        gate = self.positions_gate.tanh()
        own_BKPW = self.tile_positions[shape_B].view(x_BKPW.shape)
        x_BKPW = x_BKPW + (1 - gate) * self.positions + gate * own_BKPW
        x_BKPW = self.embed_norm(x_BKPW.reshape(-1, spec.width))[0].view(x_BKPW.shape)
        return F.pad(x_BKPW, (0, 0, 0, spec.filled - spec.patches)).flatten(0, 2)

    def _tile_rows(self, table: Tensor, gate_1: Tensor, shape_B: Tensor) -> Tensor:
        """Return the rows that are added to tiles: [B, K, W]."""
        return table[shape_B].view(len(shape_B), self.spec.tiles, self.spec.width) * gate_1.tanh()

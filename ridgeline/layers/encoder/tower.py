"""The network that turns patches of pictures into vectors. Views of all pictures lie packed behind one another.

Legend:
    T  patches of all views, and their class tokens
    X  numbers of a patch
    W  width of the tower
    M  numbers of a vector, with those that are added behind layers
    L  vectors
    Y  width of a head
    K  cells of the table of positions near a patch
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.core.specs.model import RopeSpec
from ridgeline.core.specs.queries import QueriesSpec
from ridgeline.core.specs.tower import GatedProjectorSpec, MiddleMerge, ProjectorSpec, TowerSpec
from ridgeline.kernels.attention.packed.op import PackedRows
from ridgeline.layers.build import Build
from ridgeline.layers.encoder.gated import GatedProjector
from ridgeline.layers.encoder.grids import Grid, corners, covered, cubic, frames, nearest, places, windows
from ridgeline.layers.encoder.packed import MaskedViews, PackedViews
from ridgeline.layers.encoder.pooler import ViewPooler
from ridgeline.layers.encoder.queries import QueryProjector
from ridgeline.layers.layer import Layer
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.layers.rotary import inverse_frequencies


class Projector(nn.Module):
    """The map of a `ProjectorSpec`."""

    def __init__(self, spec: ProjectorSpec, width: int, build: Build) -> None:
        super().__init__()
        self.spec, self.ops = spec, build.ops
        self.norm = None if spec.norm is None else Norm(spec.norm, spec.norm_width(width), build)
        merged, inputs = width * spec.merge**2, spec.inputs(width)
        self.shift = build.parameter(width) if spec.standardized else None
        self.factor = build.parameter(width) if spec.standardized else None
        self.merger = Linear(merged, (width,), False, build.within("merger")) if spec.joined == "map" else None
        self.up = Linear(inputs, (spec.hidden,), spec.bias, build.within("up")) if spec.hidden else None
        self.down: Linear | None = None
        if not spec.absent:
            self.down = Linear(spec.hidden or inputs, (spec.outputs,), spec.bias, build.within("down"))

    def forward(self, x_TW: Tensor) -> Tensor:
        """Return [L, M] of patches [T, W], of which the ones that are merged follow each other."""
        merged = self.spec.merge**2 * x_TW.shape[1]
        if self.norm is not None and not self.spec.norm_merged:
            x_TW = self.norm(x_TW)[0]
        mean = self.spec.joined == "mean"
        x = x_TW.unflatten(0, (-1, self.spec.merge**2)).mean(1) if mean else x_TW.reshape(-1, merged)
        if self.shift is not None and self.factor is not None:
            x = ((x.float() * math.sqrt(x.shape[1]) - self.shift.float()) * self.factor.float()).to(x.dtype)
        if self.norm is not None and self.spec.norm_merged:
            x = self.norm(x)[0]
        if self.merger is not None:
            x = self.merger(x.unflatten(1, (self.spec.merge**2, -1)).transpose(1, 2).flatten(1))
        if self.up is not None:
            x = self.ops.activation(self.up(x), self.spec.activation)
        return x if self.down is None else self.down(x)


class SquareMerger(nn.Module):
    """A map in the middle of a tower, which makes one row of each square of patches."""

    def __init__(self, spec: MiddleMerge, width: int, build: Build) -> None:
        super().__init__()
        self.spec, self.ops = spec, build.ops
        self.layer = Layer(spec.layer, width, build.within("layer"))
        self.projector = Projector(spec.projector, width, build.within("projector"))

    def nested(self, x_TW: Tensor, later: int) -> Tensor:
        """Return patches, line by line in their squares of all merges, with those of each square that this one merges
        behind one another. later: the side of the squares that are merged after it."""
        own = self.spec.projector.merge
        return x_TW.unflatten(0, (-1, later, own, later, own)).transpose(2, 3).flatten(0, 4)

    def forward(self, x_TW: Tensor) -> Tensor:
        """Return one row for each square: [T / squares, W]."""
        count = self.spec.projector.merge**2
        squares = PackedViews(self.ops, PackedRows.of(np.full(len(x_TW) // count, count)))
        x_TW = summed(*self.layer(x_TW, None, torch.arange(len(x_TW), device=x_TW.device), squares, None))
        return self.projector(x_TW) + x_TW.unflatten(0, (-1, count)).mean(1)


class Tower(nn.Module):
    """A tower with its projectors, whole on every rank. Its parameters are uninitialised."""

    def __init__(self, spec: TowerSpec, build: Build) -> None:
        super().__init__()
        build = build.undivided()
        self.spec, self.ops, self.dtype = spec, build.ops, build.dtype
        self.patch = Linear(spec.patch_width, (spec.width,), spec.patch_bias, build.within("patch"))
        self.class_token = build.parameter(spec.width) if spec.class_token else None
        self.positions: nn.Parameter | None = None
        if spec.grid is not None:
            shape = (2, spec.grid.side) if spec.grid.fit == "axes" else (spec.rows,)
            self.positions = build.parameter(*shape, spec.width)
        self.patch_norm = None if spec.patch_norm is None else Norm(spec.patch_norm, spec.width, build)
        self.embed_norm = None if spec.embed_norm is None else Norm(spec.embed_norm, spec.width, build)
        self.layers = nn.ModuleList(
            Layer(layer, spec.width, replace(build.within(f"layers.{n}"), clipped=spec.clipped))
            for n, layer in enumerate(spec.layers)
        )
        self.final_norm = None if spec.final_norm is None else Norm(spec.final_norm, spec.width, build)
        self.pooler = None if spec.pooler is None else ViewPooler(spec.pooler, spec.width, build.within("pooler"))
        self.projector: Projector | GatedProjector | QueryProjector
        inside = build.within("projector")
        if isinstance(spec.projector, QueriesSpec):
            self.projector = QueryProjector(spec.projector, inside)
        elif isinstance(spec.projector, GatedProjectorSpec):
            self.projector = GatedProjector(spec.projector, spec.width, inside)
        else:
            self.projector = Projector(spec.projector, spec.width, inside)
        deep = [] if spec.deep_projector is None else [spec.deep_projector] * len(spec.deep)
        self.deep = nn.ModuleList(Projector(own, spec.width, build.within(f"deep.{n}")) for n, own in enumerate(deep))
        self.middle = None if spec.middle is None else SquareMerger(spec.middle, spec.width, build.within("middle"))
        self.newline = build.parameter(spec.projector.outputs) if spec.newline else None
        self.ends = nn.ParameterList(build.parameter(spec.width) for _ in range(spec.ends))
        self._rotary = None if spec.rope is None else build.rotary(spec.rope)

    def forward(self, patches_TX: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return the vectors of views with these patches: [L, M]. With a pooler there is one of each view."""
        spec, merge = self.spec, self.spec.merge
        x_TW = self._embedded(patches_TX, grids)
        whole = self._seen(grids, x_TW.device)
        near, back_U = whole, None
        if self.middle is not None:
            x_TW = self.middle.nested(x_TW, spec.projector.merge)
        if spec.window:
            order_U, counts = windows(grids, merge, spec.window)
            near = PackedViews(self.ops, PackedRows.of(counts))
            x_TW = _in_order(x_TW, order_U, merge)
            back_U = np.argsort(order_U)
        positions_T = torch.arange(len(x_TW), device=x_TW.device)
        if self._rotary is not None and spec.rope is not None:
            angles_TY = _angles(spec.rope, spec.rope_apart, places(grids, merge), x_TW.device)
            self._rotary.cos_sin_ZY = angles_TY if back_U is None else _in_order(angles_TY, order_U, merge)
        residual_TW, deep = None, []
        for index, layer in enumerate(self.layers):
            state = whole if index in spec.whole or not spec.window else near
            x_TW, residual_TW = layer(x_TW, residual_TW, positions_T, state, None)
            if self.middle is not None and index == self.middle.spec.behind:
                x_TW, residual_TW = self.middle(summed(x_TW, residual_TW)), None
                near = whole = PackedViews(
                    self.ops, PackedRows.of(frames(grids) // self.middle.spec.projector.merge**2)
                )
                positions_T = positions_T[: len(x_TW)]
            if index in spec.deep:
                x_TW, residual_TW = summed(x_TW, residual_TW), None
                deep.append(self.deep[spec.deep.index(index)](x_TW))
        x_TW = summed(x_TW, residual_TW) if self.final_norm is None else self.final_norm(x_TW, residual_TW)[0]
        if isinstance(self.projector, QueryProjector):
            return self.projector(x_TW, len(grids))
        if self.pooler is not None:
            return self.projector(self.pooler(x_TW, grids))
        if spec.class_token:
            x_TW = x_TW[torch.from_numpy(self._patch_rows(grids)).to(x_TW.device)]
        found_LM = torch.cat([self.projector(x_TW), *deep], dim=1)
        return found_LM if back_U is None else found_LM[torch.from_numpy(back_U).to(x_TW.device)]

    @property
    def endings(self) -> Tensor | None:
        """The vectors that end lines, the one of most lines last: [L, M]; None: there are none."""
        if len(self.ends):
            assert isinstance(self.projector, Projector)
            return self.projector(torch.stack([*self.ends]).repeat_interleave(self.spec.projector.merge**2, dim=0))
        return None if self.newline is None else self.newline[None]

    def _seen(self, grids: Sequence[Grid], device: torch.device) -> PackedViews | MaskedViews:
        """Return which patches see each other, where there are no windows."""
        rows = PackedRows.of(frames(grids) + self.spec.class_token)
        if not self.spec.covered or (inside_T := covered(grids, self.spec.merge)).all():
            return PackedViews(self.ops, rows)
        hidden_T = torch.from_numpy(~inside_T).to(device)
        return MaskedViews(self.ops, rows, torch.ones_like(hidden_T), hidden_T)

    def _embedded(self, patches_TX: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return the input of the first layer: [T, W], class tokens included."""
        x_TW = self.patch(patches_TX.to(self.dtype))
        x_TW = x_TW if self.patch_norm is None else self.patch_norm(x_TW)[0]
        if self.class_token is not None:
            with_class_TW = self.class_token.expand(len(x_TW) + len(grids), -1).clone()
            with_class_TW[torch.from_numpy(self._patch_rows(grids)).to(x_TW.device)] = x_TW
            x_TW = with_class_TW
        if self.positions is not None:
            x_TW = x_TW + self._learned(grids)
        return x_TW if self.embed_norm is None else self.embed_norm(x_TW)[0]

    def _learned(self, grids: Sequence[Grid]) -> Tensor:
        """Return the learned positions of all patches: [T, W]."""
        assert self.positions is not None
        assert self.spec.grid is not None
        side, fit = self.spec.grid.side, self.spec.grid.fit
        if fit == "axes":
            row_T, column_T = torch.from_numpy(places(grids, self.spec.projector.merge)).to(self.positions.device)
            return self.positions[0, column_T] + self.positions[1, row_T]
        if fit == "own":
            rows, columns = places(grids[:1], self.spec.merge)
            order = self.spec.class_token + rows * side + columns
            order = np.concatenate([np.arange(self.spec.class_token), order])
            return self.positions[torch.from_numpy(order).to(self.positions.device)].repeat(len(grids), 1)
        own = []
        for grid in grids:
            if fit == "means":
                own.append(self._smoothed(grid))
                continue
            if fit == "nearest":
                cells_T = torch.from_numpy(nearest(grid, self.spec.merge, side))
                own.append(self.positions[cells_T.to(self.positions.device)])
                continue
            near = cubic if fit == "cubic" else corners
            cells, weights = near(Grid(1, grid.rows, grid.columns), self.spec.merge, side)
            cells_KT = torch.from_numpy(cells).to(self.positions.device)
            weights_KT = torch.from_numpy(weights).to(self.positions.device)
            each_TW = (self.positions[cells_KT].float() * weights_KT[..., None]).sum(0).to(self.dtype)
            own.append(each_TW.repeat(grid.frames, 1))
        return torch.cat(own)

    def _smoothed(self, grid: Grid) -> Tensor:
        """Return the learned positions of a view's patches, as means over the cells that they cover: [T, W]."""
        assert self.positions is not None
        side = math.isqrt(len(self.positions))
        table_1WRC = self.positions.T.unflatten(1, (side, side))[None].float()
        size = grid.rows, grid.columns
        return F.interpolate(table_1WRC, size, mode="bilinear", antialias=True)[0].flatten(1).T.to(self.dtype)

    @staticmethod
    def _patch_rows(grids: Sequence[Grid]) -> np.ndarray:
        """Return the rows of patches where each view begins with a class token, int64 [T]."""
        counts = [grid.patches for grid in grids]
        return np.arange(sum(counts)) + np.repeat(np.arange(1, len(counts) + 1), counts)


def summed(x_TW: Tensor, residual_TW: Tensor | None) -> Tensor:
    """Return the sum of a layer's two outputs: [T, W]."""
    return x_TW if residual_TW is None else x_TW + residual_TW


def _in_order(x_TW: Tensor, order_U: np.ndarray, merge: int) -> Tensor:
    """Return rows with their squares of merge x merge in this order."""
    squares = x_TW.unflatten(0, (-1, merge**2))
    return squares[torch.from_numpy(order_U).to(x_TW.device)].flatten(0, 1)


@lru_cache(8)
def _frequencies(spec: RopeSpec, apart: bool) -> Tensor:
    """Return the radians per row, and per column, of half of the pairs each: [2, 1, pairs]."""
    if apart:
        return inverse_frequencies(spec, 1)[0].view(-1, 2).T[:, None]
    return inverse_frequencies(replace(spec, rotary_dim=spec.rotary_dim // 2), 1)[0].expand(2, 1, -1)


def _angles(spec: RopeSpec, apart: bool, places_2T: np.ndarray, device: torch.device) -> Tensor:
    """Return the cosines of each patch's angles, then their sines: float32 [T, Y]. Half of the angles are those of the
    row, the others those of the column."""
    most = 1 << int(places_2T.max(initial=1)).bit_length()
    places = torch.from_numpy(places_2T)
    if device.type == "cuda":  # from ordinary memory the copy would wait for all work that is queued
        places = places.pin_memory()
    row_T, column_T = places.to(device, non_blocking=True)
    cos_2Py, sin_2Py = _turns(spec, apart, most, device)
    return torch.cat((cos_2Py[0, row_T], cos_2Py[1, column_T], sin_2Py[0, row_T], sin_2Py[1, column_T]), dim=1)


@lru_cache(8)
def _turns(spec: RopeSpec, apart: bool, most: int, device: torch.device) -> Tensor:
    """Return the cosines and sines of the angles at the first rows and columns, of which a view has many patches each:
    float32 [2, 2, most, pairs]. They are computed on the CPU, so that all devices have the same bits."""
    angles_2Py = torch.arange(most, dtype=torch.float32)[:, None] * _frequencies(spec, apart)
    return torch.stack((angles_2Py.cos(), angles_2Py.sin())).to(device)

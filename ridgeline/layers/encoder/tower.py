"""The network that turns patches of pictures into vectors. Views of all pictures lie packed behind one another.

Legend:
    T  patches of all views, and their class tokens
    X  numbers of a patch
    W  width of the tower
    M  numbers of a vector, with those that are added behind layers
    L  vectors
    Y  width of a head
    Z  rows, or columns, of the table of angles; y = Y / 4, the pairs that rotate by each
    S  rows of the table of positions
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.core.specs.queries import QueriesSpec
from ridgeline.core.specs.tower import GatedProjectorSpec, MiddleMerge, ProjectorSpec, TowerSpec
from ridgeline.kernels.attention.packed.op import PackedRows
from ridgeline.layers.build import Build
from ridgeline.layers.encoder.gated import GatedProjector
from ridgeline.layers.encoder.grids import Grid, frames
from ridgeline.layers.encoder.laid import Laid, laid
from ridgeline.layers.encoder.packed import MaskedViews, PackedViews
from ridgeline.layers.encoder.pooler import ViewPooler
from ridgeline.layers.encoder.queries import QueryProjector
from ridgeline.layers.layer import Layer
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm


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

    def forward(self, patches_TX: Tensor, grids: Sequence[Grid], texts: Sequence[Sequence[int]] = ()) -> Tensor:
        """Return the vectors of views with these patches: [L, M]. With a pooler there is one of each view. texts: the
        tokens of each view's prompt, for a projector that reads them."""
        return self.run(patches_TX, laid(self.spec, grids, patches_TX.device), texts)

    def run(self, patches_TX: Tensor, laid: Laid, texts: Sequence[Sequence[int]] = ()) -> Tensor:
        """Compute `forward` of views that are laid. A graph can hold it, but for some towers (`captured_patches`)."""
        spec, merge = self.spec, self.spec.merge
        x_TW = self._embedded(patches_TX, laid)
        whole = self._seen(laid)
        near: PackedViews | MaskedViews = whole
        if self.middle is not None:
            x_TW = self.middle.nested(x_TW, spec.projector.merge)
        if laid.order_U is not None:
            near = PackedViews(self.ops, laid.near)
            x_TW = _in_order(x_TW, laid.order_U, merge)
        positions_T = torch.arange(len(x_TW), device=x_TW.device)
        if self._rotary is not None:
            angles_TY = _angles(laid)
            self._rotary.cos_sin_ZY = angles_TY if laid.order_U is None else _in_order(angles_TY, laid.order_U, merge)
        residual_TW, deep = None, []
        for index, layer in enumerate(self.layers):
            state = whole if index in spec.whole or not spec.window else near
            x_TW, residual_TW = layer(x_TW, residual_TW, positions_T, state, None)
            if self.middle is not None and index == self.middle.spec.behind:
                x_TW, residual_TW = self.middle(summed(x_TW, residual_TW)), None
                counts = frames(laid.grids) // self.middle.spec.projector.merge**2
                near = whole = PackedViews(self.ops, PackedRows.of(counts))
                positions_T = positions_T[: len(x_TW)]
            if index in spec.deep:
                x_TW, residual_TW = summed(x_TW, residual_TW), None
                deep.append(self.deep[spec.deep.index(index)](x_TW))
        x_TW = summed(x_TW, residual_TW) if self.final_norm is None else self.final_norm(x_TW, residual_TW)[0]
        if isinstance(self.projector, QueryProjector):
            return self.projector(x_TW, len(laid.grids), texts)
        if self.pooler is not None:
            return self.projector(self.pooler(x_TW, laid.grids))
        if laid.row_T is not None:
            x_TW = x_TW[laid.row_T]
        found_LM = torch.cat([self.projector(x_TW), *deep], dim=1)
        return found_LM if laid.back_U is None else found_LM[laid.back_U]

    @property
    def endings(self) -> Tensor | None:
        """The vectors that end lines, the one of most lines last: [L, M]; None: there are none."""
        if len(self.ends):
            assert isinstance(self.projector, Projector)
            return self.projector(torch.stack([*self.ends]).repeat_interleave(self.spec.projector.merge**2, dim=0))
        return None if self.newline is None else self.newline[None]

    def _seen(self, laid: Laid) -> PackedViews | MaskedViews:
        """Return which patches see each other, where there are no windows."""
        if laid.hidden_T is None:
            return PackedViews(self.ops, laid.whole)
        return MaskedViews(self.ops, laid.whole, torch.ones_like(laid.hidden_T), laid.hidden_T)

    def _embedded(self, patches_TX: Tensor, laid: Laid) -> Tensor:
        """Return the input of the first layer: [T, W], class tokens included."""
        x_TW = self.patch(patches_TX.to(self.dtype))
        x_TW = x_TW if self.patch_norm is None else self.patch_norm(x_TW)[0]
        if self.class_token is not None and laid.row_T is not None:
            with_class_TW = self.class_token.expand(len(x_TW) + len(laid.grids), -1).clone()
            x_TW = with_class_TW.index_copy_(0, laid.row_T, x_TW)
        if self.positions is not None:
            x_TW = x_TW + self._learned(laid)
        return x_TW if self.embed_norm is None else self.embed_norm(x_TW)[0]

    def _learned(self, laid: Laid) -> Tensor:
        """Return the learned positions of all patches: [T, W]."""
        assert self.positions is not None
        if laid.cells_KT is None:
            return torch.cat([self._smoothed(grid) for grid in laid.grids])
        table_SW = self.positions.flatten(0, -2)
        first_TW, *others = (table_SW[cells_T] for cells_T in laid.cells_KT)
        if laid.weights_KT is None:
            return sum(others, first_TW)
        first_T, *weights = laid.weights_KT
        x_TW = first_TW.float() * first_T[:, None]
        for each_TW, weight_T in zip(others, weights, strict=True):
            x_TW.addcmul_(each_TW.float(), weight_T[:, None])
        return x_TW.to(self.dtype)

    def _smoothed(self, grid: Grid) -> Tensor:
        """Return the learned positions of a view's patches, as means over the cells that they cover: [T, W]."""
        assert self.positions is not None
        side = math.isqrt(len(self.positions))
        table_1WRC = self.positions.T.unflatten(1, (side, side))[None].float()
        size = grid.rows, grid.columns
        return F.interpolate(table_1WRC, size, mode="bilinear", antialias=True)[0].flatten(1).T.to(self.dtype)


def summed(x_TW: Tensor, residual_TW: Tensor | None) -> Tensor:
    """Return the sum of a layer's two outputs: [T, W]."""
    return x_TW if residual_TW is None else x_TW + residual_TW


def _in_order(x_TW: Tensor, order_U: Tensor, merge: int) -> Tensor:
    """Return rows with their squares of merge x merge in this order."""
    return x_TW.unflatten(0, (-1, merge**2))[order_U].flatten(0, 1)


def _angles(laid: Laid) -> Tensor:
    """Return the cosines of each patch's angles, then their sines: float32 [T, Y]. Half of the angles are those of the
    row, the others those of the column."""
    assert laid.places_2T is not None
    assert laid.turns_22Zy is not None
    (row_T, column_T), (cos_2Zy, sin_2Zy) = laid.places_2T, laid.turns_22Zy
    return torch.cat((cos_2Zy[0, row_T], cos_2Zy[1, column_T], sin_2Zy[0, row_T], sin_2Zy[1, column_T]), dim=1)

"""DeepSeek-OCR's towers: Segment Anything's encoder, two convolutions that halve its output, and layers that read it.

Legend:
    V  views of one size
    T  patches of all of them, line by line
    P  places of all windows, those that fill up included
    S  places along an axis of a window
    A  distances of two places along an axis
    X  numbers of a patch, or columns of the fused projection
    W  width of the layers
    H  heads
    D  width of a head, and Y with the numbers for distances
    C  channels
    y  rows of a view
    x  columns of it
    s  places of a view
    Q  queries of a view
    L  vectors
    M  numbers of a vector
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.core.specs.sam import NORM, ReaderSpec, SamTowerSpec
from ridgeline.kernels.attention.packed.op import PackedRows
from ridgeline.kernels.gemm.plain.rounded import Rounded
from ridgeline.kernels.ops import Ops
from ridgeline.layers.build import Build
from ridgeline.layers.encoder.packed import WIDER, PackedViews
from ridgeline.layers.encoder.tower import summed
from ridgeline.layers.heads import Heads
from ridgeline.layers.layer import Layer
from ridgeline.layers.linear import Linear
from ridgeline.layers.norm import Norm
from ridgeline.layers.precision import in_float32


class WindowedViews:
    """Windows of square views, a `layers.attention.Attends` whose heads have vectors of distances.

    Scores by distance are products: the rows and columns of a query's window become further numbers of the query, and
    those of a key a 1 in its row and in its column.
    """

    def __init__(self, ops: Ops, views: int, side: int, window: int, device: torch.device) -> None:
        self._ops, self._size = ops, window or side
        order_P, back_T, windows = _windows(views, side, self._size)
        self._order_P, self._back_T = (torch.from_numpy(each).to(device) for each in (order_P, back_T))
        self._rows = PackedRows.of(np.full(windows, self._size**2))
        place_P = torch.arange(len(order_P), device=device) % self._size**2
        self._row_P, self._column_P = place_P // self._size, place_P % self._size

    def attend(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, buffer: Rounded | None = None) -> Tensor:
        """Return the attended heads, [T, H * D]."""
        assert heads.grid is not None
        spec, size, grid = heads.spec, self._size, heads.grid
        filled_TX = torch.cat((qkv_TX, qkv_TX.new_zeros(1, qkv_TX.shape[1]) + grid.filling_X))
        q_PHD, k_PHD, v_PHD = heads.split(filled_TX[self._order_P], positions_T)
        near = [self._by_distance(q_PHD, each, at_P) for each, at_P in zip(grid[:2], self._places, strict=True)]
        q_PHY = torch.cat((q_PHD, *(each_PHS / spec.scale for each_PHS in near)), dim=-1)
        ones = [F.one_hot(at_P, size).to(k_PHD.dtype)[:, None].expand(-1, spec.num_heads, -1) for at_P in self._places]
        k_PHY = torch.cat((k_PHD, *ones), dim=-1)
        q_PHY, k_PHY, v_PHY = (F.pad(x, (0, _wide(q_PHY) - x.shape[2])) for x in (q_PHY, k_PHY, v_PHD))
        out_PHY = self._ops.packed_attention(q_PHY, k_PHY, v_PHY, self._rows, spec.scale, None, None)
        return out_PHY[self._back_T, :, : spec.head_dim].flatten(1)

    @property
    def _places(self) -> tuple[Tensor, Tensor]:
        return self._row_P, self._column_P

    def _by_distance(self, q_PHD: Tensor, vectors_AD: Tensor, at_P: Tensor) -> Tensor:
        """Return the products of queries with the vectors of their distances from all places of an axis: [P, H, S]."""
        size = self._size
        if len(vectors_AD) != 2 * size - 1:
            vectors_1DA = F.interpolate(vectors_AD.float().T[None], 2 * size - 1, mode="linear")
            vectors_AD = vectors_1DA[0].T.to(vectors_AD.dtype)
        every_PHA = q_PHD @ vectors_AD.T
        index_PS = at_P[:, None] - torch.arange(size, device=at_P.device) + size - 1
        return every_PHA.gather(2, index_PS[:, None].expand(-1, q_PHD.shape[1], -1))


def _wide(x: Tensor) -> int:
    return -(-x.shape[-1] // WIDER) * WIDER


@lru_cache(32)
def _windows(views: int, side: int, size: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the patch at each place of all windows (one behind the last of all: none is there), the place of each
    patch, and the number of windows. Patches lie view by view and line by line."""
    across = -(-side // size)
    found = np.full((views, across * size, across * size), views * side**2)
    found[:, :side, :side] = np.arange(views * side**2).reshape(views, side, side)
    order_P = found.reshape(views, across, size, across, size).transpose(0, 1, 3, 2, 4).reshape(-1)
    back_T = np.empty(views * side**2 + 1, np.int64)
    back_T[order_P] = np.arange(len(order_P))
    return order_P, back_T[:-1].copy(), views * across**2


class PrefixedViews:
    """Views whose places see each other, and whose queries see these and the queries before them, an `Attends`.

    places: of a view; as many queries follow.
    """

    def __init__(self, places: int, device: torch.device) -> None:
        self._places = places
        self._seen_ss = torch.ones(2 * places, 2 * places, dtype=torch.bool, device=device).tril_()
        self._seen_ss[:places, :places] = True

    def attend(self, qkv_TX: Tensor, positions_T: Tensor, heads: Heads, buffer: Rounded | None = None) -> Tensor:
        """Return the attended heads, [T, H * D]."""
        q, k, v = (x.unflatten(0, (-1, 2 * self._places)).transpose(1, 2) for x in heads.split(qkv_TX, positions_T))
        out = F.scaled_dot_product_attention(q, k, v, self._seen_ss, scale=heads.spec.scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)


class SamTower(nn.Module):
    """The tower with its projector, whole on every rank. Its parameters are uninitialised."""

    def __init__(self, spec: SamTowerSpec, build: Build) -> None:
        super().__init__()
        build = build.undivided()
        self.spec, self.ops, self.dtype = spec, build.ops, build.dtype
        self.patch = Linear(spec.patch_width, (spec.width,), spec.patch_bias, build.within("patch"))
        self.positions = build.parameter(spec.rows, spec.width)
        self.layers = nn.ModuleList(
            Layer(layer, spec.width, build.within(f"layers.{n}")) for n, layer in enumerate(spec.layers)
        )
        self.filters = nn.ParameterList(build.parameter(o, i * taps**2) for i, o, taps, _ in spec.convolutions)
        self.neck_norms = nn.ModuleList(Norm(NORM, spec.neck, build) for _ in range(2))
        self.reader = PlaceReader(spec.reader, build.within("reader"))
        self.down = Linear(spec.read, (spec.projector.outputs,), spec.projector.bias, build.within("down"))
        self.ends = nn.ParameterList(build.parameter(spec.projector.outputs) for _ in range(1 + spec.lined))

    def forward(self, patches_TX: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """Return the vectors of square views of so many rows and columns of patches: [L, M]. Those of one size run
        together."""
        parts_X = patches_TX.split([rows * columns for rows, columns in grids])
        found = [parts_X[0]] * len(grids)
        for side in sorted({rows for rows, _ in grids}):
            own = [number for number, (rows, _) in enumerate(grids) if rows == side]
            vectors_LM = self._views(torch.cat([parts_X[number] for number in own]), len(own), side)
            for number, each_LM in zip(own, vectors_LM.chunk(len(own)), strict=True):
                found[number] = each_LM
        return torch.cat(found)

    @property
    def endings(self) -> Tensor | None:
        """The vector behind a picture's last view, then the one that ends lines: [1 or 2, M]."""
        return torch.stack([*self.ends])

    def _views(self, patches_TX: Tensor, views: int, side: int) -> Tensor:
        spec, device = self.spec, patches_TX.device
        x_TW = self.patch(patches_TX.to(self.dtype)).unflatten(0, (views, -1))
        x_TW, residual_TW = (x_TW + _resized(self.positions, side)).flatten(0, 1), None
        near, whole = (WindowedViews(self.ops, views, side, each, device) for each in (spec.window, 0))
        places_T = torch.arange(len(x_TW), device=device)
        for index, layer in enumerate(self.layers):
            x_TW, residual_TW = layer(x_TW, residual_TW, places_T, whole if index in spec.whole else near, None)
        x_VyxC = summed(x_TW, residual_TW).unflatten(0, (views, side, side))
        return self.down(self.reader(self._halved(x_VyxC).flatten(1, 2)))

    def _halved(self, x_VyxC: Tensor) -> Tensor:
        """Return the convolutions' output: [V, y / 4, x / 4, C]."""
        for number, (_, _, taps, _) in enumerate(self.spec.convolutions):
            weight, stride = self.filters[number], 1 if number < len(self.neck_norms) else 2
            if taps == 1:
                x_VyxC = F.linear(x_VyxC, weight)
            else:
                kernel = weight.unflatten(1, (-1, taps, taps))
                with in_float32():
                    x_VyxC = F.conv2d(x_VyxC.movedim(3, 1), kernel, None, stride, taps // 2).movedim(1, 3)
            if number < len(self.neck_norms):
                flat = x_VyxC.flatten(0, 2).contiguous()
                x_VyxC = self.neck_norms[number](flat)[0].view(x_VyxC.shape)
        return x_VyxC


class PlaceReader(nn.Module):
    """The layers of a `ReaderSpec`."""

    def __init__(self, spec: ReaderSpec, build: Build) -> None:
        super().__init__()
        self.spec, self.ops = spec, build.ops
        width = spec.width
        build = build.undivided(positions=2 * max(spec.queries, default=0))
        self.class_token = build.parameter(width) if spec.side else None
        self.positions = build.parameter(spec.side**2 + 1, width) if spec.side else None
        self.queries = nn.ParameterList(build.parameter(count, width) for count in spec.queries)
        self.embed_norm = None if spec.embed_norm is None else Norm(spec.embed_norm, width, build)
        self.layers = nn.ModuleList(
            Layer(layer, width, build.within(f"layers.{n}")) for n, layer in enumerate(spec.layers)
        )
        self.final_norm = None if spec.final_norm is None else Norm(spec.final_norm, width, build)

    def forward(self, x_VsW: Tensor) -> Tensor:
        """Return the input of the projector, [L, numbers], for views."""
        places = x_VsW.shape[1]
        if self.class_token is not None and self.positions is not None:
            return self._classed(x_VsW, self.class_token, self.positions)
        queries_QW = next(each for each in self.queries if len(each) >= places)
        x_TW = torch.cat((x_VsW, queries_QW.expand(len(x_VsW), -1, -1)), dim=1).flatten(0, 1)
        positions_T = torch.arange(2 * places, device=x_VsW.device).repeat(len(x_VsW))
        x_TW = self._run(x_TW, positions_T, PrefixedViews(places, x_VsW.device))
        return x_TW.unflatten(0, (len(x_VsW), -1))[:, places:].flatten(0, 1)

    def _classed(self, x_VsW: Tensor, class_token: Tensor, positions: Tensor) -> Tensor:
        views, places, width = x_VsW.shape
        table_sW = torch.cat((positions[:1], _resized(positions[1:], round(places**0.5))))
        seen_VsW = torch.cat((class_token.expand(views, 1, width), x_VsW), dim=1) + table_sW
        rows = PackedViews(self.ops, PackedRows.of(np.full(views, places + 1)))
        y_TW = self._run(seen_VsW.flatten(0, 1), torch.arange(views * (places + 1), device=x_VsW.device), rows)
        y_VsW = y_TW.unflatten(0, (views, -1))[:, 1:]
        return torch.cat((y_VsW, x_VsW), dim=-1).flatten(0, 1)

    def _run(self, x_TW: Tensor, positions_T: Tensor, state: PackedViews | PrefixedViews) -> Tensor:
        x_TW, residual_TW = x_TW if self.embed_norm is None else self.embed_norm(x_TW)[0], None
        for layer in self.layers:
            x_TW, residual_TW = layer(x_TW, residual_TW, positions_T, state, None)
        if self.final_norm is not None:
            return self.final_norm(x_TW, residual_TW)[0]
        return summed(x_TW, residual_TW)


def _resized(table_sW: Tensor, side: int) -> Tensor:
    """Return a square table of positions for side x side places: [s, W]."""
    own = round(len(table_sW) ** 0.5)
    if own == side:
        return table_sW
    table_1Wyx = table_sW.float().T.unflatten(1, (own, own))[None]
    found = F.interpolate(table_1Wyx, (side, side), mode="bicubic", antialias=True)
    return found[0].flatten(1).T.to(table_sW.dtype)

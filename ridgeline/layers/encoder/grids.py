"""The places of patches: which rotate by them, which table rows they get, and which see each other. On the host.

Legend:
    T  patches
    U  squares of merged patches
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class Grid(NamedTuple):
    """A view's patches: frames, each of rows x columns. They lie in squares of merge x merge, each square's patches one
    behind the other.

    covered: the first rows and columns, which show some of the picture; None: all do.
    """

    frames: int
    rows: int
    columns: int
    covered: tuple[int, int] | None = None

    @property
    def patches(self) -> int:
        return self.frames * self.rows * self.columns


def places(grids: Sequence[Grid], merge: int) -> np.ndarray:
    """Return the row and the column of every patch, in their order: int64 [2, T]."""
    return np.concatenate([_places(grid, merge) for grid in grids], axis=1)


@lru_cache(32)
def _places(grid: Grid, merge: int) -> np.ndarray:
    inner = grid.rows // merge, merge, grid.columns // merge, merge
    found = np.indices((grid.rows, grid.columns)).reshape(2, *inner).transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return np.tile(found, grid.frames)


@lru_cache(32)
def corners(grid: Grid, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the four cells of a table of side x side positions between which each patch lies, and their weights, which
    add up to 1: int64 and float32 [4, T]. The table's corners lie on the view's."""
    row_T, column_T = _places(grid, merge)
    row_T, column_T = (
        np.linspace(0, side - 1, size, dtype=np.float32)[place_T]
        for size, place_T in ((grid.rows, row_T), (grid.columns, column_T))
    )
    top_T, left_T = row_T.astype(np.int64), column_T.astype(np.int64)
    down_T, right_T = row_T - top_T, column_T - left_T
    bottom_T, behind_T = np.minimum(top_T + 1, side - 1), np.minimum(left_T + 1, side - 1)
    cells = top_T * side + left_T, top_T * side + behind_T, bottom_T * side + left_T, bottom_T * side + behind_T
    weights = (1 - down_T) * (1 - right_T), (1 - down_T) * right_T, down_T * (1 - right_T), down_T * right_T
    return np.stack(cells), np.stack(weights)


def nearest(grid: Grid, merge: int, side: int) -> np.ndarray:
    """Return the cell of a table of side x side positions, whose edges lie on the view's, in which the corner of each
    patch lies: int64 [T]. Rounding follows float32, as the models were made. The view ends with the patches that are
    covered; the others get the first cell."""
    edges = (1 / side + np.arange(side - 1) * (1 / side)).astype(np.float32)
    row_T, column_T = (
        np.searchsorted(edges, place_T.astype(np.float32) / np.float32(size), side="right")
        for size, place_T in zip(grid.covered or (grid.rows, grid.columns), _places(grid, merge), strict=True)
    )
    return np.where(covered([grid], merge), row_T * side + column_T, 0)


def covered(grids: Sequence[Grid], merge: int) -> np.ndarray:
    """Return True for each patch that shows some of its picture: bool [T]."""
    found = []
    for grid in grids:
        (rows, columns), (row_T, column_T) = grid.covered or (grid.rows, grid.columns), _places(grid, merge)
        found.append((row_T < rows) & (column_T < columns))
    return np.concatenate(found)


@lru_cache(32)
def cubic(grid: Grid, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the 4 x 4 cells of a table of side x side positions around each patch, and their weights, by Keys' curve
    (IEEE TASSP 29, 1981) with a slope of -0.75: int64 and float32 [16, T]. The table's edges lie on the view's."""
    found = []
    for size, place_T in zip((grid.rows, grid.columns), _places(grid, merge), strict=True):
        at_T = (place_T + 0.5).astype(np.float32) / np.float32(size) * np.float32(side) - np.float32(0.5)
        first_T = np.floor(at_T)
        cells_4T = np.clip(first_T + np.arange(-1, 3)[:, None], 0, side - 1).astype(np.int64)
        away_4T = np.abs(at_T - first_T - np.arange(-1, 3, dtype=np.float32)[:, None])
        near_4T = (1.25 * away_4T - 2.25) * away_4T**2 + 1
        far_4T = -0.75 * (((away_4T - 5) * away_4T + 8) * away_4T - 4)
        found.append((cells_4T, np.where(away_4T <= 1, near_4T, far_4T).astype(np.float32)))
    (rows, down), (columns, right) = found
    cells, weights = rows[:, None] * side + columns[None], down[:, None] * right[None]
    return cells.reshape(16, -1), weights.reshape(16, -1)


def frames(grids: Sequence[Grid]) -> np.ndarray:
    """Return the number of patches of each frame, int64."""
    return np.repeat([grid.rows * grid.columns for grid in grids], [grid.frames for grid in grids])


def windows(grids: Sequence[Grid], merge: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of squares of merged patches in which those of a window follow each other, and the number of
    patches of each window: int64 [U] and [windows]. Windows at the right and at the bottom may be smaller."""
    order, counts, first = [], [], 0
    for grid in grids:
        rows, columns = grid.rows // merge, grid.columns // merge
        index = first + np.arange(grid.frames * rows * columns).reshape(grid.frames, rows, columns)
        for frame in index:
            for top in range(0, rows, window):
                for left in range(0, columns, window):
                    inside = frame[top : top + window, left : left + window].reshape(-1)
                    order.append(inside)
                    counts.append(len(inside) * merge**2)
        first += index.size
    return np.concatenate(order), np.array(counts)

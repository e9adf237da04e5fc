"""The arrays that say which positions the patches of a run have, and which of them see each other.

All of it travels to the device in one copy, which the host does not wait for. For a graph it is laid into memory that
stays where it is.

Legend:
    T  patches of all views, without class tokens
    U  squares of merged patches
    K  cells of the table of positions near a patch
    Z  rows, or columns, of the table of angles
    y  pairs of a head that rotate by rows, or by columns
    O  octets
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.specs.model import RopeSpec
from ridgeline.core.specs.tower import TowerSpec
from ridgeline.kernels.attention.packed.op import LoadedRows, PackedRows
from ridgeline.layers.encoder.grids import Grid, corners, covered, cubic, frames, nearest, places, windows
from ridgeline.layers.rotary import inverse_frequencies

SIDE = 2048  # rows and columns of patches of a view in a graph, at most
ALIGNED = 16  # octets to a multiple of which each array begins


@dataclass(frozen=True)
class Laid:
    """The views of one run, as the device needs them. What a tower does not need is None.

    grids: the views; those with which it was made, if they are loaded anew.
    whole: places that see each other without windows. near: those in windows.
    cells_KT: rows of the table of positions, int64. weights_KT: float32; None: they count alike.
    places_2T: each patch's row and column, int64. turns_22Zy: the cosines, then the sines of rows, then columns.
    order_U: the squares in the order of windows. back_U: its inverse. int64.
    row_T: where patches lie among class tokens, int64.
    hidden_T: True for patches that no others see; None: all are seen.
    """

    grids: tuple[Grid, ...]
    whole: PackedRows
    near: PackedRows
    cells_KT: Tensor | None = None
    weights_KT: Tensor | None = None
    places_2T: Tensor | None = None
    turns_22Zy: Tensor | None = None
    order_U: Tensor | None = None
    back_U: Tensor | None = None
    row_T: Tensor | None = None
    hidden_T: Tensor | None = None


def laid(spec: TowerSpec, grids: Sequence[Grid], device: torch.device) -> Laid:
    """Return the arrays that a device needs of these views."""
    arrays, near_R = _arrays(spec, grids)
    tensors = _parts(_packed(arrays, device).to(device, non_blocking=True), arrays)
    turns = None
    if spec.rope is not None:
        most = 1 << int(arrays["places_2T"].max(initial=1)).bit_length()
        turns = _turns(spec.rope, spec.rope_apart, most, device)
    whole = PackedRows.of(frames(grids) + spec.class_token)
    near = whole if near_R is None else PackedRows.of(near_R)
    return Laid(tuple(grids), whole, near, turns_22Zy=turns, **tensors)


class LaidAnew:
    """A piece of memory into which views of always as many patches are laid.

    laid: what a tower reads.
    most: views, or frames of them, at most.
    """

    def __init__(self, spec: TowerSpec, grids: Sequence[Grid], most: int, device: torch.device) -> None:
        patches = sum(grid.patches for grid in grids)
        arrays, near_R = _arrays(spec, grids)
        self._spec, self._octets_O = spec, _packed(arrays, device).to(device)
        turns = None if spec.rope is None else _turns(spec.rope, spec.rope_apart, SIDE, device)
        tokens_R = frames(grids) + spec.class_token
        alike = spec.grid is not None and spec.grid.fit == "own"
        longest = int(tokens_R[0]) if alike else patches
        self.whole = near = LoadedRows(int(tokens_R.sum()), most, longest)
        if near_R is not None:
            side = spec.window * spec.merge
            near = LoadedRows(patches, 4 * patches // side**2 + most, side**2)
        self.near = near
        self.laid = Laid(tuple(grids), self.whole, near, turns_22Zy=turns, **_parts(self._octets_O, arrays))
        self.load(grids)

    def load(self, grids: Sequence[Grid]) -> bool:
        """Lay views of as many patches as the first ones. Return False, and change nothing, if the memory has no room
        for them."""
        arrays, near_R = _arrays(self._spec, grids)
        tokens_R = frames(grids) + self._spec.class_token
        if max(max(grid.rows, grid.columns) for grid in grids) > SIDE or not self.whole.holds(tokens_R):
            return False
        if near_R is not None and not self.near.holds(near_R):
            return False
        self.whole.load(tokens_R)
        if near_R is not None:
            self.near.load(near_R)
        self._octets_O.copy_(_packed(arrays, self._octets_O.device), non_blocking=True)
        return True


def _arrays(spec: TowerSpec, grids: Sequence[Grid]) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Return the arrays of a `Laid` by their names, and the patches of each window, if there are windows."""
    found = dict[str, np.ndarray]()
    near_R = None
    if spec.grid is not None and spec.grid.fit != "means":
        cells_KT, weights_KT = _cells(spec, grids)
        found["cells_KT"] = cells_KT
        if weights_KT is not None:
            found["weights_KT"] = weights_KT
    if spec.rope is not None:
        found["places_2T"] = places(grids, spec.merge)
    if spec.window:
        found["order_U"], near_R = windows(grids, spec.merge, spec.window)
        found["back_U"] = np.argsort(found["order_U"])
    if spec.class_token:
        found["row_T"] = _patch_rows(grids)
    if spec.covered and not (inside_T := covered(grids, spec.merge)).all():
        found["hidden_T"] = ~inside_T
    return found, near_R


def _cells(spec: TowerSpec, grids: Sequence[Grid]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the rows of the table of positions that patches, and class tokens, read, and what each counts."""
    assert spec.grid is not None
    side, fit = spec.grid.side, spec.grid.fit
    if fit == "axes":
        row_T, column_T = places(grids, spec.projector.merge)
        return np.stack((column_T, side + row_T)), None
    if fit == "own":
        row_T, column_T = places(grids[:1], spec.merge)
        order = np.concatenate([np.arange(spec.class_token), spec.class_token + row_T * side + column_T])
        return np.tile(order, len(grids))[None], None
    if fit == "nearest":
        return np.concatenate([nearest(grid, spec.merge, side) for grid in grids])[None], None
    near = cubic if fit == "cubic" else corners
    each = [(near(Grid(1, grid.rows, grid.columns), spec.merge, side), grid.frames) for grid in grids]
    cells, weights = ([np.tile(one[part], (1, count)) for one, count in each] for part in (0, 1))
    return np.concatenate(cells, axis=1), np.concatenate(weights, axis=1)


def _patch_rows(grids: Sequence[Grid]) -> np.ndarray:
    """Return the rows of patches where each view begins with a class token, int64 [T]."""
    counts = [grid.patches for grid in grids]
    return np.arange(sum(counts)) + np.repeat(np.arange(1, len(counts) + 1), counts)


def _offsets(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, int], int]:
    """Return the first octet of each array, and the number of all octets."""
    found, end = dict[str, int](), 0
    for name, array in arrays.items():
        found[name] = end
        end += -(-array.nbytes // ALIGNED) * ALIGNED
    return found, end


def _packed(arrays: Mapping[str, np.ndarray], device: torch.device) -> Tensor:
    """Return all arrays in one piece of the host's memory, page-locked if they go to a GPU: uint8 [O]."""
    offsets, end = _offsets(arrays)
    staged_O = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, array in arrays.items():
        np.copyto(staged_O.numpy()[offsets[name] :][: array.nbytes].view(array.dtype).reshape(array.shape), array)
    return staged_O


def _parts(octets_O: Tensor, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return the arrays in memory that holds them."""
    offsets, _ = _offsets(arrays)
    kinds = {name: torch.from_numpy(array[:0]).dtype for name, array in arrays.items()}
    return {
        name: octets_O[offsets[name] :][: array.nbytes].view(kinds[name]).view(array.shape)
        for name, array in arrays.items()
    }


@lru_cache(8)
def _frequencies(spec: RopeSpec, apart: bool) -> Tensor:
    """Return the radians per row, and per column, of half of the pairs each: [2, 1, y]."""
    if apart:
        return inverse_frequencies(spec, 1)[0].view(-1, 2).T[:, None]
    return inverse_frequencies(replace(spec, rotary_dim=spec.rotary_dim // 2), 1)[0].expand(2, 1, -1)


@lru_cache(8)
def _turns(spec: RopeSpec, apart: bool, most: int, device: torch.device) -> Tensor:
    """Return the cosines and sines of the angles at the first rows and columns, of which a view has many patches each:
    float32 [2, 2, Z, y]. They are computed on the CPU, so that all devices have the same bits."""
    angles_2Zy = torch.arange(most, dtype=torch.float32)[:, None] * _frequencies(spec, apart)
    return torch.stack((angles_2Zy.cos(), angles_2Zy.sin())).to(device)

"""Layouts: which ranks of a mesh hold which part of a value.

A dimension that is divided by an axis of n ranks has n equal parts, of which each rank along the axis holds one. Axes
that divide no dimension hold the value several times, or each a summand of it (`partial`).

A dimension can consist of segments, such as the rows of three projections in one matrix. Then each segment is divided,
and a rank holds its part of each, one behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ridgeline.compiler.graph import TensorType
from ridgeline.core.errors import InvalidConfig


@dataclass(frozen=True)
class MeshShape:
    """The names and sizes of a mesh's axes. Ranks are counted along the last axis first."""

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def parsed(text: str) -> MeshShape:
        """Return the mesh of a text such as "dp=2,tp=4". Raise InvalidConfig."""
        found: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.strip().partition("=")
            if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in found:
                raise InvalidConfig(f"{text!r} is no mesh; name each axis once with its size, such as dp=2,tp=4.")
            found[name] = int(size)
        return MeshShape(tuple(found.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    def of(self, *names: str) -> int:
        """Return the number of ranks along these axes together."""
        sizes = dict(self.axes)
        return math.prod(sizes[name] for name in names)

    def place(self, rank: int) -> dict[str, int]:
        """Return a rank's number along each axis."""
        found = dict.fromkeys(self.names, 0)
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return found

    def groups(self, axis: str) -> list[list[int]]:
        """Return the ranks that differ along an axis alone, in the axis's order."""
        rows: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in range(self.size):
            others = tuple((name, at) for name, at in self.place(rank).items() if name != axis)
            rows.setdefault(others, []).append(rank)
        return list(rows.values())

    def ordered(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return axes in the mesh's order."""
        return tuple(name for name in self.names if name in names)


@dataclass(frozen=True)
class DimDivision:
    """The division of a dimension. axes: those that divide it, in the mesh's order. segments: the whole sizes of its
    segments, if it has several."""

    axes: tuple[str, ...] = ()
    segments: tuple[int, ...] = ()


UNDIVIDED = DimDivision()


@dataclass(frozen=True)
class TensorLayout:
    """dims: of each dimension. partial: the axes whose ranks hold summands of the value, each with how they are put
    together: sum, amax or amin."""

    dims: tuple[DimDivision, ...]
    partial: tuple[tuple[str, str], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that divide a dimension."""
        return tuple(name for each in self.dims for name in each.axes)

    @property
    def whole(self) -> bool:
        """True if every rank holds all of the value."""
        return not self.axes and not self.partial

    def with_dim(self, dim: int, division: DimDivision) -> TensorLayout:
        return replace(self, dims=(*self.dims[:dim], division, *self.dims[dim + 1 :]))

    def shape(self, whole: Sequence[int], mesh: MeshShape) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        return tuple(size // mesh.of(*each.axes) for size, each in zip(whole, self.dims, strict=True))

    def local(self, whole: TensorType, mesh: MeshShape) -> TensorType:
        return TensorType(self.shape(whole.shape, mesh), whole.dtype)

    def nbytes(self, whole: TensorType, mesh: MeshShape) -> int:
        """Return the bytes of a rank's part."""
        return math.prod(self.shape(whole.shape, mesh)) * whole.dtype.itemsize

    def __str__(self) -> str:
        told = [
            ("+".join(each.axes) or "-") + (f":{len(each.segments)}" if each.segments else "") for each in self.dims
        ]
        return f"({', '.join(told)})" + "".join(f" {how} over {axis}" for axis, how in self.partial)


def whole(type: TensorType) -> TensorLayout:
    """Return the layout of a value of which every rank has all."""
    return TensorLayout((UNDIVIDED,) * len(type.shape))


def layout_of(text: str, shape: Sequence[int], mesh: MeshShape, name: str = "a tensor") -> TensorLayout:
    """Return the layout that an annotation says: for each dimension its axes joined by "+", or "-"; behind a colon the
    sizes of segments, as in "tp:64/32/32,-".

    name: of what is annotated, for errors. Raises InvalidConfig if the annotation does not fit the shape or the mesh.
    """
    said = f"{name} of shape {tuple(shape)} cannot be divided as {text!r}:"
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if len(parts) != len(shape):
        raise InvalidConfig(f"{said} it has {len(shape)} dimensions, and the annotation {len(parts)}.")
    dims, used = [], set[str]()
    for size, part in zip(shape, parts, strict=True):
        joined, _, pieces = part.partition(":")
        names = [] if joined == "-" else joined.split("+")
        if unknown := [each for each in names if each not in mesh.names]:
            raise InvalidConfig(f"{said} the mesh has no axis {unknown[0]!r}; it has {', '.join(mesh.names)}.")
        if used & set(names) or len(set(names)) < len(names):
            raise InvalidConfig(f"{said} it names an axis twice.")
        if mesh.ordered(names) != tuple(names):
            raise InvalidConfig(f"{said} axes of one dimension stand in the mesh's order, {', '.join(mesh.names)}.")
        used |= set(names)
        if pieces and not all(piece.isdecimal() for piece in pieces.split("/")):
            raise InvalidConfig(f"{said} {pieces!r} are no sizes of segments; write them as 64/32/32.")
        segments = tuple(int(piece) for piece in pieces.split("/")) if pieces else ()
        if segments and sum(segments) != size:
            raise InvalidConfig(f"{said} its segments are {sum(segments)} together, and the dimension {size}.")
        ranks = mesh.of(*names)
        if any(each % ranks for each in segments or (size,)):
            raise InvalidConfig(f"{said} {ranks} ranks do not divide {pieces or size}.")
        dims.append(DimDivision(tuple(names), segments if len(segments) > 1 and names else ()))
    return TensorLayout(tuple(dims))


def own_part(x: Tensor, division: DimDivision, dim: int, places: dict[str, int], mesh: MeshShape) -> Tensor:
    """Return the part of a whole dimension that the rank at these places holds."""
    segments = division.segments or (x.shape[dim],)
    for axis in division.axes:
        x = part_of_segments(x, dim, segments, places[axis], mesh.of(axis))
        segments = tuple(size // mesh.of(axis) for size in segments)
    return x


def part_of_segments(x: Tensor, dim: int, segments: Sequence[int], place: int, size: int) -> Tensor:
    """Return one of `size` equal parts of each segment, one behind the other."""
    if len(segments) == 1:
        return x.narrow(dim, segments[0] // size * place, segments[0] // size)
    starts = list(accumulate(segments, initial=0))[:-1]
    pairs = zip(starts, segments, strict=True)
    return torch.cat([x.narrow(dim, start + each // size * place, each // size) for start, each in pairs], dim)


def joined_segments(parts: Sequence[Tensor], dim: int, segments: Sequence[int]) -> Tensor:
    """Return the dimension of which the parts are in the order of ranks. segments: the whole sizes, or none."""
    if len(segments) < 2:
        return torch.cat(list(parts), dim)
    held = [part.split([each // len(parts) for each in segments], dim) for part in parts]
    return torch.cat([piece for pieces in zip(*held, strict=True) for piece in pieces], dim)


def part_of_rank(x: Tensor, layout: TensorLayout, rank: int, mesh: MeshShape) -> Tensor:
    """Return the part of a whole tensor that a rank holds: a copy, dense."""
    places = mesh.place(rank)
    for dim, division in enumerate(layout.dims):
        x = own_part(x, division, dim, places, mesh)
    return x.clone(memory_format=torch.contiguous_format)

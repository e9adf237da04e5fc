"""Targets of a partitioned graph beside torch's functions: collectives, and what depends on a rank's place.

In a graph these are targets of `call` nodes without tensors of their own. run.py binds them to the ranks of a process,
or to all ranks of a simulation at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from ridgeline.compiler.ops import REDUCTIONS
from ridgeline.compiler.sharding.layout import MeshShape, joined_segments, part_of_segments
from ridgeline.parallel.axis import Axis

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)
Waiting = Callable[[], Tensor]


@dataclass(frozen=True)
class MeshCollective:
    """A collective over the ranks of one axis.

    dim: the dimension that is gathered or scattered; of an all-to-all the one that is gathered.
    split: of an all-to-all the dimension that is divided.
    how: of a reduction sum, amax or amin.
    segments: of a gather what `joined_segments` takes.
    """

    kind: str
    axis: str
    dim: int = 0
    split: int = 0
    how: str = "sum"
    segments: tuple[int, ...] = ()

    def __str__(self) -> str:
        told = {
            ALL_REDUCE: self.how,
            ALL_GATHER: f"dim {self.dim}",
            REDUCE_SCATTER: f"dim {self.dim}",
            ALL_TO_ALL: f"dim {self.dim} for {self.split}",
        }
        return f"{self.kind}[{self.axis}, {told[self.kind]}]"

    def shape(self, own: Sequence[int], mesh: MeshShape) -> tuple[int, ...]:
        """Return the shape of the result of a rank's part of a shape."""
        ranks, sizes = mesh.of(self.axis), list(own)
        if self.kind in (ALL_GATHER, ALL_TO_ALL):
            sizes[self.dim] *= ranks
        if self.kind in (REDUCE_SCATTER, ALL_TO_ALL):
            sizes[self.dim if self.kind == REDUCE_SCATTER else self.split] //= ranks
        return tuple(sizes)

    def sent(self, nbytes: int, mesh: MeshShape) -> int:
        """Return the bytes that a rank sends to others, of an operand of so many, as rings and pairs send them."""
        others, ranks = mesh.of(self.axis) - 1, mesh.of(self.axis)
        factor = {ALL_REDUCE: 2 * others, ALL_GATHER: others * ranks}.get(self.kind, others)
        return factor * nbytes // ranks

    def together(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the result of each rank, of all ranks' operands in the axis's order."""
        if self.kind == ALL_GATHER:
            return [joined_segments(parts, self.dim, self.segments)] * len(parts)
        if self.kind == ALL_TO_ALL:
            pieces = [part.chunk(len(parts), self.split) for part in parts]
            return [torch.cat(mine, self.dim) for mine in zip(*pieces, strict=True)]
        total = _put_together(parts, self.how)
        return list(total.chunk(len(parts), self.dim)) if self.kind == REDUCE_SCATTER else [total] * len(parts)

    def over(self, axis: Axis, x: Tensor) -> Tensor:
        """Return this rank's result. x may be overwritten."""
        return self._with(axis, x, _done)()

    def begun(self, axis: Axis, x: Tensor) -> Waiting:
        """Begin, and return a function that waits for the result. x may be overwritten."""
        return self._with(axis, x, _begun)

    def _with(self, axis: Axis, x: Tensor, run: Callable[[Axis, str, Tensor], Waiting]) -> Waiting:
        """Run the method of an axis that does it, and return a function that returns the result. Axes sum up and gather
        the first dimension."""
        if axis.size == 1:
            return lambda: x
        x = x.contiguous()
        if self.kind == ALL_REDUCE and self.how != "sum":
            came = run(axis, "gather_rows", x[None])
            return lambda: REDUCTIONS[self.how].plain(came(), 0)
        if self.kind == ALL_REDUCE:
            return run(axis, "all_reduce", x)
        if self.kind == REDUCE_SCATTER:
            came = run(axis, "reduce_scatter", x.movedim(self.dim, 0).contiguous())
            return lambda: came().movedim(0, self.dim)
        if self.kind == ALL_TO_ALL:
            came = run(axis, "all_to_all", torch.stack(x.chunk(axis.size, self.split)))
            return lambda: torch.cat(came().unbind(), self.dim)
        came = run(axis, "gather_rows", x.movedim(self.dim, 0).contiguous())
        if not self.segments:
            return lambda: came().movedim(0, self.dim)
        return lambda: joined_segments(came().chunk(axis.size), 0, self.segments).movedim(0, self.dim)


def _done(axis: Axis, method: str, x: Tensor) -> Waiting:
    done = getattr(axis, method)(x)
    return lambda: done


def _begun(axis: Axis, method: str, x: Tensor) -> Waiting:
    """Begin a collective of an axis, or run it if the axis has none that can be begun."""
    begin = getattr(axis, f"begin_{method}", None)
    return _done(axis, method, x) if begin is None else begin(x)


def _put_together(parts: Sequence[Tensor], how: str) -> Tensor:
    """Return the sum of parts as ranks make it, in float32 and rounded once, or their largest or smallest numbers."""
    if how != "sum":
        return REDUCTIONS[how].plain(torch.stack(list(parts)), 0)
    first = parts[0]
    narrow = first.dtype in (torch.float16, torch.bfloat16)
    return reduce(torch.add, (part.float() if narrow else part for part in parts)).to(first.dtype)


@dataclass(frozen=True)
class BegunCollective:
    """Begins a collective; what it makes is no tensor, and `Awaited` takes it."""

    collective: MeshCollective

    def __str__(self) -> str:
        return f"begin {self.collective}"


@dataclass(frozen=True)
class Awaited:
    """Waits for what a `BegunCollective` began."""

    collective: MeshCollective

    def __str__(self) -> str:
        return f"await {self.collective}"

    def __call__(self, waiting: Waiting) -> Tensor:
        return waiting()


@dataclass(frozen=True)
class OwnPart:
    """Takes a rank's part of a dimension of which it has all. segments: the sizes of the operand's segments."""

    axis: str
    dim: int
    segments: tuple[int, ...]

    def __str__(self) -> str:
        return f"own_part[{self.axis}, dim {self.dim}]"

    def at(self, place: tuple[int, int], x: Tensor) -> Tensor:
        return part_of_segments(x, self.dim, self.segments, *place)


@dataclass(frozen=True)
class DividedLookup:
    """Looks ids up in a table of which each rank has some rows. Ids of other ranks' rows give zeros, so the sum over
    the axes is the lookup."""

    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"divided_lookup[{'+'.join(self.axes)}]"

    def at(self, place: tuple[int, int], table: Tensor, ids: Tensor) -> Tensor:
        own, outside = _own_places(ids, place[0], len(table))
        return torch.nn.functional.embedding(own, table).masked_fill(outside[..., None], 0)


@dataclass(frozen=True)
class DividedGather:
    """Gathers along a dimension of which each rank has a part. Places of other ranks' parts give zeros, so the sum over
    the axes is the result."""

    axes: tuple[str, ...]
    dim: int

    def __str__(self) -> str:
        return f"divided_gather[{'+'.join(self.axes)}, dim {self.dim}]"

    def at(self, place: tuple[int, int], x: Tensor, index: Tensor) -> Tensor:
        own, outside = _own_places(index, place[0], x.shape[self.dim])
        return x.gather(self.dim, own).masked_fill(outside, 0)


@dataclass(frozen=True)
class DividedScatter:
    """Adds numbers at places of a dimension of which each rank has a part; others' places add nothing."""

    axes: tuple[str, ...]
    dim: int

    def __str__(self) -> str:
        return f"divided_scatter[{'+'.join(self.axes)}, dim {self.dim}]"

    def at(self, place: tuple[int, int], x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        own, outside = _own_places(index, place[0], x.shape[self.dim])
        return x.scatter_add(self.dim, own, source.masked_fill(outside, 0))


def _own_places(index: Tensor, place: int, size: int) -> tuple[Tensor, Tensor]:
    """Return places within a rank's part, 0 for others', and which are others'."""
    own = index - place * size
    outside = (own < 0) | (own >= size)
    return own.masked_fill(outside, 0), outside


Ranked = OwnPart | DividedLookup | DividedGather | DividedScatter


def bound(target: Any, axes: dict[str, Axis]) -> Any:
    """Return a target as a function of one rank's tensors."""
    if isinstance(target, MeshCollective):
        return partial(target.over, axes[target.axis])
    if isinstance(target, BegunCollective):
        return partial(target.collective.begun, axes[target.collective.axis])
    if isinstance(target, Ranked):
        return partial(target.at, place_of(target, {name: (axis.rank, axis.size) for name, axis in axes.items()}))
    return target


def place_of(target: Ranked, places: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Return a rank's number along the axes of a target, and how many ranks there are along them.

    places: a rank's number along each axis, and the axis's size.
    """
    number, size = 0, 1
    for axis in (target.axis,) if isinstance(target, OwnPart) else target.axes:
        number, size = number * places[axis][1] + places[axis][0], size * places[axis][1]
    return number, size

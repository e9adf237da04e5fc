"""The steps from one layout of a value to another, and the bytes that they move.

Parts are taken before anything is sent, and sums are made in parts where the new layout has parts, so that what is sent
is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ridgeline.compiler.graph import TensorType
from ridgeline.compiler.sharding.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    MeshCollective,
    OwnPart,
)
from ridgeline.compiler.sharding.layout import UNDIVIDED, DimDivision, MeshShape, TensorLayout

ReshardStep = MeshCollective | OwnPart


def steps(
    type: TensorType, has: TensorLayout, needs: TensorLayout, mesh: MeshShape
) -> Iterator[tuple[ReshardStep, TensorLayout]]:
    """Yield what leads from a layout to another, one after the other, each with the layout behind it. `needs` has no
    sums that are due, or the same as `has`."""
    while has != needs:
        step, has = _next(type, has, needs, mesh)
        yield step, has


def moved(type: TensorType, has: TensorLayout, needs: TensorLayout, mesh: MeshShape) -> int:
    """Return the bytes that a rank sends on the way from a layout to another."""
    total = 0
    for step, behind in steps(type, has, needs, mesh):
        if isinstance(step, MeshCollective):
            total += step.sent(has.nbytes(type, mesh), mesh)
        has = behind
    return total


def _next(
    type: TensorType, has: TensorLayout, needs: TensorLayout, mesh: MeshShape
) -> tuple[ReshardStep, TensorLayout]:
    dims = range(len(has.dims))
    used = {*has.axes, *(axis for axis, _ in has.partial)}
    for dim in dims:  # take a part
        axis = _following(has.dims[dim], needs.dims[dim])
        if axis is not None and axis not in used:
            segments = _local_segments(type, has.dims[dim], needs.dims[dim], dim, mesh)
            return OwnPart(axis, dim, segments), has.with_dim(dim, _longer(has.dims[dim], needs.dims[dim], axis))
    for axis, how in has.partial:  # make a sum
        if (axis, how) in needs.partial:
            continue
        done = replace(has, partial=tuple(each for each in has.partial if each[0] != axis))
        for dim in dims:
            if how == "sum" and not needs.dims[dim].segments and _following(has.dims[dim], needs.dims[dim]) == axis:
                longer = _longer(has.dims[dim], needs.dims[dim], axis)
                return MeshCollective(REDUCE_SCATTER, axis, dim), done.with_dim(dim, longer)
        return MeshCollective(ALL_REDUCE, axis, how=how), done
    for dim in dims:  # exchange one divided dimension for another
        last = has.dims[dim].axes[-1:]
        if not last or _leads_to(has.dims[dim], needs.dims[dim]) or has.dims[dim].segments:
            continue
        for other in dims:
            longer = needs.dims[other]
            if other != dim and not longer.segments and _following(has.dims[other], longer) == last[0]:
                done = has.with_dim(dim, _shorter(has.dims[dim]))
                step = MeshCollective(ALL_TO_ALL, last[0], dim, split=other)
                return step, done.with_dim(other, _longer(has.dims[other], longer, last[0]))
    for dim in dims:  # gather
        if not _leads_to(has.dims[dim], needs.dims[dim]):
            shorter = _shorter(has.dims[dim])
            ranks = mesh.of(*shorter.axes)
            segments = tuple(size // ranks for size in has.dims[dim].segments)
            return MeshCollective(ALL_GATHER, has.dims[dim].axes[-1], dim, segments=segments), has.with_dim(
                dim, shorter
            )
    raise AssertionError(f"no step leads from {has} to {needs}")


def _leads_to(has: DimDivision, needs: DimDivision) -> bool:
    """True if a dimension need only be divided further."""
    if has.axes and has.segments != needs.segments:
        return False
    return needs.axes[: len(has.axes)] == has.axes


def _following(has: DimDivision, needs: DimDivision) -> str | None:
    """Return the axis that divides a dimension next."""
    return needs.axes[len(has.axes)] if _leads_to(has, needs) and len(needs.axes) > len(has.axes) else None


def _longer(has: DimDivision, needs: DimDivision, axis: str) -> DimDivision:
    return DimDivision((*has.axes, axis), needs.segments)


def _shorter(has: DimDivision) -> DimDivision:
    return DimDivision(has.axes[:-1], has.segments) if len(has.axes) > 1 else UNDIVIDED


def _local_segments(
    type: TensorType, has: DimDivision, needs: DimDivision, dim: int, mesh: MeshShape
) -> tuple[int, ...]:
    ranks = mesh.of(*has.axes)
    return tuple(size // ranks for size in needs.segments or (type.shape[dim],))

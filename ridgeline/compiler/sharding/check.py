"""Verifies a partitioned graph: every value is the part that its layout says, and every sum that was due was made.

The layout of a value follows from those of the operands and the rule of the op, not from what the partitioner meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ridgeline.compiler.graph import GraphNode, GraphValue, InvalidGraph, TensorType, replaced, verify
from ridgeline.compiler.sharding.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Awaited,
    BegunCollective,
    DividedGather,
    DividedLookup,
    DividedScatter,
    MeshCollective,
    OwnPart,
    Ranked,
)
from ridgeline.compiler.sharding.layout import UNDIVIDED, DimDivision, MeshShape, TensorLayout, whole
from ridgeline.compiler.sharding.partition import DIVIDED_FORMS, PLACED, LocalValue, ShardedGraph
from ridgeline.compiler.sharding.products import DIVIDED
from ridgeline.compiler.sharding.propagate import Assignment
from ridgeline.compiler.sharding.rules import RESULT, OpRule, argument, piece, rule_of

aten = torch.ops.aten
MOVES = (
    aten.reshape.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.select.int, aten.slice.Tensor,
)  # fmt: skip


def check(sharded: ShardedGraph) -> ShardedGraph:
    """Return the graph. Raise InvalidGraph if a rank's part is not what its layout says."""
    verify(sharded.graph)
    begun: dict[GraphValue, GraphNode] = {}
    for node in sharded.graph.nodes:
        target = node.attributes.get("target")
        if isinstance(target, BegunCollective):
            begun[node.result] = node
            continue
        if isinstance(target, Awaited):
            start = begun.pop(node.values[0], None)
            if start is None or start.attributes["target"] != BegunCollective(target.collective):
                raise InvalidGraph(f"{node.result.name} awaits what was not begun, or twice: {target}.")
            node = replace(start, result=node.result, attributes={**start.attributes, "target": target.collective})
        if node.result in sharded.held:
            _check_node(node, sharded)
    if begun:
        raise InvalidGraph(f"{next(iter(begun)).name} is begun and never awaited.")
    _check_outputs(sharded)
    return sharded


def _check_node(node: GraphNode, sharded: ShardedGraph) -> None:
    held, target = sharded.held[node.result], node.attributes.get("target")
    if node.result.type != held.type(sharded.mesh):
        raise InvalidGraph(f"{node.result.name} is {node.result.type}, and {held.layout} of {held.whole} is not.")
    if isinstance(target, MeshCollective | OwnPart):
        before = sharded.held[node.values[0]]
        if not sharded.same(before.source, held.source):
            raise InvalidGraph(f"{node.result.name} = {target} takes a part of another value.")
        try:
            made = _moved(target, before, sharded.mesh)
        except (InvalidGraph, IndexError) as error:
            raise InvalidGraph(f"{node.result.name} = {target} of {before.layout}: {error}") from error
    else:
        made = _computed(node, sharded)
    if made != held.layout:
        raise InvalidGraph(f"{node.result.name} is said to be {held.layout}, and its operands make {made}.")
    _check_shape(node)


def _moved(target: MeshCollective | OwnPart, before: LocalValue, mesh: MeshShape) -> TensorLayout:
    """Return the layout behind a collective. Raise InvalidGraph if it does not fit the one before."""
    has, axis, dim = before.layout, target.axis, target.dim
    if isinstance(target, OwnPart):
        if axis in has.axes or axis in dict(has.partial):
            raise InvalidGraph(f"{axis} divides it already.")
        segments = tuple(size * mesh.of(*has.dims[dim].axes) for size in target.segments)
        return _further(has, dim, axis, segments if len(segments) > 1 else (), mesh)
    if target.kind in (ALL_REDUCE, REDUCE_SCATTER):
        if (axis, target.how) not in has.partial:
            raise InvalidGraph(f"no {target.how} over {axis} is due.")
        done = replace(has, partial=tuple(each for each in has.partial if each[0] != axis))
        return done if target.kind == ALL_REDUCE else _further(done, dim, axis, (), mesh)
    division = has.dims[dim]
    if division.axes[-1:] != (axis,):
        raise InvalidGraph(f"{axis} is not what divides dimension {dim} last.")
    ranks = mesh.of(*division.axes[:-1])
    if tuple(size // ranks for size in division.segments) != target.segments:
        raise InvalidGraph("the segments are others.")
    shorter = DimDivision(division.axes[:-1], division.segments) if len(division.axes) > 1 else UNDIVIDED
    done = has.with_dim(dim, shorter)
    if target.kind == ALL_GATHER:
        return done
    assert target.kind == ALL_TO_ALL
    if target.split == dim:
        raise InvalidGraph("one dimension is split and gathered.")
    return _further(done, target.split, axis, (), mesh)


def _further(has: TensorLayout, dim: int, axis: str, segments: tuple[int, ...], mesh: MeshShape) -> TensorLayout:
    own = has.dims[dim]
    if own.axes and own.segments != segments:
        raise InvalidGraph("the segments are others.")
    if mesh.ordered((*own.axes, axis)) != (*own.axes, axis):
        raise InvalidGraph(f"{axis} comes before what divides dimension {dim}.")
    return has.with_dim(dim, DimDivision((*own.axes, axis), segments))


def _computed(node: GraphNode, sharded: ShardedGraph) -> TensorLayout:
    """Return the layout that an op makes of its operands' layouts."""
    origin, held = sharded.origins.get(node), sharded.held
    if origin is None:
        raise InvalidGraph(f"{node.result.name} computes nothing of the graph for one device.")
    same = node.op == origin.op and len(node.values) == len(origin.values)
    pairs = zip(node.values, origin.values, strict=False)
    if not same or not all(sharded.same(held[a].source, b) for a, b in pairs if a in held):
        raise InvalidGraph(f"{node.result.name} does not take the operands of {origin.result.name}.")
    if held[node.result].source is not origin.result:
        raise InvalidGraph(f"{node.result.name} is not said to be {origin.result.name}.")
    _check_arguments(node, origin, sharded)
    layouts = [held[value].layout for value in node.values if value in held]
    rule = rule_of(origin, layouts) if len(layouts) == len(node.values) else None
    if rule is None:
        if any(not layout.whole for layout in layouts):
            raise InvalidGraph(f"{node.result.name} takes a part of what {origin.result.name} needs whole.")
        return whole(held[node.result].whole)
    partial = _sums_through(node, origin, layouts)
    made = assigned(rule, layouts, held[node.result].layout).layout(rule, RESULT)
    both = {*made.axes, *dict(made.partial)} & {axis for axis, _ in partial}
    if both:
        raise InvalidGraph(f"{node.result.name} divides by {', '.join(sorted(both))}, along which a sum is due.")
    return replace(made, partial=tuple(sorted((*made.partial, *partial))))


def assigned(rule: OpRule, layouts: Sequence[TensorLayout], result: TensorLayout) -> Assignment:
    """Return which factors the operands divide; of those that only the result has, as it does. Raise InvalidGraph if
    operands do not fit each other."""
    factors: dict[int, DimDivision] = {}
    seen: set[int] = set()
    for number, dims in rule.values():
        layout = result if number == RESULT else layouts[number]
        for dim, (own, division) in enumerate(zip(dims, layout.dims, strict=True)):
            if number == RESULT and (not own or own[0] in seen):
                continue
            if (number, dim) in rule.segments and division.axes:
                if division.segments != rule.segments[number, dim]:
                    raise InvalidGraph(f"operand {number} has other segments than {rule.segments[number, dim]}")
                division = replace(division, segments=())
            if not own or not rule.divisible(own[0]):
                if division.axes:
                    raise InvalidGraph(f"dimension {dim} of operand {number} is divided and must be whole")
                if not own:
                    continue
            if factors.setdefault(own[0], division) != division:
                raise InvalidGraph(f"dimension {dim} of operand {number} is divided by {division.axes} alone")
            seen.add(own[0])
    named = [axis for division in factors.values() for axis in division.axes]
    if len(named) != len(set(named)):
        raise InvalidGraph("an axis divides two dimensions")
    return Assignment({factor: division for factor, division in factors.items() if division.axes})


def _sums_through(node: GraphNode, origin: GraphNode, layouts: Sequence[TensorLayout]) -> tuple[tuple[str, str], ...]:
    """Return the sums that are due of an op's result because they are of its operands. Raise InvalidGraph if the op of
    summands is not a summand of the op."""
    due = [layout.partial for layout in layouts]
    if not any(due):
        return ()
    sums = all(how == "sum" for each in due for _, how in each)
    numbers = len(node.operands) > len(node.values)
    if origin.op in ("add", "sub"):
        fits = len(set(due)) == 1 and not numbers
    elif origin.op == "mul" or (origin.op == "div" and isinstance(node.operands[0], GraphValue)):
        fits = sum(map(bool, due)) == 1 and (origin.op == "mul" or bool(due[0]))
    else:
        fits = origin.op in ("neg", "sum") or _target(node) in MOVES
    if not sums or not fits:
        raise InvalidGraph(f"{node.result.name} = {origin.op} takes a value of which a sum is due.")
    return max(due, key=len)


def _target(node: GraphNode) -> object:
    return node.attributes.get("target")


def _check_arguments(node: GraphNode, origin: GraphNode, sharded: ShardedGraph) -> None:
    """Raise InvalidGraph if a node does not compute what its origin does."""
    if node.op != "call":
        same = node.attributes.get("dims") == origin.attributes.get("dims")
        numbers = [each for each in node.operands if not isinstance(each, GraphValue)]
        if not same or numbers != [each for each in origin.operands if not isinstance(each, GraphValue)]:
            raise InvalidGraph(f"{node.result.name} has other numbers than {origin.result.name}.")
        return
    target, wanted = _target(node), _target(origin)
    place = PLACED.get(wanted)
    divided = () if place is None else sharded.held[node.values[0]].layout.dims[place(origin)].axes
    if isinstance(target, DividedLookup | DividedGather | DividedScatter):
        if place is None or divided != target.axes or type(target) is not DIVIDED_FORMS[wanted]:
            raise InvalidGraph(f"{node.result.name} = {target} of what is divided by {divided}.")
        return
    if target is not wanted or wanted is DIVIDED:
        raise InvalidGraph(f"{node.result.name} calls {target}, and {origin.result.name} {wanted}.")
    if divided:
        raise InvalidGraph(f"{node.result.name} = {target} takes places of the whole in a rank's part.")
    if wanted is aten.slice.Tensor and node.values[0].type != origin.values[0].type:
        dim = argument(origin, 1, "dim", 0) % len(origin.result.tensor.shape)
        ranks = sharded.mesh.of(*sharded.held[node.values[0]].layout.dims[dim].axes)
        if [at * ranks for at in piece(node)] != list(piece(origin)):
            raise InvalidGraph(f"{node.result.name} takes another piece than {origin.result.name}.")


def _check_shape(node: GraphNode) -> None:
    """Raise InvalidGraph if a call's shape is not what torch makes of the operands'."""
    target = _target(node)
    if node.op != "call" or isinstance(target, MeshCollective | Ranked):
        return
    if node.result.type is None or any(value.type is None for value in node.values):
        return
    examples: Mapping[GraphValue, Any] = {value: _example(value.tensor) for value in node.values}
    arguments = replaced(node.attributes["arguments"], examples)
    named = {**replaced(node.attributes["named"], examples)}
    if "device" in named:
        named["device"] = "meta"
    function: Callable[..., Any] = target  # type: ignore[assignment]
    try:
        made = function(*arguments, **named)
    except (RuntimeError, IndexError, TypeError) as error:
        raise InvalidGraph(f"{node.result.name} = {target}: {str(error).splitlines()[0]}") from error
    if isinstance(made, torch.Tensor) and tuple(made.shape) != node.result.tensor.shape:
        raise InvalidGraph(f"{node.result.name} = {target} makes {tuple(made.shape)}, not {node.result.type}.")


def _example(type: TensorType) -> torch.Tensor:
    return torch.empty(type.shape, dtype=type.dtype, device="meta")


def _check_outputs(sharded: ShardedGraph) -> None:
    for local, source, layout in zip(sharded.graph.outputs, sharded.source.outputs, sharded.promised, strict=True):
        if layout is None:
            continue
        held = sharded.held[local]
        if not sharded.same(held.source, source):
            raise InvalidGraph(f"{local.name} is given out in the place of {source.name}.")
        if held.layout != layout:
            raise InvalidGraph(f"{local.name} is given out as {held.layout}, and was promised as {layout}.")

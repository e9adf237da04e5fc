"""Runs a partitioned graph: as a program of one rank among processes, or all ranks at once in this thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ridgeline.compiler.graph import GraphNode, GraphValue, OpGraph, replaced, verify
from ridgeline.compiler.passes.canonicalize import canonicalize
from ridgeline.compiler.passes.fuse import fuse
from ridgeline.compiler.program import CompiledProgram, plain
from ridgeline.compiler.sharding.check import MOVES
from ridgeline.compiler.sharding.collectives import (
    Awaited,
    BegunCollective,
    MeshCollective,
    Ranked,
    bound,
    place_of,
)
from ridgeline.compiler.sharding.layout import MeshShape, TensorLayout, joined_segments, part_of_rank
from ridgeline.compiler.sharding.partition import ShardedGraph
from ridgeline.compiler.sharding.products import batched_product, product
from ridgeline.compiler.targets import CpuTarget, Target
from ridgeline.parallel.axis import Axis

aten = torch.ops.aten
FRESH = (product, batched_product, aten.mm.default, aten.bmm.default)  # what makes a tensor of its own


def program_of(graph: OpGraph, axes: Mapping[str, Axis], target: Target | None = None) -> CompiledProgram:
    """Return the program of a rank for a partitioned graph, with kernels as any graph gets them.

    axes: the rank's neighbours by the names of the mesh's axes. target: where it runs; None: on a CPU.
    """
    target = CpuTarget() if target is None else target
    graph = canonicalize(graph)  # first: sums may overwrite what nothing else takes by then
    graph = bound_graph(on_device(graph, torch.device(target.device)), axes)
    return CompiledProgram(verify(fuse(graph)), target)


def bound_graph(graph: OpGraph, axes: Mapping[str, Axis]) -> OpGraph:
    """Return the graph with functions of a rank in the place of collectives."""
    makers, uses = {node.result: node for node in graph.nodes}, graph.uses()

    def change(node: GraphNode) -> GraphNode:
        if node.op != "call":
            return node
        target = node.attributes["target"]
        found = bound(target, dict(axes))
        if isinstance(target, MeshCollective | BegunCollective) and not _own(node.values[0], makers, uses):
            found = _of_copy(found)
        return replace(node, attributes={**node.attributes, "target": found})

    return replace(graph, nodes=tuple(map(change, graph.nodes)))


def _own(value: GraphValue, makers: Mapping[GraphValue, GraphNode], uses: Mapping[GraphValue, int]) -> bool:
    """True if a value has memory that nothing else takes, so that a sum may overwrite it."""
    maker = makers.get(value)
    if maker is None or uses[value] > 1:
        return False
    if maker.attributes.get("target") in MOVES:
        return _own(maker.values[0], makers, uses)
    return maker.op != "call" or maker.attributes["target"] in FRESH


def _of_copy(function: Any) -> Any:
    return lambda x: function(x.clone())


def on_device(graph: OpGraph, device: torch.device) -> OpGraph:
    """Return the graph with tensors that it makes on another device."""

    def change(node: GraphNode) -> GraphNode:
        if node.op != "call":
            return node
        named, arguments = dict(node.attributes["named"]), node.attributes["arguments"]
        if "device" in named:
            named["device"] = device
        arguments = tuple(each.to(device) if isinstance(each, Tensor) else each for each in arguments)
        return replace(node, attributes={**node.attributes, "arguments": arguments, "named": named})

    return replace(graph, nodes=tuple(map(change, graph.nodes)))


def parts(sharded: ShardedGraph, inputs: Sequence[Any], rank: int) -> list[Any]:
    """Return a rank's parts of whole inputs."""
    return [
        part_of_rank(each, sharded.held[value].layout, rank, sharded.mesh) if value in sharded.held else each
        for value, each in zip(sharded.graph.inputs, inputs, strict=True)
    ]


def simulated(sharded: ShardedGraph, inputs: Sequence[Any]) -> list[list[Any]]:
    """Return the outputs of every rank for whole inputs: all ranks run node by node, in this thread."""
    mesh, ranks = sharded.mesh, range(sharded.mesh.size)
    values: list[dict[Any, Any]] = []
    for rank in ranks:
        values.append(dict(zip(sharded.graph.inputs, parts(sharded, inputs, rank), strict=True)))
    for node in sharded.graph.nodes:
        made = _on_all(node, values, mesh)
        for rank in ranks:
            values[rank][node.result] = made[rank]
    return [[own[x] if isinstance(x, GraphValue) else x for x in sharded.graph.outputs] for own in values]


def _on_all(node: GraphNode, values: Sequence[Mapping[Any, Any]], mesh: MeshShape) -> list[Any]:
    target = node.attributes.get("target")
    if node.op != "call":
        return [plain(node, dict(own)) for own in values]
    if isinstance(target, Awaited):
        return [own[node.values[0]] for own in values]
    if isinstance(target, BegunCollective):
        target = target.collective
    if isinstance(target, MeshCollective):
        made: dict[int, Tensor] = {}
        for group in mesh.groups(target.axis):
            together = target.together([values[rank][node.values[0]] for rank in group])
            made.update(zip(group, together, strict=True))
        return [made[rank] for rank in range(mesh.size)]
    arguments, named = node.attributes["arguments"], node.attributes["named"]
    if isinstance(target, Ranked):
        found = []
        for rank, own in enumerate(values):
            places = {axis: (at, mesh.of(axis)) for axis, at in mesh.place(rank).items()}
            found.append(target.at(place_of(target, places), *replaced(arguments, own)))
        return found
    assert target is not None
    return [target(*replaced(arguments, own), **replaced(named, own)) for own in values]


def assembled(held: Sequence[Tensor], layout: TensorLayout, mesh: MeshShape) -> Tensor:
    """Return the whole tensor of all ranks' parts, in the order of ranks. Those that hold the same must hold equal
    numbers; raise ValueError if they do not."""
    at = {tuple(mesh.place(rank).values()): part for rank, part in enumerate(held)}
    for axis in reversed(mesh.names):
        dims = [dim for dim, each in enumerate(layout.dims) if axis in each.axes]
        place, size = mesh.names.index(axis), mesh.of(axis)
        joined: dict[tuple[int, ...], Tensor] = {}
        for key in {(*key[:place], 0, *key[place + 1 :]) for key in at}:
            own = [at[(*key[:place], number, *key[place + 1 :])] for number in range(size)]
            if dims:
                joined[key] = _joined(own, layout, dims[0], axis, mesh)
            elif all(torch.equal(each, own[0]) or _both_nan(each, own[0]) for each in own):
                joined[key] = own[0]
            else:
                raise ValueError(f"ranks along {axis} hold different numbers of what each has whole: {layout}")
        at = joined
    (only,) = at.values()
    return only


def _joined(own: Sequence[Tensor], layout: TensorLayout, dim: int, axis: str, mesh: MeshShape) -> Tensor:
    division = layout.dims[dim]
    before = mesh.of(*division.axes[: division.axes.index(axis)])
    return joined_segments(own, dim, [size // before for size in division.segments])


def _both_nan(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))

"""Rewrites a graph for one rank: local shapes, and collectives wherever what an op has is not what it needs.

All ranks get the same graph. What depends on a rank's place is a target of collectives.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ridgeline.compiler.graph import GraphNode, GraphValue, InvalidGraph, Operand, OpGraph, TensorType
from ridgeline.compiler.sharding.collectives import (
    BegunCollective,
    DividedGather,
    DividedLookup,
    DividedScatter,
    MeshCollective,
)
from ridgeline.compiler.sharding.layout import MeshShape, TensorLayout, whole
from ridgeline.compiler.sharding.products import DIVIDED
from ridgeline.compiler.sharding.propagate import choose, propagate
from ridgeline.compiler.sharding.reshard import moved, steps
from ridgeline.compiler.sharding.rules import RESULT, argument, piece, rule_of

aten = torch.ops.aten
SIZED = {
    **dict.fromkeys((aten.reshape.default, aten.expand.default, aten.slice_backward.default), 1),
    aten.select_backward.default: 1,
    **dict.fromkeys((aten.full.default, aten.zeros.default, aten.ones.default), 0),
}  # which argument is the result's sizes
PLACED: dict[object, Callable[[GraphNode], int]] = {
    aten.embedding.default: lambda node: 0,
    aten.gather.default: lambda node: argument(node, 1) % len(node.values[0].tensor.shape),
    aten.scatter_add.default: lambda node: argument(node, 1) % len(node.values[0].tensor.shape),
}  # the dimension of the first operand in which places are counted
DIVIDED_FORMS: dict[object, type] = {
    aten.embedding.default: DividedLookup,
    aten.gather.default: DividedGather,
    aten.scatter_add.default: DividedScatter,
}


@dataclass(frozen=True)
class LocalValue:
    """A value of a partitioned graph: the value of the graph for one device, and the part of it that a rank holds."""

    source: GraphValue
    layout: TensorLayout

    @property
    def whole(self) -> TensorType:
        return self.source.tensor

    def type(self, mesh: MeshShape) -> TensorType:
        """The type of a rank's part."""
        return self.layout.local(self.whole, mesh)


@dataclass(frozen=True)
class ShardedGraph:
    """A partitioned graph.

    graph: what each rank computes. source: the graph for one device. mesh: the ranks.
    held: of every value of `graph` that is a tensor, what it is.
    origins: of its nodes those of `source`: what they compute, or for what a collective was inserted.
    layouts: of every value of `source`. promised: in which of them the outputs are given, if they are tensors.
    unknown: names of ops without a rule, which every rank computes whole.
    """

    graph: OpGraph
    source: OpGraph
    mesh: MeshShape
    held: Mapping[GraphValue, LocalValue]
    origins: Mapping[GraphNode, GraphNode | None]
    layouts: Mapping[GraphValue, TensorLayout]
    promised: tuple[TensorLayout | None, ...]
    unknown: tuple[str, ...] = ()

    def collectives(self) -> list[tuple[GraphNode, MeshCollective]]:
        """Return the collectives in order."""
        return [(node, each) for node in self.graph.nodes if (each := collective_of(node)) is not None]

    def same(self, a: GraphValue, b: GraphValue) -> bool:
        """True if two values of `source` are the same numbers, but for marks."""
        return self._unmarked.get(a, a) is self._unmarked.get(b, b)

    @cached_property
    def _unmarked(self) -> dict[GraphValue, GraphValue]:
        found: dict[GraphValue, GraphValue] = {}
        for node in self.source.nodes:
            if node.attributes.get("target") is DIVIDED:
                found[node.result] = found.get(node.values[0], node.values[0])
        return found

    def outputs(self) -> list[LocalValue | None]:
        """Return the outputs of a rank; None: no tensor."""
        return [self.held.get(each) if isinstance(each, GraphValue) else None for each in self.graph.outputs]


def collective_of(node: GraphNode) -> MeshCollective | None:
    """Return the collective of a node; of one that is begun and awaited the awaiting node has none."""
    target = node.attributes.get("target")
    target = target.collective if isinstance(target, BegunCollective) else target
    return target if isinstance(target, MeshCollective) else None


def partition(
    graph: OpGraph,
    annotated: Mapping[GraphValue, TensorLayout],
    mesh: MeshShape,
    outputs: Sequence[TensorLayout | None] = (),
) -> ShardedGraph:
    """Return the graph of a rank.

    annotated: the layouts of some values: inputs, or what nodes make. outputs: of each output; None, or none at all:
    every rank gets all of it.

    Raises InvalidGraph if the graph draws numbers, which ranks would draw apart.
    """
    asked = {
        value: layout
        for value, layout in zip(graph.outputs, outputs, strict=False)
        if isinstance(value, GraphValue) and layout is not None
    }
    layouts = propagate(graph, annotated, asked, mesh)
    return _Partitioner(graph, layouts, mesh).run(outputs)


@dataclass
class _Partitioner:
    graph: OpGraph
    layouts: dict[GraphValue, TensorLayout]
    mesh: MeshShape
    inputs: list[GraphValue] = field(default_factory=list)
    nodes: list[GraphNode] = field(default_factory=list)
    held: dict[GraphValue, LocalValue] = field(default_factory=dict)
    origins: dict[GraphNode, GraphNode | None] = field(default_factory=dict)
    versions: dict[GraphValue, dict[TensorLayout, GraphValue]] = field(default_factory=dict)
    opaque: dict[GraphValue, GraphValue] = field(default_factory=dict)  # what is no tensor, as every rank has it
    unknown: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uses = self.graph.uses()

    def run(self, outputs: Sequence[TensorLayout | None]) -> ShardedGraph:
        for value in self.graph.inputs:
            if value.type is None:
                local = self.opaque[value] = GraphValue(self._name(), None)
            else:
                layout = self.layouts[value]
                local = self._local(value, value.type, layout)
            self.inputs.append(local)
        for node in self.graph.nodes:
            self._node(node)
        given, promised = list[Any](), list[TensorLayout | None]()
        for at, each in enumerate(self.graph.outputs):
            tensor = isinstance(each, GraphValue) and each.type is not None
            asked = outputs[at] if at < len(outputs) else None
            promised.append((asked or whole(each.type)) if tensor else None)
            given.append(self._as(each, promised[-1], None) if isinstance(each, GraphValue) else each)
        graph = OpGraph(tuple(self.inputs), tuple(self.nodes), tuple(given))
        return ShardedGraph(
            graph, self.graph, self.mesh, self.held, self.origins, self.layouts, tuple(promised), tuple(self.unknown)
        )

    def _node(self, node: GraphNode) -> None:
        operands = [self.layouts[value] for value in node.values if value in self.layouts]
        rule = rule_of(node, operands) if len(operands) == len(node.values) else None
        if rule is None:
            self._whole(node)
            return
        shares = [self.uses[value] for value in node.values]
        chosen = choose(node, rule, [*operands, self.layouts[node.result]], shares, self.mesh)
        taken = [self._as(value, chosen.layout(rule, at), node) for at, value in enumerate(node.values)]
        made = chosen.layout(rule, RESULT)
        type = made.local(node.result.tensor, self.mesh)
        if node.op != "call":
            iterator = iter(taken)
            rewritten: tuple[Operand, ...] = tuple(
                next(iterator) if isinstance(each, GraphValue) else each for each in node.operands
            )
            self._add(node, replace(node, operands=rewritten), made)
        elif node.attributes["target"] is DIVIDED:
            self.versions[node.result] = {made: taken[0]}
        else:
            self._add(node, self._call(node, taken, type, made), made)
        self._as(node.result, self.layouts[node.result], node)

    def _call(self, node: GraphNode, taken: Sequence[GraphValue], type: TensorType, made: TensorLayout) -> GraphNode:
        """Return a call of local values, in which sizes are local too."""
        target = node.attributes["target"]
        arguments, named = placed((node.attributes["arguments"], node.attributes["named"]), iter(taken))
        divided = self.held[taken[0]].layout.dims[PLACED[target](node)].axes if target in PLACED else ()
        if divided:
            target, arguments, named = _of_part(node, divided), tuple(taken), {}
        elif target in SIZED:
            at = SIZED[target]
            arguments = (*arguments[:at], list(type.shape), *arguments[at + 1 :])
        elif target is aten.slice.Tensor and node.values[0].tensor.shape != node.result.tensor.shape:
            arguments, named = self._local_slice(node, taken[0]), {}
        return replace(
            node,
            operands=tuple(taken),
            attributes={"target": target, "arguments": arguments, "named": named},
        )

    def _local_slice(self, node: GraphNode, taken: GraphValue) -> tuple[Any, ...]:
        dim = argument(node, 1, "dim", 0) % len(taken.tensor.shape)
        start, end = piece(node)
        ranks = self.mesh.of(*self.held[taken].layout.dims[dim].axes)
        return (taken, dim, start // ranks, end // ranks, argument(node, 4, "step", 1))

    def _whole(self, node: GraphNode) -> None:
        """Let every rank compute a node that has no rule."""
        target = node.attributes.get("target")
        if isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
            raise InvalidGraph(
                f"{node.result.name} = {target} draws numbers, which ranks would draw apart; take it out."
            )
        if node.values:
            self.unknown[str(getattr(target, "__name__", target))] = None
        taken = [self._as(value, None, node) for value in node.values]
        arguments, named = placed((node.attributes["arguments"], node.attributes["named"]), iter(taken))
        attributes = {**node.attributes, "arguments": arguments, "named": named}
        changed = replace(node, operands=tuple(taken), attributes=attributes)
        self._add(node, changed, None if node.result.type is None else whole(node.result.type))
        if node.result.type is not None:
            self._as(node.result, self.layouts[node.result], node)

    def _as(self, value: GraphValue, layout: TensorLayout | None, origin: GraphNode | None) -> GraphValue:
        """Return a value in a layout, made of the version from which the fewest bytes are moved. None: whole."""
        if value in self.opaque:
            return self.opaque[value]
        type = value.tensor
        layout = whole(type) if layout is None else layout
        versions = self.versions[value]
        if layout not in versions:
            nearest = min(versions, key=lambda has: moved(type, has, layout, self.mesh))
            at = versions[nearest]
            for step, behind in steps(type, nearest, layout, self.mesh):
                if behind not in versions:
                    result = self._local(value, type, behind)
                    attributes: dict[str, Any] = {"target": step, "arguments": (at,), "named": {}}
                    node = GraphNode("call", (at,), result, attributes)
                    self.nodes.append(node)
                    self.origins[node] = origin
                at = versions[behind]
        return versions[layout]

    def _local(self, value: GraphValue, type: TensorType, layout: TensorLayout) -> GraphValue:
        local = GraphValue(self._name(), layout.local(type, self.mesh))
        self.held[local] = LocalValue(value, layout)
        self.versions.setdefault(value, {})[layout] = local
        return local

    def _add(self, origin: GraphNode, node: GraphNode, layout: TensorLayout | None) -> None:
        if layout is None:
            result = self.opaque[origin.result] = GraphValue(self._name(), None)
        else:
            result = self._local(origin.result, origin.result.tensor, layout)
        node = replace(node, result=result)
        self.nodes.append(node)
        self.origins[node] = origin

    def _name(self) -> str:
        return f"%{len(self.held) + len(self.opaque)}"


def _of_part(node: GraphNode, axes: tuple[str, ...]) -> object:
    """Return the target that does for a rank's part what an op with places does for the whole."""
    target = node.attributes["target"]
    if target is aten.embedding.default:
        return DividedLookup(axes)
    return DIVIDED_FORMS[target](axes, PLACED[target](node))


def placed(tree: Any, values: Iterator[GraphValue]) -> Any:
    """Return a tree of arguments with the next value in the place of each, in the order of `GraphNode.values`."""
    if isinstance(tree, GraphValue):
        return next(values)
    if isinstance(tree, dict):
        return {name: placed(each, values) for name, each in tree.items()}
    if isinstance(tree, slice):
        start, stop, step = (placed(each, values) for each in (tree.start, tree.stop, tree.step))
        return slice(start, stop, step)
    if isinstance(tree, list):
        return [placed(each, values) for each in tree]
    return tuple(placed(each, values) for each in tree) if type(tree) is tuple else tree

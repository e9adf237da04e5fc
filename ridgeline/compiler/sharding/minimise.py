"""Leaves out collectives that others make needless. Each rule is one function that looks at one node.

A sum moves behind ops that only reorder or scale, so that two sums meet in an addition and become one, or meet the
place where only a part is taken and become a reduce-scatter. A part of what was gathered is what there was before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ridgeline.compiler.graph import GraphNode, GraphValue, OpGraph, replaced
from ridgeline.compiler.sharding.check import MOVES
from ridgeline.compiler.sharding.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, MeshCollective, OwnPart
from ridgeline.compiler.sharding.layout import TensorLayout
from ridgeline.compiler.sharding.partition import LocalValue, ShardedGraph
from ridgeline.compiler.sharding.prepare import without_unused


def minimise(sharded: ShardedGraph) -> ShardedGraph:
    """Return the graph with as few collectives as the rules lead to."""
    for rule in (_part_of_gathered, _sum_behind, _merged_sums, _scattered):
        sharded = _everywhere(sharded, rule)
    return sharded


@dataclass
class _Rewriting:
    """A graph while nodes are replaced: its makers, how often values are taken, and what was found of new values."""

    sharded: ShardedGraph
    makers: dict[GraphValue, GraphNode]
    uses: dict[GraphValue, int]
    held: dict[GraphValue, LocalValue]
    origins: dict[GraphNode, GraphNode | None]
    before: list[GraphNode] = field(default_factory=list)  # what was made in front of the node
    count: int = 0

    def sum_of(self, value: GraphValue, how: str = "sum") -> tuple[MeshCollective, GraphValue] | None:
        """Return the all-reduce that makes a value which nothing else takes, and its operand."""
        node = self.makers.get(value)
        target = None if node is None else node.attributes.get("target")
        if node is None or not isinstance(target, MeshCollective) or target.kind != ALL_REDUCE or target.how != how:
            return None
        return (target, node.values[0]) if self.uses[value] == 1 else None

    def value(self, like: GraphValue, layout: TensorLayout) -> GraphValue:
        """Return a new value of the source's value that another is of, in another layout."""
        held = LocalValue(self.held[like].source, layout)
        self.count += 1
        made = GraphValue(f"{like.name}.{self.count}", held.type(self.sharded.mesh))
        self.held[made] = held
        return made

    def add(self, node: GraphNode, origin: GraphNode | None) -> None:
        self.before.append(node)
        self.made(node, origin)

    def made(self, node: GraphNode, origin: GraphNode | None) -> GraphNode:
        self.origins[node] = origin
        self.makers[node.result] = node
        self.uses.setdefault(node.result, 1)
        return node


Rule = Callable[[_Rewriting, GraphNode], GraphNode | GraphValue | None]


def _everywhere(sharded: ShardedGraph, rule: Rule) -> ShardedGraph:
    """Apply a rule to every node in order. It returns another node, a value that the node's result is, or None."""
    graph = sharded.graph
    work = _Rewriting(sharded, {}, graph.uses(), dict(sharded.held), dict(sharded.origins))
    same: dict[GraphValue, GraphValue] = {}
    nodes: list[GraphNode] = []
    for each in graph.nodes:
        node: GraphNode = replaced(each, same)
        work.made(node, work.origins.get(each))
        work.before = []
        made = rule(work, node)
        nodes += work.before
        if isinstance(made, GraphValue):
            same[node.result] = made
            work.uses[made] += work.uses[node.result] - 1
        else:
            nodes.append(node if made is None else work.made(made, work.origins[node]))
    changed = without_unused(OpGraph(graph.inputs, tuple(nodes), replaced(graph.outputs, same)))
    return replace(sharded, graph=changed, held=work.held, origins=work.origins)


def _part_of_gathered(work: _Rewriting, node: GraphNode) -> GraphValue | None:
    """own_part(all_gather(x)) is x."""
    target = node.attributes.get("target")
    if not isinstance(target, OwnPart):
        return None
    gather = work.makers.get(node.values[0])
    gathered = None if gather is None else gather.attributes.get("target")
    if gather is None or not isinstance(gathered, MeshCollective) or gathered.kind != ALL_GATHER:
        return None
    x = gather.values[0]
    same = (gathered.axis, gathered.dim) == (target.axis, target.dim)
    return x if same and work.held[x].layout == work.held[node.result].layout else None


def _sum_behind(work: _Rewriting, node: GraphNode) -> GraphNode | None:
    """f(all_reduce(x)) is all_reduce(f(x)) for an f that moves numbers, or multiplies them by one number."""
    moves = node.attributes.get("target") in MOVES or node.op == "neg"
    scales = node.op in ("mul", "div") and len(node.values) == 1 and isinstance(node.operands[0], GraphValue)
    found = work.sum_of(node.values[0]) if (moves or scales) and len(node.values) == 1 else None
    if found is None or node.result.tensor.shape == () or _bytes(node.result) > _bytes(node.values[0]):
        return None
    reduction, x = found
    due = work.held[x].layout.partial
    rest = work.held[node.result].layout
    inner = work.value(node.result, replace(rest, partial=tuple(sorted({*rest.partial, *due}))))
    work.add(replace(replaced(node, {node.values[0]: x}), result=inner), work.origins[node])
    return _collective(reduction, inner, node.result)


def _merged_sums(work: _Rewriting, node: GraphNode) -> GraphNode | None:
    """all_reduce(a) + all_reduce(b) is all_reduce(a + b)."""
    if node.op not in ("add", "sub") or len(node.values) != 2 or node.values[0] is node.values[1]:
        return None
    found = [work.sum_of(value) for value in node.values]
    first, second = found
    if first is None or second is None or first[0] != second[0]:
        return None
    a, b = first[1], second[1]
    alike = a.type == b.type == node.result.type and work.held[a].layout == work.held[b].layout
    if not alike:
        return None
    inner = work.value(node.result, work.held[a].layout)
    by = dict(zip(node.values, (a, b), strict=True))
    work.add(replace(replaced(node, by), result=inner), work.origins[node])
    return _collective(first[0], inner, node.result)


def _scattered(work: _Rewriting, node: GraphNode) -> GraphNode | None:
    """own_part(all_reduce(x)) is reduce_scatter(x)."""
    target = node.attributes.get("target")
    found = work.sum_of(node.values[0]) if isinstance(target, OwnPart) else None
    if found is None or not isinstance(target, OwnPart) or found[0].axis != target.axis or len(target.segments) > 1:
        return None
    return _collective(MeshCollective(REDUCE_SCATTER, target.axis, target.dim), found[1], node.result)


def _collective(target: MeshCollective, x: GraphValue, result: GraphValue) -> GraphNode:
    return GraphNode("call", (x,), result, {"target": target, "arguments": (x,), "named": {}})


def _bytes(value: GraphValue) -> int:
    size = value.tensor.dtype.itemsize
    for each in value.tensor.shape:
        size *= each
    return size

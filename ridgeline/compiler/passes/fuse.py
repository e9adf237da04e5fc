"""Gathers pointwise nodes and reductions into fused nodes, each of which becomes one kernel.

A group grows from its last node, the root, to the nodes before it. A node joins if all that take it are in the group,
so nothing is computed twice and a kernel writes one tensor, and if its shape lies in the group's domain: the domain's
own sizes, or 1 where it is broadcast. Reductions of a group are over the same trailing dimensions of the whole domain.
So a softmax, a norm or a chain of an activation is one group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ridgeline.compiler.graph import GraphNode, GraphValue, OpGraph
from ridgeline.compiler.ops import POINTWISE, REDUCTIONS

FEWEST = 2  # nodes of a group: one alone gains nothing over torch's own kernel


@dataclass
class NodeGroup:
    """domain: sizes of the loops. dims: how many trailing ones reductions run over, 0: none are in it."""

    domain: tuple[int, ...]
    dims: int
    nodes: list[GraphNode] = field(default_factory=list)  # from the root backwards

    def takes(self, node: GraphNode) -> bool:
        """True if a node may join; a reduction sets what dimensions are reduced."""
        if node.op in REDUCTIONS:
            (x,) = node.values
            dims = node.attributes["dims"]
            if x.tensor.shape != self.domain or self.dims not in (0, dims):
                return False
            self.dims = dims
            return True
        return node.op in POINTWISE and _lies_in(node.result.tensor.shape, self.domain)


def fuse(graph: OpGraph) -> OpGraph:
    """Return the graph with groups as fused nodes."""
    makers = {node.result: node for node in graph.nodes}
    takers: dict[GraphValue, list[GraphNode]] = {}
    for node in graph.nodes:
        for value in node.values:
            takers.setdefault(value, []).append(node)
    given = {value for value in graph.outputs if isinstance(value, GraphValue)}
    grouped: dict[GraphNode, NodeGroup] = {}
    groups: dict[GraphNode, NodeGroup] = {}  # by root
    for root in reversed(graph.nodes):
        if root in grouped or root.op not in (*POINTWISE, *REDUCTIONS):
            continue
        group = _grown(root, makers, takers, given, grouped)
        if len(group.nodes) >= FEWEST and 0 not in group.domain:
            groups[root] = group
            grouped.update(dict.fromkeys(group.nodes, group))
    nodes = [
        _fused(groups[node]) if node in groups else node
        for node in graph.nodes
        if node in groups or node not in grouped
    ]
    return OpGraph(graph.inputs, tuple(nodes), graph.outputs)


def _grown(
    root: GraphNode,
    makers: dict[GraphValue, GraphNode],
    takers: dict[GraphValue, list[GraphNode]],
    given: set[GraphValue],
    grouped: dict[GraphNode, NodeGroup],
) -> NodeGroup:
    domain = root.values[0].tensor.shape if root.op in REDUCTIONS else root.result.tensor.shape
    domain = _widest(root, domain, makers)
    group = NodeGroup(domain, root.attributes.get("dims", 0), [root])
    inside, place = {root}, 0
    while place < len(group.nodes):
        for value in group.nodes[place].values:
            maker = makers.get(value)
            if maker is None or maker in inside or maker in grouped or value in given:
                continue
            if all(taker in inside for taker in takers[value]) and group.takes(maker):
                inside.add(maker)
                group.nodes.append(maker)
                place = -1  # what waited for this taker may join now
                break
        place += 1
    return group


def _widest(root: GraphNode, domain: tuple[int, ...], makers: dict[GraphValue, GraphNode]) -> tuple[int, ...]:
    """Return the domain of a root behind reductions, like x / norm(x) of one number a row: that of what is reduced."""
    for value in root.values:
        maker = makers.get(value)
        if maker is not None and maker.op in REDUCTIONS and maker.result.tensor.shape == domain:
            return maker.values[0].tensor.shape
    return domain


def _lies_in(shape: tuple[int, ...], domain: tuple[int, ...]) -> bool:
    if len(shape) > len(domain):
        return False
    return all(size in (1, whole) for size, whole in zip(reversed(shape), reversed(domain), strict=False))


def _fused(group: NodeGroup) -> GraphNode:
    """Return the node of a group. Values of its body are named anew, so equal groups have equal bodies."""
    nodes = _in_order(group.nodes)
    made = {node.result for node in nodes}
    outside: dict[GraphValue, None] = {}
    for node in nodes:
        outside.update(dict.fromkeys(value for value in node.values if value not in made))
    inputs = {value: GraphValue(f"%{at}", value.type) for at, value in enumerate(outside)}
    by = dict(inputs)
    body = []
    for at, node in enumerate(nodes):
        result = GraphValue(f"%{len(inputs) + at}", node.result.type)
        operands = tuple(by[each] if isinstance(each, GraphValue) else each for each in node.operands)
        body.append(GraphNode(node.op, operands, result, node.attributes))
        by[node.result] = result
    root = group.nodes[0]
    graph = OpGraph(tuple(inputs.values()), tuple(body), (by[root.result],))
    attributes = {"body": graph, "domain": group.domain, "reduced": group.dims}
    return GraphNode("fused", tuple(outside), root.result, attributes)


def _in_order(nodes: list[GraphNode]) -> list[GraphNode]:
    """Return the nodes so that each stands behind those whose values it takes."""
    makers = {node.result: node for node in nodes}
    ordered: dict[GraphNode, None] = {}

    def visit(node: GraphNode) -> None:
        for value in node.values:
            if value in makers and makers[value] not in ordered:
                visit(makers[value])
        ordered[node] = None

    visit(nodes[0])
    return list(ordered)

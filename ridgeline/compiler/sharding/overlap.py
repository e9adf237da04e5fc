"""Begins collectives as early as their operands are there, and awaits them as late as their results are needed.

What does not depend on a collective is computed between the two, on a GPU while another stream communicates. Every rank
has the same order, so collectives meet.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.compiler.graph import GraphNode, GraphValue, OpGraph
from ridgeline.compiler.sharding.collectives import Awaited, BegunCollective, MeshCollective
from ridgeline.compiler.sharding.partition import ShardedGraph

REACH = 32  # nodes that are looked ahead: what is computed long before it is needed takes memory meanwhile


def overlap(sharded: ShardedGraph, reach: int = REACH) -> ShardedGraph:
    """Return the graph in another order, with collectives begun and awaited apart where anything lies between."""
    order = _scheduled(sharded.graph, reach)
    origins = dict(sharded.origins)
    place = {node: at for at, node in enumerate(order)}
    first_use: dict[GraphValue, int] = {}
    for node in order:
        for value in node.values:
            first_use.setdefault(value, place[node])
    awaited: dict[int, list[GraphNode]] = {}
    nodes: list[GraphNode] = []
    for at, node in enumerate(order):
        nodes += awaited.pop(at, [])
        target = node.attributes.get("target")
        needed = first_use.get(node.result, len(order))
        if not isinstance(target, MeshCollective) or needed <= at + 1:
            nodes.append(node)
            continue
        handle = GraphValue(f"{node.result.name}.begun", None)
        begun = replace(node, result=handle, attributes={**node.attributes, "target": BegunCollective(target)})
        taken = {"target": Awaited(target), "arguments": (handle,), "named": {}}
        wait = GraphNode("call", (handle,), node.result, taken)
        origins[begun] = origins[wait] = origins.get(node)
        nodes.append(begun)
        awaited.setdefault(needed, []).append(wait)
    nodes += awaited.pop(len(order), [])
    graph = OpGraph(sharded.graph.inputs, tuple(nodes), sharded.graph.outputs)
    return replace(sharded, graph=graph, origins=origins)


def _scheduled(graph: OpGraph, reach: int) -> list[GraphNode]:
    """Return the nodes in an order in which each collective stands as early as it can, and what takes its result behind
    others of the next `reach` nodes that do not wait for it."""
    takers: dict[GraphValue, list[GraphNode]] = {}
    missing: dict[GraphNode, int] = {}
    makers = {node.result for node in graph.nodes}
    for node in graph.nodes:
        needs = {value for value in node.values if value in makers}
        missing[node] = len(needs)
        for value in needs:
            takers.setdefault(value, []).append(node)
    waits: set[GraphValue] = set()  # results of collectives that nothing has taken yet
    left, order = list(graph.nodes), list[GraphNode]()
    while left:
        ready = [node for node in left[:reach] if not missing[node]] or [next(n for n in left if not missing[n])]
        node = min(
            ready,
            key=lambda each: (
                not isinstance(each.attributes.get("target"), MeshCollective),
                any(value in waits for value in each.values),
            ),
        )
        left.remove(node)
        order.append(node)
        waits.difference_update(node.values)
        if isinstance(node.attributes.get("target"), MeshCollective):
            waits.add(node.result)
        for taker in takers.get(node.result, ()):
            missing[taker] -= 1
    return order


def overlapped(graph: OpGraph) -> list[tuple[MeshCollective, int]]:
    """Return the collectives that are begun and awaited apart, each with the number of nodes between."""
    began: dict[GraphValue, int] = {}
    found = []
    for at, node in enumerate(graph.nodes):
        target = node.attributes.get("target")
        if isinstance(target, BegunCollective):
            began[node.result] = at
        elif isinstance(target, Awaited):
            found.append((target.collective, at - began[node.values[0]] - 1))
    return found

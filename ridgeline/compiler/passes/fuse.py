"""Gathers pointwise nodes and reductions into fused nodes, each of which becomes one kernel.

A group grows from its last node, the root, to the nodes before it. A node joins if its shape lies in the group's
domain: the domain's own sizes, or 1 where it is broadcast. Reductions of a group are over the same trailing dimensions
of the whole domain. So a softmax, a norm or a chain of an activation is one group.

What others take of a group's inner values, the kernel writes as well, so a sum with a norm of it is one group. That
needs a place in the order: none of the others may be what the group waits for. Nothing is computed twice but numbers
of 16 bits that are widened to float32: each group widens them for itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

import torch

from ridgeline.compiler.graph import GraphNode, GraphValue, OpGraph
from ridgeline.compiler.ops import POINTWISE, REDUCTIONS

HALF = (torch.float16, torch.bfloat16)
FEWEST = 2  # nodes of a group: one alone gains nothing over torch's own kernel
MOST_NODES = 256  # of a group: LLVM takes seconds for them, and minutes for 4,000
MOST_OUTPUTS = 8
MOST_REFUSED = 64  # searches for what waits that keep a value out of a group; others stay out without one
MOST_SEARCHED = 2000  # nodes behind a value among which its group is looked for


@dataclass
class NodeGroup:
    """domain: sizes of the loops. dims: how many trailing ones reductions run over, 0: none are in it."""

    domain: tuple[int, ...]
    dims: int
    nodes: list[GraphNode] = field(default_factory=list)  # from the root backwards
    inside: set[GraphNode] = field(default_factory=set)  # the same
    copies: set[GraphNode] = field(default_factory=set)  # nodes that others have as well

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

    def writes(self, value: GraphValue) -> bool:
        """True if a kernel could write a value: it has a number for each place of the domain, or for each row."""
        rows = self.domain[: len(self.domain) - self.dims] + (1,) * self.dims
        return value.tensor.shape in (self.domain, rows)


@dataclass
class _Places:
    """The nodes around each value. order: places of nodes. given: what the graph gives out."""

    makers: dict[GraphValue, GraphNode]
    takers: dict[GraphValue, list[GraphNode]]
    given: set[GraphValue]
    order: dict[GraphNode, int]
    calls: dict[GraphNode, GraphNode | None]  # each with the next
    grouped: dict[GraphNode, NodeGroup] = field(default_factory=dict)
    copied: dict[GraphNode, list[NodeGroup]] = field(default_factory=dict)  # the groups that have a node for themselves

    def add(self, group: NodeGroup) -> None:
        self.grouped.update((node, group) for node in group.nodes if node not in group.copies)
        for node in group.copies:
            self.copied.setdefault(node, []).append(group)

    def needed(self, node: GraphNode) -> bool:
        """True if a node's result is taken by more than groups that have a copy of it."""
        groups = self.copied.get(node, [])
        takers = self.takers.get(node.result, [])
        return not groups or node.result in self.given or any(self.grouped.get(each) not in groups for each in takers)

    def after(self, node: GraphNode, groups: set[int]) -> Iterator[GraphNode]:
        """Yield the nodes that must wait for a node: those that take it, those of its group, and calls behind a call,
        whose order stays. groups: those whose nodes were yielded before."""
        group = self.grouped.get(node)
        if group is not None and id(group) not in groups:
            groups.add(id(group))
            yield from group.nodes
        yield from self.takers.get(node.result, ())
        if (following := self.calls.get(node)) is not None:
            yield following

    def others(self, value: GraphValue, group: NodeGroup) -> list[GraphNode]:
        """Return the nodes that take a value and are not in a group; behind a copy in it, what else takes the same."""
        found = []
        for taker in self.takers[value]:
            if taker in group.copies:
                found += [each for each in self.takers[taker.result] if each not in group.inside]
            elif taker not in group.inside:
                found.append(taker)
            found += [other.nodes[0] for other in self.copied.get(taker, ()) if other is not group]
        return found

    def waits(self, group: NodeGroup, others: list[GraphNode]) -> bool:
        """True if a node of a group waits for one of these others, or if that would take too long to find out."""
        inside, last = group.inside, self.order[group.nodes[0]]
        seen, pending, groups = set(others), list(others), set[int]()
        while pending:
            for each in self.after(pending.pop(), groups):
                if each in inside or len(seen) > MOST_SEARCHED:
                    return True
                if each not in seen and (self.order[each] <= last or each in self.grouped):
                    seen.add(each)
                    pending.append(each)
        return False


def fuse(graph: OpGraph) -> OpGraph:
    """Return the graph with groups as fused nodes."""
    takers: dict[GraphValue, list[GraphNode]] = {}
    for node in graph.nodes:
        for value in dict.fromkeys(node.values):
            takers.setdefault(value, []).append(node)
    calls = [node for node in graph.nodes if node.op == "call"]
    places = _Places(
        {node.result: node for node in graph.nodes},
        takers,
        {value for value in graph.outputs if isinstance(value, GraphValue)},
        {node: at for at, node in enumerate(graph.nodes)},
        dict(zip_longest(calls, calls[1:])),
    )
    groups: dict[GraphNode, NodeGroup] = {}  # by root
    for root in reversed(graph.nodes):
        if root in places.grouped or root.op not in (*POINTWISE, *REDUCTIONS) or not places.needed(root):
            continue
        group = _grown(root, places)
        if len(group.nodes) >= FEWEST and 0 not in group.domain:
            groups[root] = group
            places.add(group)
    nodes = [
        _fused(groups[node], places) if node in groups else node
        for node in graph.nodes
        if node in groups or node not in places.grouped
    ]
    taken = {value for node in nodes for value in node.values} | places.given
    left = [node for node in nodes if not _widens(node) or node.result in taken]
    return OpGraph(graph.inputs, tuple(_sorted(left)), graph.outputs)


def _grown(root: GraphNode, places: _Places) -> NodeGroup:
    domain = root.values[0].tensor.shape if root.op in REDUCTIONS else root.result.tensor.shape
    group = NodeGroup(_widest(root, domain, places.makers), root.attributes.get("dims", 0), [root], {root})
    written, refused, place = 0, 0, 0
    while place < len(group.nodes) < MOST_NODES:
        for value in group.nodes[place].values:
            maker = places.makers.get(value)
            if maker is None or maker in group.inside or maker in places.grouped:
                continue
            others = places.others(value, group)
            copied = _widens(maker) and bool(others)
            outside = not copied and (bool(others) or value in places.given)
            if outside and (written + 2 > MOST_OUTPUTS or refused >= MOST_REFUSED):
                continue
            if outside and places.waits(group, others):
                refused += 1
                continue
            dims = group.dims
            if not group.takes(maker):
                continue
            if outside and not group.writes(value):
                group.dims = dims
                continue
            group.inside.add(maker)
            group.copies.update({maker} if copied else ())
            written += outside
            group.nodes.append(maker)
            place = -1  # what waited for this taker may join now
            break
        place += 1
    return group


def _widens(node: GraphNode) -> bool:
    """True for a conversion of 16 bits to float32: reading the 16 bits again costs less than the result."""
    return node.op == "cast" and node.result.tensor.dtype == torch.float32 and node.values[0].tensor.dtype in HALF


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


def _fused(group: NodeGroup, places: _Places) -> GraphNode:
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
    root = group.nodes[0].result
    others = tuple(
        node.result
        for node in nodes
        if node.result is not root
        and node not in group.copies
        and (node.result in places.given or places.others(node.result, group))
    )
    graph = OpGraph(tuple(inputs.values()), tuple(body), tuple(by[each] for each in (root, *others)))
    attributes = {"body": graph, "domain": group.domain, "reduced": group.dims}
    return GraphNode("fused", tuple(outside), root, attributes, others)


def _in_order(nodes: list[GraphNode]) -> list[GraphNode]:
    """Return the nodes so that each stands behind those whose values it takes."""
    makers = {node.result: node for node in nodes}
    ordered: dict[GraphNode, None] = {}
    pending = [nodes[0]]
    while pending:
        node = pending[-1]
        before = [makers[value] for value in node.values if value in makers and makers[value] not in ordered]
        if before:
            pending += reversed(before)
        else:
            ordered[pending.pop()] = None
    return list(ordered)


def _sorted(nodes: list[GraphNode]) -> list[GraphNode]:
    """Return nodes in an order in which each stands behind those that it takes from, calls in the order that they have,
    and the others as near to theirs as that allows."""
    makers = {value: at for at, node in enumerate(nodes) for value in node.results}
    calls = [at for at, node in enumerate(nodes) if node.op == "call"]
    before = {at: {makers[value] for value in node.values if value in makers} for at, node in enumerate(nodes)}
    for first, second in pairwise(calls):
        before[second].add(first)
    behind: dict[int, list[int]] = {}
    for at, waited in before.items():
        for place in waited:
            behind.setdefault(place, []).append(at)
    left = {at: len(each) for at, each in before.items()}
    ready = [at for at, number in left.items() if not number]
    ordered = []
    while ready:
        at = heapq.heappop(ready)
        ordered.append(nodes[at])
        for each in behind.get(at, ()):
            left[each] -= 1
            if not left[each]:
                heapq.heappush(ready, each)
    return ordered

"""Spreads the layouts of annotated values over a graph, forwards and backwards, until nothing changes.

A value that was not annotated only ever becomes divided further, so this ends. Where the values of a node ask for
different things, the choice that moves fewer bytes wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ridgeline.compiler.graph import GraphNode, GraphValue, OpGraph
from ridgeline.compiler.sharding.layout import UNDIVIDED, DimDivision, MeshShape, TensorLayout, whole
from ridgeline.compiler.sharding.reshard import moved
from ridgeline.compiler.sharding.rules import RESULT, OpRule, rule_of

Asked = tuple[int, tuple[int, ...]]  # a factor and the segments of its dimensions


@dataclass(frozen=True)
class Assignment:
    """factors: those that are divided, each by which axes and with which segments. nbytes: what a rank sends to bring
    the operands to these layouts, shared by the nodes that take them, and the result from there to its own."""

    factors: Mapping[int, DimDivision]
    nbytes: float = 0

    def layout(self, rule: OpRule, number: int) -> TensorLayout:
        """Return the layout that an operand must have, or that the result gets."""
        dims = []
        for dim, factors in enumerate(rule.result if number == RESULT else rule.operands[number]):
            division = self.factors.get(factors[0], UNDIVIDED) if factors else UNDIVIDED
            if division.axes and (number, dim) in rule.segments:
                division = replace(division, segments=rule.segments[number, dim])
            dims.append(division)
        partial: dict[str, str] = {}
        if number == RESULT:
            for factor, how in rule.reduced.items():
                partial |= dict.fromkeys(self.factors.get(factor, UNDIVIDED).axes, how)
        return TensorLayout(tuple(dims), tuple(sorted(partial.items())))


def propagate(
    graph: OpGraph,
    annotated: Mapping[GraphValue, TensorLayout],
    asked: Mapping[GraphValue, TensorLayout],
    mesh: MeshShape,
) -> dict[GraphValue, TensorLayout]:
    """Return a layout of every value that is a tensor.

    annotated: stays as it is. asked: the layouts in which outputs are to be given, which others may follow.
    """
    values = [*graph.inputs, *(node.result for node in graph.nodes)]
    layouts = {each: annotated.get(each, whole(each.type)) for each in values if each.type is not None}
    spread = _Spread(layouts, set(annotated), mesh, graph.uses())
    for value, layout in asked.items():
        spread.refine(value, layout)
    spread.changed = True
    while spread.changed:
        spread.changed = False
        for node in graph.nodes:
            spread.node(node, forwards=True)
        for node in reversed(graph.nodes):
            spread.node(node, forwards=False)
    return layouts


@dataclass
class _Spread:
    layouts: dict[GraphValue, TensorLayout]
    fixed: set[GraphValue]
    mesh: MeshShape
    uses: Mapping[GraphValue, int]
    changed: bool = False

    def node(self, node: GraphNode, *, forwards: bool) -> None:
        if any(value not in self.layouts for value in (*node.values, node.result)):
            return
        operands = [self.layouts[value] for value in node.values]
        rule = rule_of(node, operands)
        if rule is None:
            return
        shares = [self.uses[value] for value in node.values]
        chosen = choose(node, rule, [*operands, self.layouts[node.result]], shares, self.mesh)
        if forwards:
            self.refine(node.result, chosen.layout(rule, RESULT))
            return
        for number, value in enumerate(node.values):
            self.refine(value, chosen.layout(rule, number))

    def refine(self, value: GraphValue, wanted: TensorLayout) -> None:
        """Divide a value in the dimensions that its own layout leaves open."""
        if value in self.fixed:
            return
        has = self.layouts[value]
        for dim, (own, other) in enumerate(zip(has.dims, wanted.dims, strict=True)):
            new = [axis for axis in other.axes if axis not in has.axes]
            if not new or (own.axes and own.segments != other.segments):
                continue
            axes = self.mesh.ordered((*own.axes, *new))
            if all(size % self.mesh.of(*axes) == 0 for size in other.segments or (value.tensor.shape[dim],)):
                has = has.with_dim(dim, DimDivision(axes, other.segments))
        if has != self.layouts[value]:
            self.layouts[value], self.changed = has, True


def choose(
    node: GraphNode, rule: OpRule, held: Sequence[TensorLayout], shares: Sequence[int], mesh: MeshShape
) -> Assignment:
    """Return the factors of a node that are divided. An axis that values ask for at one factor alone divides this one;
    of several choices the one that moves the fewest bytes is taken, and of these the one that divides most.

    held: the layouts of the operands, and of the result behind them. shares: how many nodes take each operand, which is
    brought to a layout once for all.
    """
    layouts = dict(zip((*range(len(node.values)), RESULT), held, strict=True))
    options = _options(rule, layouts)
    several = {axis: [*asked, None] if len(asked) > 1 else asked for axis, asked in options.items()}
    found = list(_assignments(rule, several, mesh))
    if not found:
        found = list(_assignments(rule, {axis: [*asked, None] for axis, asked in options.items()}, mesh))
    if len(found) == 1:
        return found[0]
    costed = [replace(each, nbytes=_cost(node, rule, each, layouts, shares, mesh)) for each in found]
    return min(costed, key=lambda each: (each.nbytes, -sum(len(division.axes) for division in each.factors.values())))


def _options(rule: OpRule, layouts: Mapping[int, TensorLayout]) -> dict[str, list[Asked | None]]:
    found: dict[str, list[Asked | None]] = {}
    for number, dims in rule.values():
        for dim, (factors, division) in enumerate(zip(dims, layouts[number].dims, strict=True)):
            if not division.axes or not factors or not rule.divisible(factors[0]):
                continue
            segments = () if (number, dim) in rule.segments else division.segments
            if segments and len(factors) > 1:  # in the first of them there would be pieces of segments
                continue
            for axis in division.axes:
                asked = found.setdefault(axis, [])
                if (factors[0], segments) not in asked:
                    asked.append((factors[0], segments))
    return found


def _assignments(rule: OpRule, options: Mapping[str, Sequence[Asked | None]], mesh: MeshShape) -> Iterator[Assignment]:
    """Yield the choices of one option for each axis that fit together."""
    for choice in product(*options.values()):
        factors: dict[int, DimDivision] = {}
        for axis, asked in zip(options, choice, strict=True):
            if asked is None:
                continue
            factor, segments = asked
            before = factors.get(factor, DimDivision((), segments))
            if before.segments != segments:
                break
            factors[factor] = DimDivision(mesh.ordered((*before.axes, axis)), segments)
        else:
            if all(_divides(rule, factor, division, mesh) for factor, division in factors.items()):
                yield Assignment(factors)


def _divides(rule: OpRule, factor: int, division: DimDivision, mesh: MeshShape) -> bool:
    """True if ranks have equal parts of every dimension with a factor, and each of its segments."""
    ranks = mesh.of(*division.axes)
    for number, dims in rule.values():
        for dim, factors in enumerate(dims):
            if factors[:1] != (factor,):
                continue
            if len(factors) > 1 and division.segments:
                return False
            segments = rule.segments.get((number, dim), division.segments)
            if any(size % ranks for size in segments or (rule.sizes[factor],)):
                return False
    return True


def _cost(
    node: GraphNode,
    rule: OpRule,
    chosen: Assignment,
    layouts: Mapping[int, TensorLayout],
    shares: Sequence[int],
    mesh: MeshShape,
) -> float:
    total = 0.0
    for number, (value, share) in enumerate(zip(node.values, shares, strict=True)):
        total += moved(value.tensor, layouts[number], chosen.layout(rule, number), mesh) / max(1, share)
    made = chosen.layout(rule, RESULT)
    needs = layouts[RESULT] if layouts[RESULT].axes else replace(made, partial=())
    return total + moved(node.result.tensor, made, needs, mesh)

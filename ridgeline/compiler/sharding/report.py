"""Answers of a partitioned graph: what is divided, what every rank holds whole, what is sent, and for which op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.compiler.graph import GraphNode, GraphValue
from ridgeline.compiler.sharding.collectives import Awaited, MeshCollective
from ridgeline.compiler.sharding.layout import whole
from ridgeline.compiler.sharding.overlap import overlapped
from ridgeline.compiler.sharding.partition import ShardedGraph, collective_of


@dataclass(frozen=True)
class HeldTensor:
    """An input of a graph. because: "annotated", "deduced" or "whole". nbytes: of the whole tensor and of a rank's."""

    name: str
    shape: tuple[int, ...]
    layout: str
    because: str
    nbytes: tuple[int, int]


@dataclass(frozen=True)
class SentValue:
    """A collective. shape: of a rank's operand. op: that for which it was inserted. nbytes: that a rank sends.
    meanwhile: nodes that are computed between its beginning and its end."""

    collective: str
    kind: str
    shape: tuple[int, ...]
    before: str
    op: str
    nbytes: int
    meanwhile: int


@dataclass(frozen=True)
class ShardingReport:
    """inputs, sent: in the graph's order. computed: the nodes of a rank by how their results are held: "divided",
    "whole" (every rank computes the same) or "partial". whole_nbytes: of all results that every rank computes alike.
    unknown: ops without a rule."""

    mesh: str
    inputs: tuple[HeldTensor, ...]
    sent: tuple[SentValue, ...]
    computed: Mapping[str, int]
    whole_nbytes: int
    unknown: tuple[str, ...]

    @property
    def totals(self) -> dict[str, tuple[int, int]]:
        """The number of collectives of each kind, and the bytes that a rank sends by them."""
        found: dict[str, tuple[int, int]] = {}
        for each in self.sent:
            count, nbytes = found.get(each.kind, (0, 0))
            found[each.kind] = count + 1, nbytes + each.nbytes
        return found


def report_of(sharded: ShardedGraph, names: Sequence[str], annotated: Sequence[str]) -> ShardingReport:
    """Return the report of a partitioned graph. names: of its inputs. annotated: those that annotations named."""
    mesh, held = sharded.mesh, sharded.held
    inputs = []
    for name, value in zip(names, sharded.graph.inputs, strict=True):
        if value not in held:
            continue
        each = held[value]
        because = "annotated" if name in annotated else "whole" if each.layout.whole else "deduced"
        nbytes = whole(each.whole).nbytes(each.whole, mesh), each.layout.nbytes(each.whole, mesh)
        inputs.append(HeldTensor(name, each.whole.shape, str(each.layout), because, nbytes))
    between = _between(sharded)
    sent = []
    computed, alike = Counter[str](), 0
    for node in sharded.graph.nodes:
        collective = collective_of(node)
        if collective is not None:
            sent.append(_sent(node, collective, sharded, between.get(node.result, 0)))
        elif node.result in held:
            way = way_of(node.result, sharded)
            computed[way] += 1
            alike += held[node.result].layout.nbytes(held[node.result].whole, mesh) if way == "whole" else 0
    shape = ",".join(f"{name}={size}" for name, size in mesh.axes)
    return ShardingReport(shape, tuple(inputs), tuple(sent), dict(computed), alike, sharded.unknown)


def way_of(value: GraphValue, sharded: ShardedGraph) -> str:
    """Return "divided", "whole", or "partial" for a value of which a sum is due."""
    layout = sharded.held[value].layout
    return "partial" if layout.partial else "divided" if layout.axes else "whole"


def op_name(node: GraphNode | None) -> str:
    """Return the name of a node's op in words."""
    if node is None:
        return "the output"
    if node.op != "call":
        return node.op
    target = node.attributes["target"]
    name = str(getattr(target, "__name__", target))
    return name.removesuffix(".default").removeprefix("aten.").removeprefix("ridgeline.")


def _between(sharded: ShardedGraph) -> dict[GraphValue, int]:
    """Return the number of nodes between the beginning of each collective and its end, by its handle."""
    order = [node.values[0] for node in sharded.graph.nodes if isinstance(node.attributes.get("target"), Awaited)]
    return dict(zip(order, (count for _, count in overlapped(sharded.graph)), strict=True))


def _sent(node: GraphNode, collective: MeshCollective, sharded: ShardedGraph, meanwhile: int) -> SentValue:
    operand = sharded.held[node.values[0]]
    own = operand.type(sharded.mesh)
    nbytes = collective.sent(operand.layout.nbytes(operand.whole, sharded.mesh), sharded.mesh)
    op = op_name(sharded.origins.get(node))
    return SentValue(str(collective), collective.kind, own.shape, str(operand.layout), op, nbytes, meanwhile)


def as_text(report: ShardingReport) -> str:
    """Return the report in lines: each question and its answer."""
    lines = [f"mesh {report.mesh}", "", "tensors that come in, a rank's part of each:"]
    for held in report.inputs:
        parts = f"{held.nbytes[1]:,} of {held.nbytes[0]:,} bytes"
        lines.append(f"  {held.name}  {shape_text(held.shape)}  {held.layout}  {held.because}  {parts}")
    whole_of, own = (sum(held.nbytes[at] for held in report.inputs) for at in (0, 1))
    alike = sum(held.nbytes[1] for held in report.inputs if held.because == "whole")
    lines.append(f"  a rank holds {own:,} of {whole_of:,} bytes, of which {alike:,} are whole")
    lines += ["", "what is sent:"]
    for each in report.sent:
        meanwhile = f", {each.meanwhile} ops meanwhile" if each.meanwhile else ""
        operand = f"{shape_text(each.shape)} {each.before}  behind or for {each.op}"
        lines.append(f"  {each.collective}  of {operand}: {each.nbytes:,} bytes{meanwhile}")
    for kind, (count, nbytes) in sorted(report.totals.items()):
        lines.append(f"  {count} {kind.replace('_', '-')}: a rank sends {nbytes:,} bytes")
    if not report.sent:
        lines.append("  nothing")
    ways = report.computed
    lines += [
        "",
        f"ops of a rank: {ways.get('divided', 0)} of parts, {ways.get('partial', 0)} of summands, and "
        f"{ways.get('whole', 0)} that every rank computes alike ({report.whole_nbytes:,} bytes of results)",
    ]
    if report.unknown:
        lines.append(f"ops without a rule, computed whole: {', '.join(report.unknown)}")
    return "\n".join(lines)


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape in words."""
    return " x ".join(map(str, shape)) or "one number"


def graph_text(sharded: ShardedGraph) -> str:
    """Return a rank's graph, a node a line, with the layout of each value."""
    lines = []
    for node in sharded.graph.nodes:
        held = sharded.held.get(node.result)
        layout = "" if held is None else f" {held.layout}"
        taken = ", ".join(each.name if isinstance(each, GraphValue) else repr(each) for each in node.operands)
        lines.append(f"{node.result.name}: {node.result.type}{layout} = {op_name(node)}({taken})")
    return "\n".join(lines)

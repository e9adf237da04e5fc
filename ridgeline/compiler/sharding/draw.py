"""A partitioned graph as a picture, and as a page with the answers of report.py."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ridgeline.compiler.graph import GraphNode, GraphValue
from ridgeline.compiler.sharding.collectives import Awaited
from ridgeline.compiler.sharding.partition import ShardedGraph, collective_of
from ridgeline.compiler.sharding.report import ShardingReport, as_text, graph_text, op_name, shape_text, way_of
from ridgeline.core.errors import InvalidConfig

COLOURS = {"divided": "#cfe3f7", "whole": "#ececec", "partial": "#fbe0b5", "sent": "#f3b3ac", "input": "#ffffff"}
WORDS = {
    "divided": "a rank has a part", "whole": "every rank has all of it", "partial": "a sum is due",
    "sent": "ranks exchange it", "input": "comes in",
}  # fmt: skip
WIDTH, HEIGHT, GAP, STEP = 190, 30, 14, 52
MOST = 1500  # nodes of a picture


def svg_of(sharded: ShardedGraph, names: dict[GraphValue, str] | None = None) -> str:
    """Return the picture of a rank's graph: a row a step, and colours for how ranks hold a value. names: of inputs.

    Raises InvalidConfig if it has more nodes than a picture shows.
    """
    graph, names = sharded.graph, names or {}
    if len(graph.nodes) > MOST:
        raise InvalidConfig(f"a picture shows {MOST} ops, and this graph has {len(graph.nodes)}; take fewer layers.")
    taken = {value for node in graph.nodes for value in node.values}
    inputs = [value for value in graph.inputs if value in taken]
    depth = _depths(sharded)
    rows: dict[int, list[GraphValue]] = {}
    for value in (*inputs, *(node.result for node in graph.nodes)):
        rows.setdefault(depth[value], []).append(value)
    widest = max(map(len, rows.values()), default=1)
    place = {
        value: (GAP + (WIDTH + GAP) * (at + (widest - len(row)) / 2), GAP + STEP * (level + 1))
        for level, row in rows.items()
        for at, value in enumerate(row)
    }
    width, height = GAP + (WIDTH + GAP) * max(widest, len(COLOURS)), GAP + STEP * (max(rows, default=0) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" font-size="10">'
    ]
    for at, (way, words) in enumerate(WORDS.items()):
        parts += _box(GAP + (WIDTH + GAP) * at, GAP, COLOURS[way], words, "", words)
    for node in graph.nodes:
        for value in node.values:
            if value in place:
                (a, b), (c, d) = place[value], place[node.result]
                line = f'x1="{a + WIDTH / 2:.0f}" y1="{b + HEIGHT}" x2="{c + WIDTH / 2:.0f}" y2="{d}"'
                parts.append(f'<line {line} stroke="#9a9a9a" stroke-width="0.8"/>')
    for value in inputs:
        x, y = place[value]
        name = names.get(value, value.name)
        parts += _box(x, y, COLOURS["input"], name[-34:], _held(value, sharded), f"{name}: {_held(value, sharded)}")
    for node in graph.nodes:
        x, y = place[node.result]
        told = f"{node.result.name} = {op_name(node)}({', '.join(value.name for value in node.values)})"
        held = _held(node.result, sharded)
        parts += _box(x, y, _colour(node, sharded), op_name(node)[:36], held, f"{told}: {held}")
    return "\n".join([*parts, "</svg>"])


def _colour(node: GraphNode, sharded: ShardedGraph) -> str:
    if collective_of(node) is not None or isinstance(node.attributes.get("target"), Awaited):
        return COLOURS["sent"]
    return COLOURS[way_of(node.result, sharded)] if node.result in sharded.held else COLOURS["whole"]


def _held(value: GraphValue, sharded: ShardedGraph) -> str:
    held = sharded.held.get(value)
    return "no tensor" if held is None else f"{value.type} {held.layout}"


def _box(x: float, y: float, colour: str, first: str, second: str, title: str) -> Iterator[str]:
    yield f"<g><title>{escape(title)}</title>"
    yield (
        f'<rect x="{x:.0f}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="{colour}" stroke="#777"/>'
        f'<text x="{x + 6:.0f}" y="{y + 12}" font-weight="bold">{escape(first)}</text>'
        f'<text x="{x + 6:.0f}" y="{y + 24}">{escape(second[:38])}</text></g>'
    )


def _depths(sharded: ShardedGraph) -> dict[GraphValue, int]:
    """Return the row of every value: behind all that it is made of. Inputs stand just before their first taker."""
    depth: dict[GraphValue, int] = dict.fromkeys(sharded.graph.inputs, 0)
    for node in sharded.graph.nodes:
        depth[node.result] = 1 + max((depth[value] for value in node.values), default=0)
    first: dict[GraphValue, int] = {}
    for node in sharded.graph.nodes:
        for value in node.values:
            first[value] = min(first.get(value, depth[node.result]), depth[node.result])
    return {**depth, **{value: max(0, first.get(value, 1) - 1) for value in sharded.graph.inputs}}


def html_of(sharded: ShardedGraph, report: ShardingReport, names: dict[GraphValue, str], title: str) -> str:
    """Return a page: the answers, tables of what comes in and of what is sent, the picture, and the graph as text."""
    came = [
        [each.name, shape_text(each.shape), each.layout, each.because, *(f"{size:,}" for size in reversed(each.nbytes))]
        for each in report.inputs
    ]
    sent = [
        [each.collective, shape_text(each.shape), each.before, each.op, f"{each.nbytes:,}", str(each.meanwhile)]
        for each in report.sent
    ]
    style = "body{font-family:sans-serif;margin:2em}td,th{padding:2px 10px;text-align:left}"
    body = [
        f"<h1>{escape(title)} over {escape(report.mesh)}</h1>",
        "<h2>What comes in</h2>",
        _table(("tensor", "shape", "layout", "because", "bytes of a rank", "bytes"), came),
        "<h2>What is sent</h2>",
        _table(("collective", "a rank's operand", "its layout", "behind or for", "bytes sent", "ops meanwhile"), sent),
        f"<pre>{escape(as_text(report).rsplit('what is sent:', 1)[1])}</pre>",
        "<h2>A rank's graph</h2>",
        svg_of(sharded, names),
        f"<pre>{escape(graph_text(sharded))}</pre>",
    ]
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
    return "\n".join([head, *body, "</html>"])


def _table(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    first = "".join(f"<th>{escape(each)}</th>" for each in heads)
    rest = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{first}</tr>{rest}</table>"

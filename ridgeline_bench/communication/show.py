"""A measurement for people: a table for each op, the fitted lines, a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ridgeline.perf.links import Line
from ridgeline_bench.communication.figures import Figure, size_name
from ridgeline_bench.svg import COLOURS, LogAxis, si

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 480, 300, 60, 34, 44


def tables(figures: Sequence[Figure]) -> Iterator[tuple[str, Table]]:
    """Yield a title and a table for each op: sizes down, ways across, microseconds and GB/s of the bus in each cell."""
    for op in dict.fromkeys(each.op for each in figures):
        of_op = [each for each in figures if each.op == op]
        names = [name for name in dict.fromkeys(e.backend for e in of_op) if any(e.samples for e in _by(of_op, name))]
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("bytes", justify="right", no_wrap=True)
        for name in names:
            table.add_column(name, justify="right")
        for nbytes in sorted({each.bytes for each in of_op}):
            row = {each.backend: each for each in of_op if each.bytes == nbytes}
            best = min((e.seconds for e in row.values() if e.samples), default=0.0)
            table.add_row(size_name(nbytes), *(_cell(row.get(name), best) for name in names))
        if names:
            yield f"{op}: µs (bus GB/s)", table


def _by(figures: Sequence[Figure], backend: str) -> list[Figure]:
    return [each for each in figures if each.backend == backend]


def _cell(each: Figure | None, best: float) -> str:
    if each is None or not each.samples:
        return "wrong" if each is not None and each.wrong else ""
    text = f"{1e6 * each.seconds:.4g} ({each.bus / 1e9:.3g})"
    return f"[bold]{text}[/bold]" if each.seconds == best else text


def line_table(found: Sequence[Line]) -> Table:
    """Return the fitted lines, with how far points lie from them."""
    table = Table(
        "op", "way", "alpha µs", "bus GB/s", "median error", "worst", "points",
        box=SIMPLE_HEAD,
    )  # fmt: skip
    for line in found:
        bus = f"{line.bus / 1e9:.4g}" if line.beta else ""
        errors = (f"{line.error:.0%}", f"{line.worst:.0%}") if line.points > 2 else ("", "")  # two points always fit
        table.add_row(line.op, line.backend, f"{1e6 * line.alpha:.3g}", bus, *errors, str(line.points))
    return table


def reasons(figures: Sequence[Figure]) -> list[str]:
    """Return in sentences what was not measured, each once."""
    found: dict[str, None] = {}
    for each in figures:
        if each.why and not any(e.samples for e in figures if (e.op, e.backend) == (each.op, each.backend)):
            found[f"{each.op} by {each.backend}: {each.why}"] = None
        elif each.wrong:
            found[f"{each.op} by {each.backend} at {size_name(each.bytes)}: {each.why}"] = None
    return list(found)


def draw(figures: Sequence[Figure], title: str, path: Path) -> None:
    """Write a picture (SVG): for each op the time and the bus bandwidth over the size, both logarithmic."""
    shown = [each for each in figures if each.samples]
    ops = list(dict.fromkeys(each.op for each in shown))
    names = list(dict.fromkeys(each.backend for each in shown))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    width, height = 2 * WIDTH, 24 + HEIGHT * max(1, len(ops)) + 16 * len(names)
    parts = [f'<text x="{width / 2}" y="16" text-anchor="middle" font-weight="bold">{escape(title)}</text>']
    for row, op in enumerate(ops):
        for column in range(2):
            parts.append(f'<g transform="translate({column * WIDTH} {24 + row * HEIGHT})">')
            parts += [*_panel([e for e in shown if e.op == op], colours, op, bandwidth=column == 1), "</g>"]
    for number, name in enumerate(names):
        y = 24 + HEIGHT * len(ops) + 16 * number
        parts.append(f'<circle fill="{colours[name]}" cx="{LEFT}" cy="{y}" r="4"/>')
        parts.append(f'<text x="{LEFT + 10}" y="{y + 4}">{escape(name)}</text>')
    style = "text{font:12px sans-serif;fill:#888}.grid{stroke:#8883}polyline{fill:none;stroke-width:2}"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    path.parent.mkdir(parents=True, exist_ok=True)
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(parts)}</svg>\n'
    path.write_text(svg, encoding="utf-8")


def _panel(figures: Sequence[Figure], colours: dict[str, str], op: str, *, bandwidth: bool) -> Iterator[str]:
    values = {each: each.bus if bandwidth else each.seconds for each in figures}
    x = LogAxis([each.bytes for each in figures], LEFT, WIDTH - 20)
    y = LogAxis(list(values.values()), HEIGHT - BOTTOM, TOP)
    yield f'<text x="{LEFT}" y="20">{op}: {"bus B/s" if bandwidth else "seconds"} over bytes</text>'
    for value in x.ticks:
        yield f'<line class="grid" x1="{x(value):.1f}" y1="{TOP}" x2="{x(value):.1f}" y2="{HEIGHT - BOTTOM}"/>'
        yield f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{si(value)}</text>'
    for value in y.ticks:
        yield f'<line class="grid" x1="{LEFT}" y1="{y(value):.1f}" x2="{WIDTH - 20}" y2="{y(value):.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{si(value)}</text>'
    for name, colour in colours.items():
        curve = sorted(_by(figures, name), key=lambda each: each.bytes)
        places = " ".join(f"{x(each.bytes):.1f},{y(values[each]):.1f}" for each in curve)
        yield f'<polyline stroke="{colour}" points="{places}"/>'
        for each in curve:
            told = f"{name}, {size_name(each.bytes)}: {1e6 * each.seconds:.4g} µs, {each.bus / 1e9:.3g} GB/s"
            at = f'cx="{x(each.bytes):.1f}" cy="{y(values[each]):.1f}"'
            yield f'<circle fill="{colour}" {at} r="3.5"><title>{escape(told)}</title></circle>'

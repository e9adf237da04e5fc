"""Latency and goodput over the rate: three panels. SVG is drawn here; other formats by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from ridgeline.bench.serving.figures import Point
from ridgeline.bench.svg import si
from ridgeline.core.errors import InvalidConfig

COLOURS = ("#2a78b8", "#d97a1e", "#b8364a")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 340, 280, 56, 34, 44


class Curve(NamedTuple):
    """values: one per rate."""

    name: str
    values: Sequence[float]


class Panel(NamedTuple):
    title: str
    curves: Sequence[Curve]


def panels(points: Sequence[Point]) -> list[Panel]:
    found = []
    for name in ("ttft", "itl"):
        spreads = [p.latencies[name] for p in points]
        curves = [Curve(p, [getattr(s, p) for s in spreads]) for p in ("p50", "p90", "p99")]
        found.append(Panel(f"{name.upper()}, ms", curves))
    rates = [Curve("completed", [p.request_rate for p in points])]
    if all(p.goodput is not None for p in points):
        rates.append(Curve("within the SLO", [p.goodput or 0.0 for p in points]))
    return [*found, Panel("requests/s", rates)]


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    """Write the picture. The rate of a point is what was asked for, or, where that is infinite, what was completed."""
    xs = [p.rate if 0 < p.rate < math.inf else p.request_rate for p in points]
    order = sorted(range(len(xs)), key=lambda n: xs[n])
    points, xs = [points[n] for n in order], [xs[n] for n in order]
    if path.suffix == ".svg":
        path.write_text(_svg(xs, panels(points), title), encoding="utf-8")
        return
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidConfig(f"a {path.suffix} needs matplotlib, which is not installed; choose a .svg.") from error
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    figure.suptitle(title)
    for axes, panel in zip(figure.subplots(1, 3), panels(points), strict=True):
        for curve, colour in zip(panel.curves, COLOURS, strict=False):
            axes.plot(xs, curve.values, marker="o", color=colour, label=curve.name)
        axes.set(title=panel.title, xlabel="requests/s asked for", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def _svg(xs: Sequence[float], found: Sequence[Panel], title: str) -> str:
    width = WIDTH * len(found)
    parts = [f'<text x="{width / 2}" y="16" text-anchor="middle" font-weight="bold">{escape(title)}</text>']
    for number, panel in enumerate(found):
        parts += [f'<g transform="translate({number * WIDTH} 20)">', *_panel(xs, panel), "</g>"]
    style = "text{font:12px sans-serif;fill:#888}.axis{stroke:#888}polyline{fill:none;stroke-width:2}"
    size = f'viewBox="0 0 {width} {HEIGHT + 20}" width="{width}" height="{HEIGHT + 20}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(parts)}</svg>\n'


def _panel(xs: Sequence[float], panel: Panel) -> Iterator[str]:
    """From zero on both axes, so that heights and distances can be compared by eye."""
    right, low = max(xs) or 1.0, HEIGHT - BOTTOM
    top = max((v for c in panel.curves for v in c.values), default=0.0) or 1.0

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * value / right

    def y(value: float) -> float:
        return low - (low - TOP) * value / top

    yield f'<text x="{LEFT}" y="20">{escape(panel.title)}</text>'
    yield f'<line class="axis" x1="{LEFT}" y1="{low}" x2="{WIDTH - 20}" y2="{low}"/>'
    yield f'<line class="axis" x1="{LEFT}" y1="{low}" x2="{LEFT}" y2="{TOP}"/>'
    for value in (0.0, top / 2, top):
        yield f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{si(value) if value else 0}</text>'
    for value in xs:
        yield f'<text x="{x(value):.1f}" y="{low + 16}" text-anchor="middle">{value:.3g}</text>'
    yield f'<text x="{(LEFT + WIDTH) / 2}" y="{low + 34}" text-anchor="middle">requests/s asked for</text>'
    for number, (curve, colour) in enumerate(zip(panel.curves, COLOURS, strict=False)):
        places = [(x(a), y(b)) for a, b in zip(xs, curve.values, strict=True)]
        corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        yield f'<polyline stroke="{colour}" points="{corners}"/>'
        for (a, b), value in zip(places, curve.values, strict=True):
            name = f"<title>{escape(curve.name)}: {value:.4g}</title>"
            yield f'<circle fill="{colour}" cx="{a:.1f}" cy="{b:.1f}" r="3.5">{name}</circle>'
        place = f'x="{WIDTH - 20}" y="{20 + 14 * number}" text-anchor="end" style="fill:{colour}"'
        yield f"<text {place}>{escape(curve.name)}</text>"

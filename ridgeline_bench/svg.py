"""Two small plots as inline SVG. Colours come from the page's CSS, so they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 16, 48
COLOURS = ("#2a78b8", "#d97a1e", "#3b8f4b", "#b8364a", "#7a5ab8", "#5c6b73")  # of curves in pictures by themselves


class Point(NamedTuple):
    """A point. `x` and `y` are in data units, `title` is shown when the pointer rests on it, and `group` 0 … 7 chooses
    the colour."""

    x: float
    y: float
    title: str
    group: int = 0


class LogAxis:
    """An axis that maps positive values to pixels by their logarithm, over whole decades."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low = math.floor(math.log10(min(values)))
        self.high = max(self.low + 1, math.ceil(math.log10(max(values))))
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        return self.start + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        return [10.0**n for n in range(self.low, self.high + 1)]


def roofline(points: Sequence[Point], bandwidth: float, peak: float) -> str:
    """Draw FLOPs per byte → FLOP/s, both logarithmic, under min(bandwidth · x, peak). 0 stands for unknown."""
    ridge = [peak / bandwidth] if bandwidth and peak else []
    xs = [p.x for p in points] + [4 * r for r in ridge]
    x = LogAxis(xs, LEFT, WIDTH - RIGHT)
    ys = [p.y for p in points] + ([peak, bandwidth * 10.0**x.low] if ridge else [])
    y = LogAxis(ys, HEIGHT - BOTTOM, TOP)
    parts = _grid(x, y, "FLOPs per byte", "FLOP/s")
    if ridge:
        corners = [(10.0**x.low, bandwidth * 10.0**x.low), (ridge[0], peak), (10.0**x.high, peak)]
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in corners)
        parts.append(f'<polyline class="roof" points="{path}"/>')
    parts += [_dot(x(p.x), y(p.y), p) for p in points]
    return _svg(parts, WIDTH, HEIGHT, "roofline")


def history(points: Sequence[Point], unit: str, ends: tuple[str, str]) -> str:
    """Draw values in their order, evenly spaced, from zero, as a small line. `ends` are the dates of the first and the
    last."""
    width, height, left, base = 360, 120, 64, 104
    top = max(p.y for p in points) or 1.0
    step = (width - left - 24) / max(1, len(points) - 1)
    places = [(left + 8 + n * step, base - (base - 12) * p.y / top) for n, p in enumerate(points)]
    parts = [
        f'<line class="axis" x1="{left}" y1="{base}" x2="{width - 8}" y2="{base}"/>',
        f'<text x="{left - 6}" y="16" text-anchor="end">{si(top)}</text>',
        f'<text x="{left - 6}" y="30" text-anchor="end">{escape(unit)}</text>',
        f'<text x="{left - 6}" y="{base}" text-anchor="end">0</text>',
        f'<text x="{left}" y="{base + 15}">{escape(ends[0])}</text>',
        f'<text x="{width - 8}" y="{base + 15}" text-anchor="end">{escape(ends[1])}</text>',
        f'<polyline class="line" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in places)}"/>',
    ]
    parts += [_dot(a, b, p) for (a, b), p in zip(places, points, strict=True)]
    return _svg(parts, width, height, "history")


def si(value: float) -> str:
    """Return 1.5e9 as "1.5 G"."""
    for factor, prefix in (
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
        (1.0, ""),
        (1e-3, "m"),
        (1e-6, "µ"),
    ):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}".rstrip()
    return f"{value:.3g}"


def _grid(x: LogAxis, y: LogAxis, x_name: str, y_name: str) -> list[str]:
    parts = []
    for value in x.ticks:
        at = x(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    for value in y.ticks:
        at = y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{si(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{x_name}</text>')
    turned = f'transform="rotate(-90 14 {HEIGHT / 2})" text-anchor="middle"'
    return [*parts, f'<text x="14" y="{HEIGHT / 2}" {turned}>{y_name}</text>']


def _dot(x: float, y: float, point: Point) -> str:
    title = f"<title>{escape(point.title)}</title>"
    return f'<circle class="g{point.group % 8}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">{title}</circle>'


def _svg(parts: Sequence[str], width: int, height: int, name: str) -> str:
    size = f'viewBox="0 0 {width} {height}" style="max-width:{width}px"'
    return f'<svg {size} role="img" aria-label="{name}">{"".join(parts)}</svg>'

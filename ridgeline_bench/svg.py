"""Two small plots as inline SVG, whose colours come from the page's CSS, and curves in a picture by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 16, 48
LABEL = 36  # pixels of a label below an axis
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


class Span(NamedTuple):
    """A stretch of an axis, from `begin` to `end`."""

    name: str
    begin: float
    end: float


def spans(stretches: Sequence[Span], unit: str) -> str:
    """Draw stretches of one axis below one another, each with its name and length."""
    width, high, left = WIDTH, 20, 110
    most = max(each.end for each in stretches) or 1.0
    scale, parts = (width - left - 90) / most, []
    for number, (name, begin, end) in enumerate(stretches):
        y, length = number * high, max(1.0, (end - begin) * scale)
        x = left + begin * scale
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect class="g{number % 8}" x="{x:.1f}" y="{y + 3}" width="{length:.1f}" height="{high - 6}"/>')
        parts.append(f'<text x="{x + length + 6:.1f}" y="{y + 14}">{end - begin:.2f} {escape(unit)}</text>')
    return _svg(parts, width, high * len(stretches), "timeline")


class Panel(NamedTuple):
    """A panel of curves: by name, their places (x, y) in data units. The x axis is logarithmic."""

    title: str
    x_name: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    log_y: bool = False


def picture(panels: Sequence[Panel], title: str) -> str:
    """Draw panels beside one another, as a file. A curve has the same colour in each, and the legend names all."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    wide, high = 440, 320
    width, height = wide * len(panels), high + 28 + 16 * len(names)
    parts = [f'<text x="{width / 2:g}" y="16" text-anchor="middle" font-weight="bold">{escape(title)}</text>']
    for number, panel in enumerate(panels):
        drawn = "".join(_curves(panel, colours, wide, high))
        parts.append(f'<g transform="translate({number * wide} 24)">{drawn}</g>')
    for number, name in enumerate(names):
        y = high + 34 + 16 * number
        parts.append(f'<circle fill="{colours[name]}" cx="64" cy="{y}" r="4"/>')
        parts.append(f'<text x="74" y="{y + 4}">{escape(name)}</text>')
    style = "text{font:12px sans-serif;fill:#888}.grid{stroke:#8883}polyline{fill:none;stroke-width:2}"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(parts)}</svg>\n'


def _curves(panel: Panel, colours: Mapping[str, str], wide: int, high: int) -> Iterator[str]:
    places = [place for curve in panel.curves.values() for place in curve]
    xs, ys = sorted({a for a, _ in places}), [b for _, b in places]
    left, right, top, bottom = 64, wide - 24, 34, high - 44
    low, high_x = math.log(xs[0]), math.log(max(xs[-1], 1.01 * xs[0]))
    y_ticks = _ticks(min(ys), max(ys), panel.log_y)
    scale = math.log if panel.log_y else float
    foot, head = scale(min(ys[0], *ys, y_ticks[0])), scale(max(*ys, y_ticks[-1]))

    def x(value: float) -> float:
        return left + (right - left) * (math.log(value) - low) / (high_x - low)

    def y(value: float) -> float:
        return bottom - (bottom - top) * (scale(value) - foot) / (head - foot)

    yield f'<text x="{left}" y="20">{escape(panel.title)}</text>'
    for value in _apart(xs[:: max(1, len(xs) // 8)], x):
        yield f'<line class="grid" x1="{x(value):.1f}" y1="{top}" x2="{x(value):.1f}" y2="{bottom}"/>'
        yield f'<text x="{x(value):.1f}" y="{bottom + 16}" text-anchor="middle">{si(value)}</text>'
    for value in y_ticks:
        yield f'<line class="grid" x1="{left}" y1="{y(value):.1f}" x2="{right}" y2="{y(value):.1f}"/>'
        yield f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{si(value) if value else 0}</text>'
    yield f'<text x="{(left + right) / 2:g}" y="{bottom + 34}" text-anchor="middle">{escape(panel.x_name)}</text>'
    for name, curve in panel.curves.items():
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in curve)
        yield f'<polyline stroke="{colours[name]}" points="{points}"/>'
        for a, b in curve:
            told = escape(f"{name}: {b:.4g} at {a:g}")
            yield f'<circle fill="{colours[name]}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"><title>{told}</title></circle>'


def _apart(values: Sequence[float], x: Callable[[float], float]) -> list[float]:
    """Return the values whose places have room for a label each, from left to right."""
    kept: list[float] = []
    for value in values:
        if not kept or x(value) - x(kept[-1]) >= LABEL:
            kept.append(value)
    return kept


def _ticks(least: float, most: float, logarithmic: bool) -> list[float]:
    """Return round values around the range of an axis: 1, 2 and 5 times powers of ten, or even steps."""
    if logarithmic:
        decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        every = [part * 10.0**n for n in decades for part in ((1, 2, 5) if len(decades) < 4 else (1,))]
        below, above = (max(v for v in every if v <= least), min(v for v in every if v >= most))
        return [value for value in every if below <= value <= above] if above > below else [below, 2 * below]
    span = (most - least) or abs(most) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(part * power for part in (1, 2, 5, 10) if span / (part * power) <= 6)
    return [round(n * step, 12) for n in range(math.floor(least / step), math.ceil(most / step) + 1)]


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

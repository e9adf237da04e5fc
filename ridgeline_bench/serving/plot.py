"""Curves of one or several servers in four panels. SVG is drawn here, and other formats by matplotlib.

Latencies are on a logarithmic axis, because beyond saturation they grow without bound. All else begins at zero, so that
heights can be compared by eye. Several servers differ by colour, and percentiles by how the line is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.serving.figures import Point
from ridgeline_bench.svg import COLOURS, si

FORMATS = (".svg", ".png", ".pdf")
DASHES = ("", "6 3", "2 3")  # SVG's; matplotlib has names for them
STYLES = ("-", "--", ":")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 480, 300, 60, 34, 44
ASKED = "requests/s asked for"


class Curve(NamedTuple):
    """A curve. `places` are x and y of each point, in the order of the rates asked for. `colour` and `dash` are
    numbers."""

    name: str
    places: Sequence[tuple[float, float]]
    colour: int
    dash: int


class Panel(NamedTuple):
    title: str
    axis: str
    curves: Sequence[Curve]
    logarithmic: bool = False


def panels(servers: Mapping[str, Sequence[Point]]) -> list[Panel]:
    """Return the panels. `servers` maps a server's name to its points."""

    def curves(x: Callable[[Point], float], ys: Mapping[str, Callable[[Point], float | None]]) -> list[Curve]:
        found = []
        for colour, (server, points) in enumerate(servers.items()):
            for dash, (name, y) in enumerate(ys.items()):
                places = [(x(p), value) for p in sorted(points, key=asked) if (value := y(p)) is not None]
                label = f"{server}, {name}" if len(servers) > 1 else name
                found.append(Curve(label, places, colour, dash))
        return [c for c in found if c.places]

    def of(measure: str, percent: str) -> Callable[[Point], float | None]:
        return lambda p: getattr(p.latencies[measure], percent) or None

    both = {
        measure: {percent: of(measure, percent) for percent in ("p50", "p99")} for measure in ("ttft", "itl", "tpot")
    }
    return [
        Panel("TTFT, ms", ASKED, curves(asked, both["ttft"]), logarithmic=True),
        Panel("ITL, ms", ASKED, curves(asked, both["itl"]), logarithmic=True),
        Panel("TPOT, ms", "output tokens/s", curves(lambda p: p.output_rate, both["tpot"]), logarithmic=True),
        Panel(
            "requests/s",
            ASKED,
            curves(asked, {"completed": lambda p: p.request_rate, "within the SLO": lambda p: p.goodput}),
        ),
    ]


def asked(point: Point) -> float:
    """Return the rate asked for or, if that is infinite or a trace's own, the rate completed."""
    return point.rate if 0 < point.rate < math.inf else point.request_rate


def check(path: Path) -> None:
    """Raise InvalidConfig for a file that `draw` could not write, by its name."""
    if path.suffix not in FORMATS:
        raise InvalidConfig(f"a picture is {', '.join(FORMATS)}, and not {path.suffix or 'without a suffix'}: {path}.")
    if path.suffix != ".svg" and find_spec("matplotlib") is None:
        raise InvalidConfig(f"a {path.suffix} needs matplotlib, which is not installed; choose a .svg.")


def draw(servers: Mapping[str, Sequence[Point]], title: str, path: Path) -> None:
    """Write the picture. Raise InvalidConfig for a format that there is not."""
    check(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        path.write_text(picture(panels(servers), title), encoding="utf-8")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    for axes, panel in zip(figure.subplots(2, 2).flat, panels(servers), strict=True):
        for curve in panel.curves:
            xs, ys = zip(*curve.places, strict=True)
            axes.plot(xs, ys, STYLES[curve.dash], marker="o", color=_colour(curve), label=curve.name)
        axes.set(title=panel.title, xlabel=panel.axis, xlim=(0, None))
        if panel.logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, None)
        axes.grid(alpha=0.3)
        if panel.curves:
            axes.legend()
    figure.savefig(path)


def _colour(curve: Curve) -> str:
    return COLOURS[curve.colour % len(COLOURS)]


def picture(found: Sequence[Panel], title: str) -> str:
    """Return the panels as SVG, two beside each other."""
    width, height = 2 * WIDTH, -(-len(found) // 2) * HEIGHT + 24
    parts = [f'<text x="{width / 2}" y="16" text-anchor="middle" font-weight="bold">{escape(title)}</text>']
    for number, panel in enumerate(found):
        place = f"{number % 2 * WIDTH} {24 + number // 2 * HEIGHT}"
        parts += [f'<g transform="translate({place})">', *_panel(panel), "</g>"]
    style = (
        "text{font:12px sans-serif;fill:#888}.axis{stroke:#888}.tick{stroke:#8883}polyline{fill:none;stroke-width:2}"
    )
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(parts)}</svg>\n'


def _panel(panel: Panel) -> Iterator[str]:
    places = [place for curve in panel.curves for place in curve.places]
    x_ticks, along = _linear([a for a, _ in places])
    low = HEIGHT - BOTTOM
    ticks, height = (_logarithmic if panel.logarithmic else _linear)([b for _, b in places])

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * along(value)

    def y(value: float) -> float:
        return low - (low - TOP) * height(value)

    yield f'<text x="{LEFT}" y="20">{escape(panel.title)}</text>'
    yield f'<line class="axis" x1="{LEFT}" y1="{low}" x2="{WIDTH - 20}" y2="{low}"/>'
    yield f'<line class="axis" x1="{LEFT}" y1="{low}" x2="{LEFT}" y2="{TOP}"/>'
    for value in ticks:
        yield f'<line class="tick" x1="{LEFT}" y1="{y(value):.1f}" x2="{WIDTH - 20}" y2="{y(value):.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{si(value) if value else 0}</text>'
    for value in x_ticks:
        yield f'<text x="{x(value):.1f}" y="{low + 16}" text-anchor="middle">{si(value) if value else 0}</text>'
    yield f'<text x="{(LEFT + WIDTH) / 2}" y="{low + 34}" text-anchor="middle">{panel.axis}</text>'
    for number, curve in enumerate(panel.curves):
        colour, dash = _colour(curve), DASHES[curve.dash]
        corners = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in curve.places)
        yield f'<polyline stroke="{colour}" stroke-dasharray="{dash}" points="{corners}"/>'
        for a, b in curve.places:
            name = f"<title>{escape(curve.name)}: {b:.4g}</title>"
            yield f'<circle fill="{colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5">{name}</circle>'
        line = f'x1="{LEFT + 12}" x2="{LEFT + 34}" y1="{TOP + 10 + 15 * number}" y2="{TOP + 10 + 15 * number}"'
        yield f'<line stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}" {line}/>'
        yield f'<text x="{LEFT + 40}" y="{TOP + 14 + 15 * number}">{escape(curve.name)}</text>'


# ticks, and a function from a value to its place between 0 and 1
Scale = tuple[Sequence[float], Callable[[float], float]]


def _linear(values: Sequence[float]) -> Scale:
    """Return a scale from zero in three to six round steps."""
    top = max(values, default=0.0) or 1.0
    decade = 10.0 ** math.floor(math.log10(top))
    step = next(s for s in (decade / 5, decade / 2, decade, 2 * decade) if math.ceil(top / s) <= 6)
    count = math.ceil(top / step)
    return [step * n for n in range(count + 1)], lambda value: value / (step * count)


def _logarithmic(values: Sequence[float]) -> Scale:
    """Return a scale of whole steps of 1, 3, 10 … around the values."""
    steps = [factor * 10.0**n for n in range(-4, 9) for factor in (1, 3)]
    low = max((s for s in steps if s <= min(values, default=1.0)), default=steps[0])
    high = min((s for s in steps if s >= max(values, default=1.0) and s > low), default=steps[-1])

    def height(value: float) -> float:
        return math.log(value / low) / math.log(high / low)

    return [s for s in steps if low <= s <= high], height

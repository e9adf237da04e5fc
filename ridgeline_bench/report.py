"""A report: one self-contained HTML page from result files, with no script and no network, in light and dark."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.results import STAGE, Record
from ridgeline_bench.svg import Point, Span, history, roofline, spans
from ridgeline_bench.tables import number, share

PAGE = Path(__file__).with_name("report.html")
KERNEL = "kernel:"

Group = tuple[str, ...]


def write(records: Sequence[Record], out: Path) -> None:
    """Write the page. Raise InvalidConfig if there is nothing to show, or the file cannot be written."""
    if not records:
        raise InvalidConfig("these files hold no results; measure some with `ridgeline bench compare`.")
    page = PAGE.read_text(encoding="utf-8").replace("<!-- content -->", render(records))
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"cannot write {str(out)!r} ({error.strerror}); choose another --out.") from error


def render(records: Sequence[Record]) -> str:
    """Return the page's body. The newest measurements come first, and the others go into the history and the table."""
    ordered = sorted(records, key=lambda r: r.date)
    kernels = [r for r in ordered if r.workload.startswith(KERNEL)]
    work = [r for r in ordered if not r.workload.startswith(KERNEL)]
    return "\n".join([*_workloads(work), *_starts(work), *_kernels(kernels), *_history(ordered), _everything(ordered)])


def latest(records: Iterable[Record]) -> list[Record]:
    """Return the last record of every figure of every engine. `records` are in order of date."""
    return list({(r.engine, *r.what): r for r in records}.values())


def _workloads(records: Sequence[Record]) -> Iterable[str]:
    """Yield one table per model and machine: engines beside each other, with bars that end at the limit or at the
    best."""
    if records:
        yield "<h2>Workloads</h2><p>A full bar is the hardware's limit; where that is unknown, the best engine.</p>"
    for title, group in _grouped(latest(records), _setting).items():
        rows = []
        group.sort(key=lambda r: _natural(r.workload))
        for figures in _grouped(group, lambda r: r.what).values():
            for index, r in enumerate(sorted(figures, key=lambda r: r.engine)):
                cells = (r.workload, r.metric) if index == 0 else ("", "")
                bar = f'<span class="bar"><i style="width:{100 * _fullness(r, figures):.1f}%"></i></span>'
                numbers = number(r.value, r.unit), number(r.limit, r.unit), share(r.share)
                rows.append(_row(*cells, f"{r.engine} {r.version}", *numbers) + f"<td>{bar}</td></tr>")
        head = _head("workload", "metric", "engine", "value", "limit", "of limit", "")
        yield f"<h3>{escape(' · '.join(filter(None, title)))}</h3><table>{head}{''.join(rows)}</table>"


def _starts(records: Sequence[Record]) -> Iterable[str]:
    """Yield a timeline for each engine whose stages of a start are known. What lies between them has no name."""
    starts = [r for r in latest(records) if r.workload == "startup"]
    title = "<h2>Starts</h2><p>Stages follow one another from the start of the process until the engine is ready.</p>"
    for names, group in _grouped(starts, lambda r: (*_setting(r), r.engine)).items():
        ready = next((r.value for r in group if r.metric == "ready"), 0.0)
        stages = [(r.metric.removeprefix(STAGE), r.value) for r in group if r.metric.startswith(STAGE)]
        if not stages:
            continue
        drawn, at = list[Span](), 0.0
        for name, seconds in stages:
            drawn.append(Span(name, at, at + seconds))
            at += seconds
        if ready > at:
            drawn.append(Span("other", at, ready))
        yield f"{title}<h3>{escape(' · '.join(filter(None, names)))}</h3>{spans(drawn, 's')}"
        title = ""


def _fullness(record: Record, rivals: Sequence[Record]) -> float:
    if record.share:
        return min(1.0, record.share)
    values = [r.value for r in rivals if r.value > 0]
    if not values or record.value <= 0:
        return 0.0
    return min(values) / record.value if record.better == "lower" else record.value / max(values)


def _kernels(records: Sequence[Record]) -> Iterable[str]:
    if records:
        yield "<h2>Kernels</h2><p>Rest the pointer on a dot for its case. The roof is what the device attains.</p>"
    for title, group in _grouped(latest(records), lambda r: (_device(r), r.dtype)).items():
        ops = list(dict.fromkeys(r.workload for r in group))
        points = [
            Point(
                r.options["flops"] / r.options["bytes"],
                1e6 * r.options["flops"] / r.value,
                _case(r),
                ops.index(r.workload),
            )
            for r in group
            if r.options.get("flops") and r.options.get("bytes") and r.value
        ]
        roof = [group[-1].options.get(name, 0.0) for name in ("bandwidth", "peak")]
        plot = roofline(points, *roof) if points else ""
        keys = "".join(
            f'<span class="key g{n % 8}">{escape(op.removeprefix(KERNEL))}</span>' for n, op in enumerate(ops)
        )
        head = _head("op", "case", "time", "limit", "of limit")
        rows = "".join(
            _row(
                r.workload.removeprefix(KERNEL),
                r.metric,
                number(r.value, r.unit),
                number(r.limit, r.unit),
                share(r.share),
            )
            + "</tr>"
            for r in group
        )
        yield f"<h3>{escape(' · '.join(title))}</h3><p>{keys}</p>{plot}"
        yield f"<details><summary>{len(group)} cases</summary><table>{head}{rows}</table></details>"


def _case(r: Record) -> str:
    reached = f", {share(r.share)} of the limit" if r.share else ""
    return f"{r.workload.removeprefix(KERNEL)} {r.metric}: {number(r.value, r.unit)}{reached}"


def _history(records: Sequence[Record]) -> Iterable[str]:
    """Yield the figures measured at more than one time, by date. A case that one run measured twice has no history."""
    groups = _grouped(records, lambda r: (r.engine, *r.what))
    series = {key: group for key, group in groups.items() if group[0].date != group[-1].date}
    if series:
        yield '<h2>History</h2><div class="many">'
    for group in sorted(series.values(), key=lambda group: _natural(group[-1].workload)):
        last, ends = group[-1], (group[0].date[:10], group[-1].date[:10])
        points = [Point(n, r.value, f"{r.date} {_commit(r)}: {number(r.value, r.unit)}") for n, r in enumerate(group)]
        name = f"{last.engine} · {last.workload} {last.metric} · {last.model} {last.dtype}"
        yield f"<figure>{history(points, last.unit, ends)}<figcaption>{escape(name)}</figcaption></figure>"
    if series:
        yield "</div>"


def _everything(records: Sequence[Record]) -> str:
    names = "date", "commit", "engine", "workload", "metric", "value", "model", "dtype", "device", "torch"
    rows = "".join(_row(*_cells(r)) + "</tr>" for r in reversed(records))
    table = f"<table>{_head(*names)}{rows}</table>"
    return f"<h2>All results</h2><details><summary>{len(records)} figures</summary>{table}</details>"


def _cells(r: Record) -> tuple[str, ...]:
    engine, value = f"{r.engine} {r.version}", number(r.value, r.unit)
    return r.date, _commit(r), engine, r.workload, r.metric, value, r.model, r.dtype, _device(r), r.machine.torch


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key by which W3-b8 comes before W3-b64."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _setting(r: Record) -> Group:
    scale = r.options.get("scale", 1)
    return r.model, r.dtype, _device(r), f"scale {scale}" if scale != 1 else ""


def _device(r: Record) -> str:
    return r.machine.gpu or r.machine.cpu


def _commit(r: Record) -> str:
    return r.machine.commit + ("+changes" if r.machine.dirty else "")


def _grouped(records: Iterable[Record], key: Callable[[Record], Group]) -> dict[Group, list[Record]]:
    groups: dict[Group, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _head(*names: str) -> str:
    return "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in names) + "</tr>"


def _row(*cells: str) -> str:
    """Return a row that is left open, for cells that are not text."""
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells)

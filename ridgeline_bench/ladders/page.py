"""The tables and pictures of a ladder's page: the newest stored time of each rung, beside the fastest library's.

    python -m ridgeline_bench.ladders.page gemm [FILE.jsonl]
    python -m ridgeline_bench.ladders.page formats [FILE.jsonl]   # the GEMM ladder: formats and epilogues
    python -m ridgeline_bench.ladders.page why               # the GEMM ladder: least and measured times, and why

`ridgeline bench kernels --ladder gemm --out FILE.jsonl` stores them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from ridgeline_bench.ladders.reasons import REASONS
from ridgeline_bench.ladders.runs import Problem, moves
from ridgeline_bench.results import Record, read

FORMAT = " in "  # in names of problems that are of one format, such as "4096³ in fp8"
FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-ladders.jsonl"

Times = dict[str, dict[str, Record]]  # problem → rung or library → its newest time


def newest(name: str, file: Path = FILE) -> Times:
    """Return the newest stored times of a ladder: of libraries, and of rungs in their order."""
    found: Times = {}
    for record in read([file]):
        if record.workload == f"ladder:{name}":
            problem, rung = record.metric.removesuffix("]").split(" [", 1)
            found.setdefault(problem, {})[rung] = record
    problems: Sequence[Problem] = import_module(f"ridgeline_bench.ladders.{name}").PROBLEMS
    listed = (each for n, each in enumerate(problems) if n == 0 or FORMAT in each.name or moves(each))
    order = list(dict.fromkeys(rung for problem in listed for rung, _, _ in problem.least()))
    return {
        problem: dict(sorted(own.items(), key=lambda item: order.index(item[0]) if item[0] in order else -1))
        for problem, own in found.items()
    }


def libraries(times: Times) -> list[str]:
    """Return the names of those that have no least time: libraries, of which only the time is known."""
    return list(dict.fromkeys(rung for own in times.values() for rung, record in own.items() if not record.limit))


def rate(record: Record) -> float:
    """Return TFLOP/s, by the FLOPs that the result needs."""
    return float(record.options["flops"]) / record.value / 1e6


Fastest = dict[str, dict[datetime, float]]  # problem → date of a run → the rate of the fastest library


def fastest(name: str, file: Path = FILE) -> Fastest:
    """Return the rate of the fastest library of each run."""
    found: Fastest = {}
    for record in read([file]):
        if record.workload == f"ladder:{name}" and not record.limit:
            runs, date = found.setdefault(record.metric.split(" [")[0], {}), datetime.fromisoformat(record.date)
            runs[date] = max(runs.get(date, 0.0), rate(record))
    return found


def table(times: Times, best: Fastest) -> str:
    """Return the times as Markdown: for each problem TFLOP/s, and the share of the fastest library in its run, or in
    the nearest."""
    peers = libraries(times)
    times = {problem: own for problem, own in times.items() if FORMAT not in problem}
    lines = ["| | " + " | ".join(times) + " |", "|---|" + "---:|" * len(times)]
    for rung in dict.fromkeys(rung for own in times.values() for rung in own):
        cells = (_cell(own.get(rung), best[problem]) for problem, own in times.items())
        name = rung if rung in peers else f"`{rung}`"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def formats(times: Times, best: Fastest) -> str:
    """Return the times of problems that are of one format as Markdown, a kernel a line, beside the library's."""
    lines = ["| problem | | TFLOP/s, of cuBLAS | least µs | measured |", "|---|---|---:|---:|---:|"]
    for problem, own in times.items():
        for rung, record in own.items() if FORMAT in problem else ():
            name, least = (f"`{rung}`", f"{record.limit:,.0f}") if record.limit else (rung, "")
            lines.append(f"| {problem} | {name} | {_cell(record, best[problem])} | {least} | {record.value:,.0f} |")
    return "\n".join(lines)


def differences(times: Times) -> str:
    """Return a rung a line as Markdown: its least and its measured time for the first problem, and why they differ."""
    lines = ["| rung | least µs | measured | times | why |", "|---|---:|---:|---:|---|"]
    own = next(iter(times.values()))
    for rung, why in REASONS.items():
        least, took = own[rung].limit, own[rung].value
        assert least
        lines.append(f"| `{rung}` | {least:,.0f} | {took:,.0f} | {took / least:.2f} | {why} |")
    return "\n".join(lines)


def _cell(record: Record | None, best: Mapping[datetime, float]) -> str:
    if record is None:
        return ""
    date = datetime.fromisoformat(record.date)
    run = min(best, key=lambda other: abs(other - date))
    return f"{rate(record):.1f}, {100 * rate(record) / best[run]:.0f} %"


def draw(times: Times, title: str, path: Path) -> None:
    """Draw the rates as bars with their figures, a panel for each problem, two beside each other."""
    import matplotlib as mpl  # the extra `train`
    from matplotlib import pyplot as plt

    mpl.rcParams |= {"svg.hashsalt": "ladder", "svg.fonttype": "none"}  # text as text: a tenth of the bytes
    rows = [list(times.items())[at : at + 2] for at in range(0, len(times), 2)]
    heights = [max(len(own) for _, own in row) for row in rows]
    figure, axes = plt.subplots(
        len(rows), 2, figsize=(9, 0.4 + sum(0.7 + 0.2 * height for height in heights)), squeeze=False,
        height_ratios=heights,
    )  # fmt: skip
    for line, row in zip(axes, rows, strict=True):
        for ax, (problem, own) in zip(line, row, strict=False):
            _bars(ax, own)
            ax.set_title(problem, fontsize=9)
        for ax in line[len(row) :]:
            ax.set_axis_off()
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _bars(ax: Any, own: Mapping[str, Record]) -> None:
    colours = ["#2a78b8" if record.limit else "#5c6b73" for record in own.values()]
    rates = [rate(record) for record in own.values()]
    ax.bar_label(ax.barh(range(len(own)), rates, color=colours), fmt="%.0f", padding=2, fontsize=7)
    ax.set(xlabel="TFLOP/s", yticks=range(len(own)), yticklabels=own, xlim=(0, 1.12 * max(rates)))
    ax.set_ylim(len(own) - 0.5, -0.5)
    ax.tick_params(labelsize=7)


def main() -> None:
    name, *rest = sys.argv[1:]
    file = Path(rest[0]) if rest else FILE
    if name == "why":
        print(differences(newest("gemm", file)))
    elif name == "formats":
        print(formats(newest("gemm", file), fastest("gemm", file)))
    else:
        print(table(newest(name, file), fastest(name, file)))


if __name__ == "__main__":
    main()

"""The tables and the picture of the page of memory-bound kernels: rates of the newest stored run, beside a copy's.

python -m ridgeline_bench.ladders.bytes_page [FILE.jsonl]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from ridgeline.kernels.memory_bound.rungs import BY_ROWS, KERNELS
from ridgeline_bench.ladders.memory_bound import SIZES, WIDTH
from ridgeline_bench.ladders.page import FILE, Times, newest
from ridgeline_bench.ladders.runs import COPY
from ridgeline_bench.results import Record

LADDER = "memory_bound"
COLOURS = {"torch": "#5c6b73", "naive": "#c77b30", "best": "#2a78b8"}


def rate(record: Record) -> float:
    """Return GB/s, by the bytes that the result needs."""
    return float(record.options["bytes"]) / record.value / 1e3


def share(own: Mapping[str, Record], name: str) -> float:
    """Return a kernel's rate as a share of the copy's in its run."""
    return own[COPY].value / own[name].value


def by_size(times: Times, op: str) -> str:
    """Return the rates of an op for each size as Markdown: a kernel a line, GB/s and the share of a copy's rate."""
    return _table(op, {f"{size} MB": times[f"{op}, {size} MB"] for size in SIZES})


def by_length(times: Times, op: str) -> str:
    """Return the shares of an op by the length of rows, at 256 MB, as Markdown."""
    own = lengths(times, op)
    lines = ["| | " + " | ".join(f"{columns:,}" for columns in own) + " |", "|---|" + "---:|" * len(own)]
    for name in dict.fromkeys(name for each in own.values() for name in each if name != COPY):
        cells = (f"{100 * share(each, name):.0f}" if name in each else "" for each in own.values())
        lines.append(f"| {_called(op, name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def lengths(times: Times, op: str) -> dict[int, dict[str, Record]]:
    """Return the times of an op by the columns of its rows."""
    own = {int(problem.split()[1]): each for problem, each in times.items() if problem.endswith(" columns")
           and problem.startswith(f"{op}, ")}  # fmt: skip
    return dict(sorted((own | {WIDTH: times[f"{op}, 256 MB"]}).items()))


def loss(times: Times) -> str:
    """Return the times of linear cross-entropy as Markdown, beside those of its products alone ("": there are none)."""
    own = next((each for problem, each in times.items() if problem.startswith("linear_cross_entropy")), None)
    if own is None:
        return ""
    products = next(each.value for name, each in own.items() if name.startswith("cuBLAS"))
    lines = ["| | ms | TFLOP/s | of the products' rate |", "|---|---:|---:|---:|"]
    for name, each in own.items():
        speed = float(each.options["flops"]) / each.value / 1e6
        called = _called("linear_cross_entropy", name)
        lines.append(f"| {called} | {each.value / 1e3:.2f} | {speed:.0f} | {products / each.value:.3f} |")
    return "\n".join(lines)


def _table(op: str, own: Mapping[str, Mapping[str, Record]]) -> str:
    lines = ["| " + op + " | " + " | ".join(own) + " |", "|---|" + "---:|" * len(own)]
    for name in dict.fromkeys(name for each in own.values() for name in each):
        cells = (f"{rate(x[name]):,.0f}, {100 * share(x, name):.0f} %" if name in x else "" for x in own.values())
        lines.append(f"| {_called(op, name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _called(op: str, name: str) -> str:
    own = name.removeprefix(f"{op}-")
    return f"`{own}`" if own != name else name


def draw(times: Times, path: Path) -> None:
    """Draw the shares of a copy's rate by the length of rows: torch's, those of the naive rung, and of the best."""
    import matplotlib as mpl  # the extra `train`
    from matplotlib import pyplot as plt

    mpl.rcParams |= {"svg.hashsalt": "ladder", "svg.fonttype": "none"}  # text as text: a tenth of the bytes
    figure, axes = plt.subplots(1, len(BY_ROWS), figsize=(9, 3), sharey=True)
    for ax, op in zip(axes, BY_ROWS, strict=True):
        found = lengths(times, op)
        for name, colour in COLOURS.items():
            points = [(columns, 100 * _of(name, op, own)) for columns, own in found.items()]
            ax.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=3, linewidth=1.2, label=name)
        ax.axhline(92, color="#888888", linewidth=0.6, linestyle=":")
        ax.set(title=op, xscale="log", xlabel="columns", ylim=(0, 105))
        ax.set_xticks(list(found), [f"{columns >> 10}k" for columns in found])
        ax.minorticks_off()
        ax.tick_params(labelsize=7)
    axes[0].set_ylabel("% of a copy's rate")
    axes[0].legend(fontsize=7, loc="lower left")
    figure.suptitle("Rows of 256 MB on one H200; the dotted line is 92 %", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _of(name: str, op: str, own: Mapping[str, Record]) -> float:
    rungs = [each for each in own if each.startswith(f"{op}-")]
    if name == "torch":
        return share(own, "torch")
    return share(own, rungs[0]) if name == "naive" else max(share(own, each) for each in rungs)


def main() -> None:
    times = newest(LADDER, Path(sys.argv[1]) if len(sys.argv) > 1 else FILE)
    for op in KERNELS:
        print(by_size(times, op), end="\n\n")
    for op in BY_ROWS:
        print(f"{op}:\n\n{by_length(times, op)}", end="\n\n")
    print(loss(times))


if __name__ == "__main__":
    main()

"""The tables and the picture of the page on the allocator, from stored results.

python -m ridgeline_bench.scripts.allocator.page
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline_bench.scripts.allocator.model import MIB
from ridgeline_bench.scripts.allocator.scenarios import SCENARIOS, SIZES

RESULTS = Path("benchmarks/results/h200-allocator.jsonl")
IMAGE = Path("docs/images/allocator.svg")
Line = Mapping[str, Any]
RULES, SERVER, STEP = "allocator rules", "allocator of a server", "allocator of a training step"


def of(lines: Iterable[Line], workload: str) -> list[Line]:
    """Return the lines of a workload."""
    return [line for line in lines if line["workload"] == workload]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown, whose numbers stand to the right."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---", *["--:"] * (len(head) - 1)], *rows))


def rules_table(lines: Iterable[Line]) -> str:
    """Return what each way of setting the allocator holds at the peak of each scenario, in MiB, and its calls."""
    rows = []
    for line in of(lines, RULES):
        if line["what"] in ("growing", "tenant", "mixed", "limited"):
            right = f"{line['as_predicted']} of {line['events']}" if "events" in line else ""
            rows.append((
                line["what"], f"`{line['setting']}`",
                *(f"{line[name] / MIB:,.0f}" for name in ("requested", "reserved")),
                *(str(line[name]) if right else "" for name in ("mallocs", "frees")), right,
                f"{line['microseconds']:,.0f}",
            ))  # fmt: skip
    order = list(SCENARIOS)
    rows.sort(key=lambda row: order.index(row[0]))
    return table(("scenario", "setting", "asked", "held", "taken", "given back", "as predicted", "µs"), rows)


def sizes_table(lines: Iterable[Line]) -> str:
    """Return the bytes that the driver gave for single requests."""
    named = {line["setting"]: line["each"] for line in of(lines, RULES) if line["what"] == "sizes"}
    rows = [(f"{size:,}", *(f"{each[n]:,}" for each in named.values())) for n, size in enumerate(SIZES)]
    return table(("bytes asked", *(f"`{name}`" for name in named)), rows)


def calls_table(lines: Iterable[Line]) -> str:
    """Return the microseconds of single requests."""
    rows = [
        (f"`{line['setting']}`", f"{line['hit_us']:.1f}", f"{line['miss_us']:,.0f}")
        for line in of(lines, RULES)
        if line["what"] == "single calls"
    ]
    return table(("setting", "a block is free, µs", "from the driver and back, µs"), rows)


def step_table(lines: Iterable[Line]) -> str:
    """Return the peaks and times of training steps."""
    rows = []
    first: Line | None = None
    for line in of(lines, STEP):
        new = line["share"] == 0 and line["setting"] == ""
        first = line if first is None or (new and line["processes"] != first["processes"]) else first
        less = 1 - line["peak_reserved"] / first["peak_reserved"]
        rows.append((
            str(line["processes"]), f"`{line['setting'] or 'native'}`", f"{line['share']:.0%}",
            f"{line['peak_allocated'] / 1e9:.1f}", f"{line['peak_reserved'] / 1e9:.1f}", f"{less:.0%}",
            f"{line['sent'] / 1e9:.1f}", f"{1e3 * line['seconds']:.0f}", f"{line['losses_apart']:.1g}",
        ))  # fmt: skip
    head = ("GPUs", "setting", "layers", "in use, GB", "held, GB", "less", "sent, GB", "ms a step", "losses apart")
    return table(head, rows)


def server_table(lines: Iterable[Line]) -> str:
    """Return what a server asked of its allocator."""
    rows = []
    for line in of(lines, SERVER):
        used, calls = line["fragments"], line["driver"]
        rows.append((
            line["what"], f"{line['peak']['allocated'] / 1e9:.2f}", f"{used['reserved'] / 1e9:.2f}",
            f"{used['unused'] / 1e6:.1f}", f"{used['cached'] / 1e6:.1f}", str(calls["num_device_alloc"]),
            str(calls["num_device_free"]), f"{line['events'].get('alloc', 0):,}", f"{line['churn'] / 1e9:.2f}",
        ))  # fmt: skip
    head = ("", "peak in use, GB", "held, GB", "unused, MB", "cached, MB", "taken", "given back", "blocks", "their GB")
    return table(head, rows)


def draw(lines: Sequence[Line], path: Path) -> None:
    """Draw the bytes in use and held of a server, and of a step of training with and without offloaded activations."""
    import matplotlib as mpl  # only here, since tests run this module without the extra
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "ridgeline", "font.size": 9, "font.family": "DejaVu Sans"})
    figure, (serving, training) = plt.subplots(1, 2, figsize=(9.2, 3.4), facecolor="white")
    began = 0.0
    for line in of(lines, SERVER):
        at = [began + us / 1e6 for us, _, _ in line["moments"]]
        for index, color in ((1, "C0"), (2, "C1")):
            values = [each[index] / 1e9 for each in line["moments"]]
            name = ("in use", "held")[index - 1] if line["what"] == "start" else None
            serving.step(at, values, where="post", color=color, lw=1, label=name)
        began = at[-1]
        if line["what"] == "start":
            serving.axvline(began, color="grey", lw=0.8, ls=":")
    serving.set(title="a server starts, and serves behind the dotted line", xlabel="seconds", ylabel="GB", ylim=0)
    serving.legend(frameon=False, loc="lower right")
    steps = of(lines, STEP)
    most = max(line["processes"] for line in steps)
    shown = {line["share"]: line for line in steps if line["processes"] == most and line["setting"] == ""}
    for color, (share, line) in enumerate(sorted(shown.items())):
        moments = line["step"]["moments"]
        training.step(
            [us / 1e3 for us, _, _ in moments], [used / 1e9 for _, used, _ in moments], where="post", lw=1,
            color=f"C{color}", label=f"{share:.0%} of layers",
        )  # fmt: skip
    training.set(title="bytes in use during a step of training", xlabel="ms", ylabel="GB", ylim=0)
    training.legend(frameon=False, title="activations in the host's memory", fontsize=8, title_fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Title": "A GPU's allocator", "Date": None})


def main() -> None:
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    for made in (sizes_table, calls_table, rules_table, server_table, step_table):
        print(made(lines), end="\n\n")
    draw(lines, IMAGE)


if __name__ == "__main__":
    main()

"""Draw the README's chart: both engines' share of the hardware's limit, from benchmarks/results/h200.jsonl.

    python -m ridgeline_bench.scripts.readme_chart        # writes docs/images/vllm-light.svg and
        docs/images/vllm-dark.svg

For every model it takes the newest run in which both engines were measured on one GPU at one commit, with a clean tree.
Every workload of that run that has a limit is drawn. The SVG's description lists the figures, and a test compares it
with the results, so that the picture cannot fall behind them. Needs matplotlib (extra `train`).
"""

# ruff: noqa: RUF001  (names of workloads are written with ×)
from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200.jsonl"
IMAGES = ROOT / "docs" / "images"
US, PEER = "ridgeline", "vllm"
MODELS = {"qwen3-0.6b": "Qwen3-0.6B", "llama-1b": "Llama-3.2-1B", "llama-8b": "Llama-3.1-8B"}
WORKLOADS = {  # (workload, metric) → how a row is called, from top to bottom
    ("W2", "tpot"): "decode, 1 request",
    ("W3-b8", "step b8"): "decode, 8 requests",
    ("W3-b64", "step b64"): "decode, 64 requests",
    ("W3-b256", "step b256"): "decode, 256 requests",
    ("W2", "ttft"): "first token, 128-token prompt",
    ("W4-1x1024", "prefill 1x1024"): "prefill, 1 × 1,024 tokens",
    ("W4-1x8192", "prefill 1x8192"): "prefill, 1 × 8,192 tokens",
    ("W4-1x30000", "prefill 1x30000"): "prefill, 1 × 30,000 tokens",
    ("W4-8x8192", "prefill 8x8192"): "prefill, 8 × 8,192 tokens",
    ("W1", "output"): "256 mixed requests",
    ("W5", "output"): "512 requests, shared prefix",
}
THEMES = {  # background, text, faint lines, Ridgeline, vLLM
    "light": ("#ffffff", "#1f2328", "#d1d9e0", "#1a6fb5", "#c2630a"),
    "dark": ("#0d1117", "#e6edf3", "#30363d", "#58a6ff", "#f0883e"),
}


@dataclass(frozen=True)
class Run:
    """One model's figures, share of the limit and how many times as fast as the peer, by workload."""

    model: str
    commit: str
    date: str
    gpu: str
    torch: str
    peer_version: str
    ours: dict[str, float]
    theirs: dict[str, float]

    @property
    def times(self) -> dict[str, float]:
        return {name: share / self.theirs[name] for name, share in self.ours.items()}


def share(record: dict[str, Any]) -> float:
    """Return measured speed ÷ the limit's speed: 1 is the limit."""
    value, limit = record["value"], record["limit"]
    return float(value / limit if record["better"] == "higher" else limit / value)


def runs(records: Iterable[dict[str, Any]]) -> list[Run]:
    """Return the newest comparison of each model that was made at a clean commit."""
    found: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        if not record["machine"]["dirty"]:
            key = record["model"], record["machine"]["commit"]
            found.setdefault(key, {}).setdefault(record["engine"], []).append(record)
    newest: dict[str, Run] = {}
    for (model, commit), engines in found.items():
        if {US, PEER} <= engines.keys():
            run = _run(model, commit, engines[US], engines[PEER])
            if model not in newest or newest[model].date < run.date:
                newest[model] = run
    return [newest[model] for model in MODELS]


def _run(model: str, commit: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Run:
    machine = ours[0]["machine"]
    by_engine = [
        {name: share(r) for key, name in WORKLOADS.items() for r in records if (r["workload"], r["metric"]) == key}
        for records in (ours, theirs)
    ]
    torch = f"torch {machine['torch']}, triton {machine['triton']}, driver {machine['driver']}"
    version = theirs[0]["version"]
    return Run(model, commit, ours[0]["date"][:16], machine["gpu"], torch, version, by_engine[0], by_engine[1])


def description(chosen: list[Run]) -> str:
    """Return every figure of the chart as text: what a reader who does not see it gets, and what the test compares."""
    lines = []
    for run in chosen:
        lines.append(f"{MODELS[run.model]}, {run.gpu}, {run.torch}, commit {run.commit}, {run.date}:")
        lines += [
            f"  {name}: Ridgeline {run.ours[name]:.1%} of the limit, vLLM {run.peer_version} {run.theirs[name]:.1%}"
            for name in WORKLOADS.values()
        ]
    return "\n".join(lines)


def draw(chosen: list[Run], theme: str, path: Path) -> None:
    """Draw one panel for each model. In a row two dots, the limit at 100%, and how many times as fast we are."""
    background, text, faint, blue, orange = THEMES[theme]
    mpl.rcParams.update(
        {"svg.hashsalt": "ridgeline", "font.size": 10, "text.color": text, "font.family": "DejaVu Sans"}
    )
    figure, panels = plt.subplots(1, len(chosen), sharey=True, figsize=(10.4, 5.3), facecolor=background)
    names = list(WORKLOADS.values())
    places = range(len(names), 0, -1)
    for panel, run in zip(panels, chosen, strict=True):
        ours, theirs = ([100 * side[name] for name in names] for side in (run.ours, run.theirs))
        panel.set_facecolor(background)
        panel.axvline(100, color=text, linewidth=1.2, linestyle=(0, (4, 2)))
        panel.hlines(places, theirs, ours, color=faint, linewidth=3, zorder=1)
        panel.scatter(theirs, places, color=orange, marker="D", s=30, zorder=2, label=f"vLLM {run.peer_version}")
        panel.scatter(ours, places, color=blue, s=48, zorder=3, label="Ridgeline")
        for name, place in zip(names, places, strict=True):
            panel.text(126, place, f"{run.times[name]:.2f}×", ha="right", va="center", fontsize=9.5)
        panel.set(xlim=(0, 128), ylim=(0.4, len(names) + 0.6), xticks=[0, 25, 50, 75, 100], yticks=list(places))
        panel.set_xticklabels(["0", "25", "50", "75", "100%"])
        panel.set_yticklabels(names)
        panel.grid(axis="x", color=faint, linewidth=0.6)
        panel.set_axisbelow(True)
        panel.tick_params(colors=text, length=0)
        for side in panel.spines.values():
            side.set_visible(False)
        panel.set_title(MODELS[run.model], fontsize=12, fontweight="bold", color=text, pad=8)
    figure.suptitle(
        "Share of the hardware's limit (dashed, 100%); farther right is faster", fontsize=13, x=0.5, y=0.985
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(0.0, 0.945), frameon=False, labelcolor=text
    )
    figure.text(0.008, 0.012, footer(chosen), fontsize=8.5, va="bottom", linespacing=1.5)
    figure.subplots_adjust(left=0.205, right=0.992, top=0.86, bottom=0.175, wspace=0.06)
    metadata = {"Title": "Ridgeline beside vLLM", "Description": description(chosen), "Date": None}
    figure.savefig(path, facecolor=background, metadata=metadata)
    plt.close(figure)


def footer(chosen: list[Run]) -> str:
    first, models = chosen[0], dict[str, list[str]]()
    for run in chosen:
        models.setdefault(f"commit {run.commit} ({run.date[:10]})", []).append(MODELS[run.model])
    commits = ", ".join(f"{' and '.join(names)} at {commit}" for commit, names in models.items())
    return (
        f"One {first.gpu}, both engines in one run on the same GPU; bfloat16, random weights, {first.torch}.\n"
        f"Ridgeline: {commits}. vLLM {first.peer_version}, prefix caching on.\n"
        "Right of the line: how many times as fast Ridgeline is. "
        "Limit: for each op the larger of bytes ÷ 4.42 TB/s and FLOPs ÷ 750 TFLOP/s."
    )


def main() -> None:
    chosen = runs(map(json.loads, RESULTS.read_text().splitlines()))
    IMAGES.mkdir(exist_ok=True)
    for theme in THEMES:
        draw(chosen, theme, IMAGES / f"vllm-{theme}.svg")
    print(description(chosen))


if __name__ == "__main__":
    main()

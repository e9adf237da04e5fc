"""Records and a picture of what fewer bits cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.compression.predictions import TokenCosts
from ridgeline.core.errors import InvalidConfig
from ridgeline.version import __version__
from ridgeline_bench.quality.cache import CacheCosts
from ridgeline_bench.quality.dense import DenseModel
from ridgeline_bench.quality.quantized import Row
from ridgeline_bench.quality.results import figures
from ridgeline_bench.results import Record, host_with


def _base(model: DenseModel, options: Mapping[str, Any]) -> Record:
    return Record(
        engine="ridgeline",
        version=__version__,
        model=model.folder.name,
        dtype=model.config.dtype,
        machine=host_with(model.device),
        options=options,
        workload="",
        metric="",
        value=0.0,
        unit="",
    )


def quantization_records(model: DenseModel, rows: Sequence[Row], options: Mapping[str, Any]) -> list[Record]:
    """Return every figure of the table as a record, whose workload names scheme and method."""
    known = _base(model, options)
    found: list[Record] = []
    for row in rows:
        found += figures(known, f"quantization:{row.scheme}:{row.method}", row.figures)
    return found


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Return the rows of stored records, with what a picture shows of them: bits, bytes, mean costs and speeds."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        found.setdefault(record.workload, {})[record.metric] = record.value
    rows = []
    for workload, values in found.items():
        _, scheme, method = workload.split(":", 2)
        nats, kl, same = (torch.tensor([value], dtype=torch.float64) for value in (
            math.log(values["perplexity"]), values["kl_mean"], values["equal_greedy"],
        ))  # fmt: skip
        speed = {int(name.removeprefix("output_b")): v for name, v in values.items() if name.startswith("output_b")}
        rows.append(
            Row(
                scheme=scheme,
                method=method,
                bits=values["bits_per_weight"],
                weight_bytes=values["weight_bytes"],
                costs=TokenCosts(nats, kl, same),
                speed=speed,
            )
        )
    return rows


def cache_records(model: DenseModel, found: CacheCosts) -> list[Record]:
    """Return perplexity and divergence of each format, side and bucket of positions."""
    known = _base(model, {"windows": found.windows, "context": found.edges[-1]})
    return [record for lines in _cache_lines(known, found) for record in lines]


def _cache_lines(known: Record, found: CacheCosts) -> Iterator[list[Record]]:
    for index, end in enumerate(found.edges):
        here = replace(known, options={**known.options, "until": end})
        yield figures(here, f"cache:float32:{end}", {"perplexity": (found.perplexity[index], "per token", "lower")})
        for cost in found.costs:
            values = {
                "perplexity": (cost.perplexity[index], "per token", "lower"),
                "kl_mean": (cost.kl[index], "nats", "lower"),
            }
            yield figures(here, f"cache:{cost.format}:{cost.side}:{end}", values)


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw each row's divergence over its bits and, where it has a speed, over that of one request and of the largest
    batch. Raise InvalidConfig without matplotlib."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise InvalidConfig("a plot needs matplotlib: pip install 'ridgeline[train]'.") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "ridgeline", "font.family": "DejaVu Sans", "font.size": 9})
    quantized = [row for row in rows if row.costs.kl_mean > 0]
    timed = [row for row in quantized if row.speed]
    figure, axes = plt.subplots(1, 2 if timed else 1, figsize=(10.5 if timed else 6, 4.6), squeeze=False)
    methods = sorted({row.method for row in quantized})
    for number, method in enumerate(methods):
        ours = [row for row in quantized if row.method == method]
        axes[0][0].scatter([r.bits for r in ours], [r.costs.kl_mean for r in ours], color=f"C{number}", label=method)
    best = {(row.scheme, round(row.bits, 1)): row for row in sorted(quantized, key=lambda row: -row.costs.kl_mean)}
    for index, row in enumerate(sorted(best.values(), key=lambda row: row.costs.kl_mean)):
        side = {"xytext": (-5, -3), "ha": "right"} if index % 2 else {"xytext": (5, -3), "ha": "left"}
        axes[0][0].annotate(row.scheme, (row.bits, row.costs.kl_mean), textcoords="offset points", fontsize=7, **side)
    axes[0][0].set(xlabel="bits of a weight", ylabel="KL divergence per token (nats)", yscale="log", title=title)
    axes[0][0].margins(x=0.12)
    axes[0][0].legend()
    if timed:
        _draw_speed(axes[0][1], timed, next(row for row in rows if not row.method))
    for plot in axes[0]:
        plot.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _draw_speed(plot: Any, timed: Sequence[Row], plain: Row) -> None:
    for number, batch in enumerate(timed[0].speed):
        rates = [row.speed[batch] for row in timed]
        plot.scatter(rates, [row.costs.kl_mean for row in timed], color=f"C{number}", label=f"{batch} at once")
        plot.axvline(plain.speed[batch], color=f"C{number}", linewidth=0.8, linestyle="--")
    for row in timed:
        place = (next(iter(row.speed.values())), row.costs.kl_mean)
        label = f"{row.scheme} {row.method}"
        plot.annotate(label, place, xytext=(4, 3), textcoords="offset points", fontsize=7)
    plot.set(xlabel="output tokens/s (dashed: plain weights)", xscale="log", yscale="log", title="quality over speed")
    plot.legend()

"""`ridgeline eval quantization` and `ridgeline eval cache`: what fewer bits for weights and for cached keys and values
cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ridgeline.cli.bench import Device, Model
from ridgeline.cli.options import with_records
from ridgeline.core.errors import InvalidConfig

if TYPE_CHECKING:
    import torch

    from ridgeline_bench.quality.cache import CacheCosts
    from ridgeline_bench.quality.documents import TextFile
    from ridgeline_bench.quality.quantized import Row

Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE...", help="Texts; default: Python source that the embedded models have not read."),
]
Context = Annotated[int | None, typer.Option(help="Tokens of a window (default: 1024, or what the context holds).")]
Windows = Annotated[int, typer.Option(min=1, help="Windows to read at most.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
RESULTS = Path("benchmarks/results/quantization.jsonl")
Out = Annotated[Path, typer.Option(help="Append the figures to this result file.")]


@dataclass(frozen=True)
class CalibrationFlags:
    """The text to calibrate with, and what of it is read."""

    calibration: Annotated[Path | None, typer.Option(help="Text to calibrate with (default: Python source).")] = None
    sequences: Annotated[int, typer.Option(min=1, help="Sequences to calibrate with.")] = 64
    length: Annotated[int, typer.Option(min=2, help="Tokens of such a sequence.")] = 512


@dataclass(frozen=True)
class SchemeFlags:
    """The schemes, and what they are compared with."""

    schemes: Annotated[
        str,
        typer.Option(help="scheme or scheme:method, separated by commas; quip, aqlm and q4_k_m; default: one of each."),
    ] = ""
    baseline: Annotated[str, typer.Option(help="Compare with this model (default: the model itself).")] = ""
    group: Annotated[int, typer.Option(help="Weights that share a scale, for whole numbers in groups.")] = 128


@dataclass(frozen=True)
class ReadFlags:
    """The windows that are read, the speeds, and where."""

    batches: Annotated[str, typer.Option(help="Batch sizes of the speed, separated by commas; none: no speed.")] = (
        "1,8,64"
    )
    context: Context = None
    windows: Windows = 16
    device: Device = "auto"


@with_records
def quantization(
    files: Files = None,
    model: Model = "",
    *,
    how: SchemeFlags,
    text: CalibrationFlags,
    read: ReadFlags,
    plot: Annotated[Path | None, typer.Option(help="Draw quality over bits and over speed (.svg or .png).")] = None,
    as_json: Json = False,
    out: Out = RESULTS,
) -> None:
    """Fill a table of scheme and method: bits, memory, perplexity, divergence, tokens per second."""
    from ridgeline.compression.calibration import default_documents
    from ridgeline.compression.calibration import sequences as cut
    from ridgeline.defaults import choose_device
    from ridgeline.progress import LoadingBar
    from ridgeline_bench.quality.dense import DenseModel
    from ridgeline_bench.quality.quantized import DEFAULT, Choice, Speeds, measure
    from ridgeline_bench.quality.rounding_results import draw, quantization_records
    from ridgeline_bench.results import append

    choices = [Choice.of(name.strip()) for name in (how.schemes or ",".join(DEFAULT)).split(",") if name.strip()]
    sizes, where = _sizes(read.batches), choose_device(read.device)
    dense, beside = (DenseModel.of(_folder(name), where) for name in (model, how.baseline or model))
    tokens_WT1 = dense.windows(_texts(files), read.context, read.windows)
    documents = default_documents() if text.calibration is None else list(_read([text.calibration])[0].documents)
    seen_BS = cut(documents, dense.tokenizer, count=text.sequences, length=text.length, bos=dense.tokenizer.bos_id)
    options = {
        "group": how.group,
        "sequences": len(seen_BS),
        "windows": len(tokens_WT1),
        "baseline": beside.folder.name,
    }
    options |= {
        "context": tokens_WT1.shape[1] - 1,
        "calibration": "" if text.calibration is None else text.calibration.name,
    }
    rows: list[Row] = []
    with LoadingBar() as bar:
        for row in measure(
            dense,
            choices,
            tokens_WT1,
            seen_BS,
            group=how.group,
            speeds=Speeds({"model": dense.folder, "device": read.device}, sizes),
            progress=bar,
            baseline=beside,
        ):
            rows.append(row)
            append(out, quantization_records(dense, [row], options))  # at once, as the next one may take long
    if plot is not None:
        draw(rows, f"{dense.folder.name} on {_named(where)}", plot)
    if as_json:
        print(json.dumps([{"scheme": r.scheme, "method": r.method, **_values(r)} for r in rows]))
    else:
        title = f"{dense.folder.name}, {tokens_WT1[:, 1:].numel():,} tokens"
        title += f"; tokens/s at batch sizes on {_named(where)}" if sizes else ""
        Console().print(_table(title, rows, sizes))
    print(f"ridgeline: appended to {out}", file=sys.stderr)


def cache(
    files: Files = None,
    model: Model = "",
    formats: Annotated[
        str, typer.Option(help="bfloat16, fp8_e4m3, fp8_e5m2, int8, int4, int3, int2; separated by commas.")
    ] = "bfloat16,fp8_e4m3,fp8_e5m2,int8,int4",
    context: Annotated[int | None, typer.Option(help="Tokens of a window (default: the model's context).")] = None,
    windows: Windows = 8,
    device: Device = "auto",
    as_json: Json = False,
    out: Out = RESULTS,
) -> None:
    """Measure what a cache of fewer bits costs by position, for keys, for values, and for both, in a simulation."""
    from ridgeline.defaults import choose_device
    from ridgeline.progress import TokenBar
    from ridgeline_bench.quality.cache import SIDES, measure, rounding
    from ridgeline_bench.quality.dense import DenseModel
    from ridgeline_bench.quality.rounding_results import cache_records
    from ridgeline_bench.results import append

    names = [name.strip() for name in formats.split(",") if name.strip()]
    for name in names:
        rounding(name)
    dense = DenseModel.of(_folder(model), choose_device(device))
    longest = dense.config.spec.max_position_embeddings
    tokens_WT1 = dense.windows(_texts(files), longest if context is None else context, windows)
    passes = 1 + len(names) * len(SIDES)
    with TokenBar("reading", tokens_WT1[:, 1:].numel() * passes) as bar:
        found = measure(dense.decoder(), tokens_WT1, names, bar)
    append(out, cache_records(dense, found))
    if as_json:
        print(json.dumps({"edges": found.edges, "baseline": found.baseline, "costs": [vars(c) for c in found.costs]}))
    else:
        Console().print(_cache_table(dense.folder.name, found))
    print(f"ridgeline: appended to {out}", file=sys.stderr)


def _folder(model: str) -> Path:
    from ridgeline.weights.folder import EMBEDDED_MODEL, resolve_model

    return resolve_model(model or EMBEDDED_MODEL)


def _texts(files: Sequence[Path] | None) -> list[TextFile]:
    from ridgeline_bench.quality.documents import held_out_files

    return _read(files) if files else held_out_files()


def _read(files: Sequence[Path]) -> list[TextFile]:
    from ridgeline_bench.quality.documents import read_file

    return [read_file(path) for path in files]


def _sizes(batches: str) -> list[int]:
    """Return the batch sizes. Raise InvalidConfig for one that is none."""
    if batches.strip() in ("", "none"):
        return []
    try:
        sizes = [int(size) for size in batches.split(",")]
    except ValueError as error:
        raise InvalidConfig(f"batches are whole numbers separated by commas, got {batches!r}.") from error
    if wrong := [size for size in sizes if size < 1]:
        raise InvalidConfig(f"a batch has at least 1 request, got {wrong[0]}.")
    return sizes


def _named(device: torch.device) -> str:
    from ridgeline_bench.results import host_with

    machine = host_with(device)
    return machine.gpu or machine.cpu


def _values(row: Row) -> dict[str, float]:
    return {name: value for name, (value, _, _) in row.figures.items()}


def _table(title: str, rows: Sequence[Row], batches: Sequence[int]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("scheme", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for name in ("bits", "MB", "ppl", "KL", "greedy", *(f"b{batch}" for batch in batches)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        costs = row.costs
        table.add_row(
            row.scheme,
            row.method,
            f"{row.bits:.2f}",
            f"{row.weight_bytes / 1e6:,.2f}",
            f"{costs.perplexity:,.3f}",
            f"{costs.kl_mean:.1e}",
            f"{costs.equal_greedy:.1%}",
            *(f"{row.speed[batch]:,.0f}" if batch in row.speed else "" for batch in batches),
        )
    return table


def _cache_table(title: str, found: CacheCosts) -> Table:
    named = f"{title}: perplexity by position, {found.windows} windows, a scale for each token and key head"
    table = Table(title=named, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("cache", no_wrap=True)
    table.add_column("rounded", no_wrap=True)
    for name in ("bits", "KL", *(f"< {edge:,}" for edge in found.edges)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("float32", "", "32", "", *(f"{each:.3f}" for each in found.perplexity))
    widths = [end - start for start, end in zip([0, *found.edges[:-1]], found.edges, strict=True)]
    for cost in found.costs:
        kl = sum(each * width for each, width in zip(cost.kl, widths, strict=True)) / found.edges[-1]
        cells = (f"{each:.3f}" for each in cost.perplexity)
        table.add_row(cost.format, cost.side, f"{cost.bits:.2f}", f"{kl:.1e}", *cells)
    return table

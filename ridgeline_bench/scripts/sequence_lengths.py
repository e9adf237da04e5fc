"""Mixers of one width over sequences of unlike lengths: gated linear attention, attention, Mamba and Mamba-2.

    python -m ridgeline_bench.scripts.sequence_lengths [--tokens 16384] [--lengths 512 1024 2048 4096 8192 16384]
        [--width 2048]
        [--only GLA] [--seconds 115] [--output FILE.jsonl]
    python -m ridgeline_bench.scripts.sequence_lengths --draw benchmarks/results/h100-sequence-lengths.jsonl
        # the picture of docs/sequence-mixers.md, and its table on standard output

A batch has --tokens tokens whatever their sequences' length, so a mixer whose work grows with the tokens takes the same
time on every line, and attention does not. Every mixer puts out --width channels: GLA has 4 heads of width / 8 by
width / 4, attention heads of 128, Mamba 16 numbers a channel, Mamba-2 heads of 64 by 128. Projections, convolutions and
norms around them are left out. "GLA, chunked" is the form that training runs, "GLA, inference" the one that serves.

Each form is first compared with its reference in float64 over short rows, gradients included; a form that is wrong is
not timed. "limit" is the larger of two times: least bytes over the memory's rate, and least FLOPs over that of matrix
products (for Mamba exponentials at 16 a cycle and multiprocessor). "predicted" is the sum of the two times for the
bytes and FLOPs of the form's own kernels. Times are medians of replays of a captured graph, on a CPU of plain calls.
Peak memory is that of one call, inputs included.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.cost import Cost
from ridgeline.perf.hardware import Hardware
from ridgeline.version import __version__
from ridgeline.worker.machine import hardware_of
from ridgeline_bench.results import Record, append, host_with, read
from ridgeline_bench.scripts.asked import asked
from ridgeline_bench.scripts.sequence_mixers import Form, Run, Setting, Work, forms
from ridgeline_bench.svg import Panel, picture

CHECKED = (96, 96)  # rows that are compared with the reference
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # of the largest number of each result
CLOCK = 1.755e9  # Hz, of a Hopper GPU under load
SAMPLES = 5
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "sequence-lengths.svg"
SERVED = {("attention", "prefill"), ("GLA", "inference"), ("Mamba", "selective scan"), ("Mamba-2", "SSD")}


class Figure(NamedTuple):
    """The seconds of a form at one length, their samples, its limit and prediction in seconds (0: unknown), and its
    peak bytes."""

    seconds: float
    samples: tuple[float, ...]
    limit: float
    predicted: float
    peak: int


def error_of(form: Form, setting: Setting) -> float:
    """Return the largest error of any result over the largest number of it; NaN if there is one."""
    run, reference = form.make(setting)
    worst = 0.0
    for ours, theirs in zip(run(), reference(), strict=True):
        difference = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-12)
        worst = max(worst, float(difference)) if difference.isfinite() else float("nan")
    return worst


def seconds_of(cost: Cost, rates: Hardware, dtype: torch.dtype) -> float:
    return max(cost.bytes / rates.bandwidth, cost.flops / rates.rate(str(dtype).removeprefix("torch.")))


def limits(work: Work, rates: Hardware | None, setting: Setting) -> tuple[float, float]:
    """Return (limit, prediction) in seconds; zeros if the device's rates are not known."""
    if rates is None:
        return 0.0, 0.0
    try:
        least = seconds_of(work.least, rates, setting.dtype)
        predicted = sum(seconds_of(part, rates, setting.dtype) for part in work.parts)
    except InvalidConfig:  # no rate of this dtype
        return 0.0, 0.0
    if work.exponentials and setting.device.type == "cuda":
        units = 16 * CLOCK * torch.cuda.get_device_properties(setting.device).multi_processor_count
        least, predicted = (max(x, work.exponentials / units) for x in (least, predicted))
    return least, predicted


def replay_of(run: Run, captured: bool) -> Callable[[], object]:
    """Return a function that runs the form once on a GPU: a captured graph, or the call itself if it cannot be
    captured."""
    if not captured:
        return run
    try:
        return captured_graph(run).replay
    except RuntimeError as failure:
        print(f"not captured: {failure}"[:300])
        torch.cuda.synchronize()
        return run


def captured_graph(run: Run) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def timed(run: Run, captured: bool, device: torch.device, budget: float = 0.04) -> tuple[tuple[float, ...], int]:
    """Return (seconds of a call, several times, and the peak bytes of one). A call of over a second is timed once."""
    run()
    if device.type == "cpu":
        return tuple(_host_seconds(run, 1) for _ in range(SAMPLES)), 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    first = _host_seconds(run, 1)
    peak = torch.cuda.max_memory_allocated(device)
    if first > 1.0:
        return (first,), peak
    replay = replay_of(run, captured)
    took = _host_seconds(replay, 2)
    times = max(1, round(budget / took))
    return tuple(_host_seconds(replay, times) for _ in range(SAMPLES)), peak


def _host_seconds(call: Callable[[], object], times: int) -> float:
    """Return the seconds of one of several calls behind one another, launches included."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        call()
    if gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / times


def measured(form: Form, setting: Setting, rates: Hardware | None) -> Figure:
    run, _ = form.make(setting)
    samples, peak = timed(run, form.captured, setting.device)
    return Figure(statistics.median(samples), samples, *limits(form.work(setting), rates, setting), peak)


def record_of(form: Form, setting: Setting, figure: Figure, error: float, commit: str) -> Record:
    length, ms = setting.rows[0], 1e3 * figure.seconds
    options: dict[str, Any] = {
        "length": length, "tokens": setting.tokens, "width": setting.width, "kernel": form.kernel,
        "predicted": 1e3 * figure.predicted, "tokens_per_s": setting.tokens / figure.seconds,
        "peak_bytes": figure.peak, "error": error,
    }  # fmt: skip
    direction = "forward+backward" if form.backward else "forward"
    return Record(
        engine=form.engine, version=__version__ if form.engine == "ridgeline" else torch.__version__,
        workload="sequence lengths", metric=f"{direction} {form.kernel} {length}", unit="ms", value=ms,
        samples=tuple(1e3 * x for x in figure.samples), limit=1e3 * figure.limit, model=form.mixer,
        dtype=str(setting.dtype).removeprefix("torch."), machine=host_with(setting.device, commit), options=options,
    )  # fmt: skip


def table_of(records: list[Record]) -> Table:
    table = Table()
    for name in ("form", "", "length", "ms", "tokens/s", "limit, ms", "of limit", "predicted, ms", "peak, GiB"):
        table.add_column(name, no_wrap=True)
    for record in records:
        given = record.options
        table.add_row(
            f"{record.model}, {given['kernel']}", record.metric.split()[0].replace("forward+backward", "f+b"),
            f"{given['length']:,}", f"{record.value:.3f}", f"{given['tokens_per_s']:,.0f}", f"{record.limit:.3f}",
            f"{100 * record.share:.1f} %", f"{given['predicted']:.3f}", f"{given['peak_bytes'] / 2**30:.2f}",
        )  # fmt: skip
    return table


@dataclass(frozen=True)
class Kept:
    """The measurements that are made: forms whose name contains `only`, begun within so many seconds; and where they
    are kept, as those of a commit if there is no checkout to ask."""

    only: str = ""
    seconds: float = 1e9
    output: Path | None = None
    commit: str = ""


def bench(
    tokens: int, lengths: list[int], width: int, device: torch.device, console: Console, kept: Kept
) -> list[Record]:
    """Check all forms, time those that are right at every length, and return a record of each. Forms and lengths for
    which no time is left are named and left out."""
    until = time.monotonic() + kept.seconds
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rates, records = hardware_of(device), list[Record]()
    for form in (form for form in forms(device) if kept.only in form.name):
        error = float("nan")
        try:
            error = error_of(form, Setting(CHECKED, width, dtype, device))
        except Exception as failure:
            console.print(f"{form.name}: {type(failure).__name__}: {failure}", markup=False)
        if not error < TOLERANCE[dtype]:
            console.print(f"{form.name}, {form.backward=}: error {error:.2g}; not timed", markup=False)
            continue
        console.print(f"{form.name}, {form.backward=}: error {error:.2g}", markup=False)
        for length in lengths:
            if time.monotonic() > until:
                console.print(f"{form.name} at {length}: no time left", markup=False)
                continue
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            setting = Setting((length,) * (tokens // length), width, dtype, device)
            try:
                figure = measured(form, setting, rates)
            except Exception as failure:
                console.print(f"{form.name} at {length}: {type(failure).__name__}: {failure}"[:600], markup=False)
                continue
            records.append(record_of(form, setting, figure, error, kept.commit))
            if kept.output is not None:
                append(kept.output, records[-1:])
    console.print(table_of(records))
    return records


def served(records: list[Record]) -> dict[str, dict[int, Record]]:
    """Return the forms that serve prompts, by length, of the largest batch that is recorded and the latest of these."""
    tokens = max(record.options["tokens"] for record in records)
    found: dict[str, dict[int, Record]] = {}
    for record in records:
        serves = (record.model, record.options["kernel"]) in SERVED and record.metric.startswith("forward ")
        if serves and record.options["tokens"] == tokens:
            found.setdefault(record.model, {})[record.options["length"]] = record
    return dict(sorted(found.items()))


def drawing(records: list[Record]) -> str:
    """Return the picture of tokens a second, and of peak bytes for each token, over the length."""
    panels = [
        Panel(title, "tokens of a sequence", {
            name: [(length, of(record)) for length, record in sorted(by_length.items())]
            for name, by_length in served(records).items()
        }, log_y=True)
        for title, of in (("tokens/s, forward", _rate), ("peak bytes of a call for each token", _bytes))
    ]  # fmt: skip
    return picture(panels, f"Mixers that put out {records[0].options['width']:,} channels, {records[0].machine.gpu}")


def _rate(record: Record) -> float:
    return float(record.options["tokens_per_s"])


def _bytes(record: Record) -> float:
    return float(record.options["peak_bytes"] / record.options["tokens"])


def page_table(records: list[Record]) -> str:
    """Return the table of the page in Markdown: million tokens/s and KiB for each token. The fastest is bold."""
    found = served(records)
    lengths = sorted({length for by_length in found.values() for length in by_length})
    rows = [f"| length | {' | '.join(f'{name}, M tokens/s | KiB a token' for name in found)} |"]
    rows.append("|--:|" + "--:|" * 2 * len(found))
    for length in lengths:
        best = max(_rate(each[length]) for each in found.values() if length in each)
        cells = []
        for by_length in found.values():
            if length not in by_length:
                cells += ["", ""]
                continue
            rate, size = _rate(by_length[length]), _bytes(by_length[length])
            cells += [f"**{rate / 1e6:.1f}**" if rate == best else f"{rate / 1e6:.1f}", f"{size / 1024:.1f}"]
        rows.append(f"| {length:,} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    a = asked(
        __doc__, tokens=(16_384, "of a batch"), lengths=[512, 1024, 2048, 4096, 8192, 16_384],
        width=(2048, "channels that a mixer puts out"), device="cuda" if torch.cuda.is_available() else "cpu",
        only=("", "forms whose name contains this"), seconds=(115.0, "begin no measurement after so long"),
        commit=("", "of this code, if there is no checkout to ask"), output=(Path, "file to add result lines to"),
        quick=(False, "few tokens and channels"), draw=(Path, "draw this file's lines"),
    )  # fmt: skip
    if a.quick:
        torch.set_num_threads(1)  # more of them wait for each other longer than they work
        a.tokens, a.lengths, a.width, a.seconds = 256, [64, 128], 128, 5.0
    if a.draw:
        records = read([a.draw])
        PICTURE.write_text(drawing(records))
        print(page_table(records))
        return
    kept = Kept(a.only, a.seconds, a.output, a.commit)
    bench(a.tokens, a.lengths, a.width, torch.device(a.device), Console(width=120), kept)


if __name__ == "__main__":
    main()

"""`ridgeline calibrate`: measure the rates of this machine, so that limits mean something here."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import typer
from rich.console import Console
from rich.table import Table


def calibrate(
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    as_json: bool = typer.Option(False, "--json", help="JSON on standard output: every measurement, and the record."),
    quick: bool = typer.Option(False, "--quick", help="Fewer shapes and repetitions: seconds, and less exact."),
) -> None:
    """Measure memory, matrix products, launches and the bus, and keep the rates for the cost model."""
    from ridgeline.defaults import choose_device  # torch takes seconds to import; --help need not wait
    from ridgeline.perf.calibration import save
    from ridgeline.progress import LoadingBar
    from ridgeline.worker.machine import datasheet
    from ridgeline_bench.machine.calibrate import as_calibration, measure

    chosen = choose_device(device)
    with LoadingBar() as bar:
        measured = list(measure(chosen, quick=quick, progress=bar))
    values = {probe.name: value for probe, value in measured}
    record = as_calibration(chosen, values)
    path = save(record)
    if as_json:
        print(json.dumps({"measured": values, "calibration": asdict(record), "path": str(path)}))
        return
    table = Table("quantity", "measured", "datasheet", "share", title=record.device)
    for probe, value in measured:
        sheet = datasheet(chosen, probe.name)
        stated = (human(sheet, probe.unit), f"{100 * value / sheet:.0f} %") if sheet else ("", "")
        table.add_row(probe.name, human(value, probe.unit), *stated)
    Console().print(table)
    print(f"kept in {path}", file=sys.stderr)


def human(value: float, unit: str) -> str:
    """Return the value with the prefix that suits: 4.42 TB/s, 0.88 µs."""
    if unit == "s":
        return f"{value * 1e6:.2f} µs"
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:.2f} {prefix}{unit}"
    return f"{value:.2f} {unit}"

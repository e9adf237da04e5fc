"""`ridgeline explain`: show a step op by op, with the limit of each. The model's weights are not needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ridgeline.cli.sizes import basis, print_json, read_config, read_hardware, read_links, read_precision, short
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.config import DTYPES
from ridgeline.core.settings.speculation import MOST_DRAFTS
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.division import Divided, Division
from ridgeline.perf.explain import ExplainRow, explain_table, reached_experts, step_shape, with_reached
from ridgeline.perf.roofline import Roofline
from ridgeline.perf.speculation import SHARES, Verifying, verifying


def explain(
    model: str = typer.Argument(..., help="Folder, config.json or hub id."),
    gpu: str = typer.Option(..., "--gpu", help="Device, such as H200."),
    batch: int = typer.Option(1, help="Requests that decode one token each."),
    context: int = typer.Option(1024, help="Cached tokens of each of them, the new one included."),
    prefill: int = typer.Option(0, help="Tokens of a prompt that runs in the same step."),
    reached: float | None = typer.Option(
        None,
        min=0,
        help="Experts of a layer that have tokens, if measured (default: as many as uniform routing reaches).",
    ),
    tp: int = typer.Option(1, help="Devices that share each layer: shows the part of one of them."),
    ep: int = typer.Option(1, help="Devices that divide the experts, as in `plan`."),
    drafts: int = typer.Option(
        0, min=0, max=MOST_DRAFTS, help="Show instead when it pays to verify so many drafts a row, by the batch."
    ),
    dtype: str = typer.Option("auto", help="auto, float32, bfloat16, float16, fp8, int8 or int4."),
    kv_dtype: str = typer.Option(None, help="Type of the KV cache (default: the activations')."),
    datasheet: bool = typer.Option(False, "--datasheet", help="Use the maker's rates even if measured ones are known."),
    measure: bool = typer.Option(False, "--measure", help="Time every op at its shape on this machine."),
    device: str = typer.Option("auto", help="Device to measure on: auto, cpu, cuda or cuda:N."),
    as_json: bool = typer.Option(False, "--json", help="JSON on standard output."),
) -> None:
    """Explain a step's limit: bytes, FLOPs and time of every op. For a prefill alone give --batch 0."""
    config, hardware = read_config(model), read_hardware(gpu, datasheet)
    resolved = read_precision(dtype, model, config)
    if drafts:
        if measure or tp > 1 or ep > 1 or prefill or batch != 1 or reached is not None:
            raise InvalidConfig("--drafts compares steps of one device by their limits; leave the other options out.")
        limits = Roofline(config.spec, hardware, resolved, kv_dtype)
        found = verifying(limits, context, sorted({1, -(-drafts // 2), drafts}))
        if as_json:
            print_json({"hardware": hardware.name, "rates": hardware.source, "verifying": [v._asdict() for v in found]})
            return
        print(basis(hardware, resolved))
        Console().print(verifying_table(found))
        return
    shape = with_reached(config.spec, step_shape(batch, context, prefill), reached)
    division, links = Division(tp=tp, ep=ep), read_links(hardware, datasheet)
    divided = Divided(config.spec, division, hardware, links, resolved, kv_dtype or resolved.other_rate)
    if measure and division.devices > 1:
        raise InvalidConfig("--measure times the ops of one device; leave --tp and --ep out.")
    measured = _measure(config.spec, shape, device, resolved.name) if measure else None
    (stage,) = divided.stages
    sent = [*divided.sums(stage, shape), *divided.exchanges(stage.model, shape)]
    rows = explain_table(
        divided.part,
        shape,
        hardware,
        measured,
        dtype=resolved,
        kv_dtype=kv_dtype,
        collectives=sent,
        groups=division.groups,
    )
    if as_json:
        told = {"hardware": hardware.name, "rates": hardware.source, "links": links.source, "dtype": resolved.name}
        print_json({**told, "ops": _records(rows)})
        return
    print(basis(hardware, resolved))
    if division.devices > 1:
        print(f"one of {division.devices} devices ({division}); links {links.source}")
    for count, of in reached_experts(config.spec, shape):
        print(f"{count:.1f} of {of} experts in each layer have tokens ({'measured' if reached else 'uniform routing'})")
    Console().print(table(rows))


def verifying_table(found: Sequence[Verifying]) -> Table:
    """Return for a terminal what verifying drafts costs and brings."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("batch", "drafts", "step", "pays from", *(f"at {share:g}" for share in SHARES)):
        made.add_column(name, justify="right", no_wrap=True)
    for each in found:
        pays = "never" if each.break_even is None else f"{each.break_even:.2f}"
        brings = (f"{speedup:.2f} x" for speedup in each.speedups)
        made.add_row(str(each.batch), str(each.drafts), f"{each.cost:.2f} x", pays, *brings)
    return made


def _measure(spec: ModelSpec, shape: StepShape, device: str, dtype: str) -> dict[str, float]:
    """Return the seconds of one call of every op. Raise InvalidConfig for a dtype that the ops do not run in."""
    if dtype not in DTYPES:
        raise InvalidConfig(
            f"--measure runs the ops, which support {', '.join(DTYPES)}; {dtype} has only limits so far."
        )
    from ridgeline.defaults import choose_device  # torch takes seconds to import
    from ridgeline_bench.profile.ops import measure_step_ops

    return measure_step_ops(spec, shape, choose_device(device), dtype)


def table(rows: Sequence[ExplainRow]) -> Table:
    """Return the rows for a terminal. Measured columns appear if something was measured."""
    with_times = any(row.measured is not None for row in rows)
    found = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    found.add_column("op", no_wrap=True)
    for name in ("calls", "bytes", "FLOPs", "FLOP/B", "bound", "µs", "share"):
        found.add_column(name, justify="right", no_wrap=True)
    for name in ("measured", "of limit") if with_times else ():
        found.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.name == "total":
            found.add_section()
        found.add_row(*_cells(row), *(_measured_cells(row) if with_times else ()))
    return found


def _cells(row: ExplainRow) -> list[str]:
    return [
        row.name,
        str(row.count),
        short(row.bytes, "B"),
        short(row.flops),
        f"{row.intensity:.1f}",
        row.bound,
        f"{row.limit * 1e6:.1f}",
        f"{row.share:.1%}",
    ]


def _measured_cells(row: ExplainRow) -> list[str]:
    if row.measured is None or row.attained is None:
        return ["", ""]
    return [f"{row.measured * 1e6:.1f}", f"{row.attained:.0%}"]


def _records(rows: Sequence[ExplainRow]) -> list[dict[str, object]]:
    return [asdict(row) | {"intensity": row.intensity} for row in rows]

"""`ridgeline explain`: show a step op by op, with the limit of each. The model's weights are not needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ridgeline.cli.options import with_records
from ridgeline.cli.rates import Gpu, Json, MeasureFlags, Model, RateFlags, columns
from ridgeline.cli.sizes import basis, print_json, read_config, read_hardware, read_links, read_precision, short
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.model import DTYPES
from ridgeline.core.settings.speculation import MOST_DRAFTS
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.bus import bus_rate
from ridgeline.perf.division import Divided, Division
from ridgeline.perf.explain import ExplainRow, Ran, explain_table, reached_experts, step_shape, with_reached
from ridgeline.perf.hardware import Hardware
from ridgeline.perf.roofline import Roofline
from ridgeline.perf.speculation import SHARES, Verifying, verifying


@dataclass(frozen=True)
class StepFlags:
    """A step, and the devices that run it."""

    batch: Annotated[int, typer.Option(help="Requests that decode one token each.")] = 1
    context: Annotated[int, typer.Option(help="Cached tokens of each of them, the new one included.")] = 1024
    prefill: Annotated[int, typer.Option(help="Tokens of a prompt that runs in the same step.")] = 0
    patches: Annotated[
        str, typer.Option(help="Patches of each view of a picture that a tower sees in the step, such as 1024,256.")
    ] = ""
    reached: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Experts of a layer that have tokens, if measured (default: as many as uniform routing reaches).",
        ),
    ] = None
    loaded: Annotated[
        int, typer.Option(min=0, help="Cached tokens that come from the host's memory beside the step.")
    ] = 0
    tp: Annotated[int, typer.Option(help="Devices that share each layer: shows the part of one of them.")] = 1
    ep: Annotated[int, typer.Option(help="Devices that divide the experts, as in `plan`.")] = 1
    eager: Annotated[bool, typer.Option("--eager", help="Judge a step without CUDA graphs, launched op by op.")] = False

    @property
    def of_drafts(self) -> bool:
        """True if nothing is set that a comparison of drafts has no use for."""
        return replace(self, context=1024) == StepFlags()


def _shape(model: ModelSpec, step: StepFlags) -> StepShape:
    views = views_of(step.patches)
    if views and model.tower is None:
        raise InvalidConfig("--patches counts what a tower sees of pictures, and this model has none; leave it out.")
    encodes = model.encoder is not None
    return step_shape(step.batch, step.context, step.prefill, encodes=encodes, views=views)


def views_of(text: str) -> list[int]:
    """Return the numbers of --patches. Raise InvalidConfig for others."""
    parts = text.split(",") if text else []
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise InvalidConfig(f"--patches must be numbers from 1 on with commas between, got {text!r}.")
    return [int(part) for part in parts]


@with_records
def explain(
    model: Model,
    gpu: Gpu,
    *,
    step: StepFlags,
    drafts: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_DRAFTS, help="Show instead when it pays to verify so many drafts a row, by the batch."
        ),
    ] = 0,
    rates: RateFlags,
    beside: MeasureFlags,
    as_json: Json = False,
) -> None:
    """Explain a step's limit: bytes, FLOPs and time of every op. For a prefill alone give --batch 0."""
    config, hardware = read_config(model), read_hardware(gpu, rates.datasheet)
    resolved, kv_dtype = read_precision(rates.dtype, model, config), rates.kv_dtype
    if drafts:
        if beside.measure or not step.of_drafts:
            raise InvalidConfig("--drafts compares steps of one device by their limits; leave the other options out.")
        limits = Roofline(config.spec, hardware, resolved, kv_dtype)
        found = verifying(limits, step.context, sorted({1, -(-drafts // 2), drafts}))
        if as_json:
            print_json({"hardware": hardware.name, "rates": hardware.source, "verifying": [v._asdict() for v in found]})
            return
        print(basis(hardware, resolved))
        Console().print(verifying_table(found))
        return
    shape = with_reached(config.spec, _shape(config.spec, step), step.reached)
    division, links = Division(tp=step.tp, ep=step.ep), read_links(hardware, rates.datasheet)
    divided = Divided(config.spec, division, hardware, links, resolved, kv_dtype or resolved.other_rate)
    if beside.measure and division.devices > 1:
        raise InvalidConfig("--measure times the ops of one device; leave --tp and --ep out.")
    measured = _measure(config.spec, shape, beside.device, resolved.name) if beside.measure else None
    (stage,) = divided.stages
    sent = [*divided.sums(stage, shape), *divided.exchanges(stage.model, shape)]
    rows = explain_table(
        divided.part,
        shape,
        hardware,
        Ran(measured, step.eager),
        dtype=resolved,
        kv_dtype=kv_dtype,
        collectives=sent,
        groups=division.groups,
    )
    moved = step.loaded * divided.kv_per_token(0)
    if as_json:
        told = {"hardware": hardware.name, "rates": hardware.source, "links": links.source, "dtype": resolved.name}
        loads = {"bytes": moved, "seconds": moved / bus_rate(hardware)}
        print_json({**told, **({"loads": loads} if step.loaded else {}), "ops": _records(rows)})
        return
    print(basis(hardware, resolved))
    if division.devices > 1:
        print(f"one of {division.devices} devices ({division}); links {links.source}")
    how = "measured" if step.reached else "uniform routing"
    for count, of in reached_experts(config.spec, shape):
        print(f"{count:.1f} of {of} experts in each layer have tokens ({how})")
    Console().print(table(rows))
    print(_floor(hardware, rows, eager=step.eager or hardware.eager))
    if step.loaded:
        print(
            f"{step.loaded:,} cached tokens come from the host's memory: {short(moved, 'B')} over the bus in "
            f"{1e3 * moved / bus_rate(hardware):.3g} ms, beside the step"
        )


def _floor(hardware: Hardware, rows: Sequence[ExplainRow], *, eager: bool) -> str:
    """Return a sentence on the calls that are too short for the roofs."""
    name, least = hardware.floors.of(eager=eager)
    calls = sum(row.count for row in rows[:-1] if row.bound == name)
    floor = f"{'a launch by the host' if name == 'launch' else 'the shortest kernel'} ({1e6 * least:.2f} µs)"
    return f"{calls} of {rows[-1].count} calls are {name}-bound: their work takes less than {floor}"


def verifying_table(found: Sequence[Verifying]) -> Table:
    """Return for a terminal what verifying drafts costs and brings."""
    made = columns((), ("batch", "drafts", "step", "pays from", *(f"at {share:g}" for share in SHARES)))
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
    times = ("measured", "of limit") if with_times else ()
    found = columns(("op",), ("calls", "bytes", "FLOPs", "FLOP/B", "bound", "µs", "share", *times))
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

"""`ridgeline crossover`: compare how models' steps and memory grow with the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ridgeline.cli.options import with_records
from ridgeline.cli.rates import Gpu, Json, MeasureFlags, RateFlags, columns, figure, logarithmic, save
from ridgeline.cli.sizes import basis, print_json, read_config, read_hardware, read_precision, short
from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.crossover import CONTEXTS, LONGEST, Curve, Point, crossings

Measured = Mapping[int, tuple[float, float]]  # context → seconds of a step, and of a chunk


@dataclass(frozen=True)
class GrowthFlags:
    """The steps that are compared, as contexts grow."""

    batch: Annotated[int, typer.Option(help="Requests that decode together.")] = 1
    contexts: Annotated[str, typer.Option(help="Contexts to show, such as 1k,32k,1M (default: 1k to 1M).")] = ""
    chunk: Annotated[int, typer.Option(help="Tokens of a prompt that run in one step.")] = 8192
    utilization: Annotated[float, typer.Option(help="Share of the device's memory to use.")] = 0.9


@dataclass(frozen=True)
class StepsFlags(MeasureFlags):
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Also run such steps on this machine, with random weights, up to what memory holds."
        ),
    ] = False


@with_records
def crossover(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Folders, config.json files or hub ids.")],
    gpu: Gpu,
    *,
    growth: GrowthFlags,
    rates: RateFlags,
    beside: StepsFlags,
    plot: Annotated[
        Path | None, typer.Option(help="Draw step times and memory over the context into this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare attention, hybrids and models of constant state: milliseconds and bytes as the context grows."""
    shown, hardware = read_contexts(growth.contexts), read_hardware(gpu, rates.datasheet)
    batch, chunk, utilization = growth.batch, growth.chunk, growth.utilization
    if not 0 < utilization <= 1:
        raise InvalidConfig(f"--utilization must be above 0 and at most 1, got {utilization}.")
    curves = []
    for name, model in zip(names_of(models), models, strict=True):
        config = read_config(model)
        exact = read_precision(rates.dtype, model, config)
        curves.append(
            Curve(
                name=name,
                model=config.spec,
                hardware=hardware,
                precision=exact,
                kv_dtype=rates.kv_dtype or exact.other_rate,
                batch=batch,
                chunk=chunk,
                utilization=utilization,
            )
        )
    measured = [
        _measure(curve, model, shown, beside.device)
        for curve, model in zip(curves, models, strict=True)
        if beside.measure
    ]
    points = [[curve.at(context) for context in shown] for curve in curves]
    if as_json:
        print_json(_record(curves, points, measured))
    else:
        print(basis(hardware, curves[0].precision))
        print(f"a step of {batch} request{'s' * (batch > 1)}; a chunk of {chunk:,} tokens that ends at the context")
        Console().print(_table(curves, points, measured))
        for sentence in sentences(curves):
            print(sentence)
    if plot is not None:
        draw(curves, points, measured, plot)


def read_contexts(text: str) -> Sequence[int]:
    """Return the contexts in tokens of "1k,32k,1M". Raise InvalidConfig."""
    factors, found = {"k": 1 << 10, "m": 1 << 20}, []
    for part in filter(None, text.split(",")):
        digits, factor = (part[:-1], factors[part[-1].lower()]) if part[-1].lower() in factors else (part, 1)
        if not (digits.isdecimal() and 1 <= int(digits[:12]) * factor <= LONGEST):
            raise InvalidConfig(f"--contexts has {part!r}; give tokens up to 16M, such as 1k,32k,1M.")
        found.append(int(digits) * factor)
    return sorted(set(found)) or CONTEXTS


def names_of(models: Sequence[str]) -> list[str]:
    """Return a short name for each model: the end of its path, or all of it where ends are alike."""
    paths = [Path(model) for model in models]
    short_names = [
        path.parent.name if path.name == "config.json" else path.name.removesuffix(".json") for path in paths
    ]
    return [name if short_names.count(name) == 1 else model for name, model in zip(short_names, models, strict=True)]


def sentences(curves: Sequence[Curve]) -> list[str]:
    """Say from where on which model needs less time or memory than another."""
    verbs = {"step": "a step of {} takes less time than one of {}", "held": "a request of {} holds less than one of {}"}
    return [
        f"from {at:,} tokens on {verbs[what].format(other.name, one.name)}"
        for one, other, what, at in sorted(crossings(curves), key=lambda found: (found[2], found[3]))
    ]


def _measure(curve: Curve, model: str, contexts: Sequence[int], device: str) -> Measured:
    from ridgeline_bench.profile.contexts import measure_contexts  # torch takes seconds to import

    return measure_contexts(curve, model, contexts, device)


def _table(curves: Sequence[Curve], points: Sequence[Sequence[Point]], measured: Sequence[Measured]) -> Table:
    names = ["step ms", *(["measured"] if measured else []), "read", "chunk ms", *(["measured"] if measured else [])]
    table = columns(("context", "model"), (*names, "a request holds", "room for"))
    table.columns[0].justify = "right"
    for row in zip(*points, strict=True):
        for index, (curve, point) in enumerate(zip(curves, row, strict=True)):
            seen = measured[index].get(point.context) if measured else None
            extra = [[_ms(seen[i]) if seen else "-"] if measured else [] for i in (0, 1)]
            table.add_row(
                f"{point.context:,}" if index == 0 else "",
                curve.name,
                *(_ms(point.step), *extra[0], short(point.step_bytes, "B")),
                *(_ms(point.chunk), *extra[1], short(point.held, "B"), f"{point.requests:,}"),
            )
        if len(curves) > 1:
            table.add_section()
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _record(
    curves: Sequence[Curve], points: Sequence[Sequence[Point]], measured: Sequence[Measured]
) -> dict[str, object]:
    hardware = curves[0].hardware
    return {
        "hardware": hardware.name,
        "rates": hardware.source,
        "batch": curves[0].batch,
        "chunk": curves[0].chunk,
        "models": [
            {
                "name": curve.name,
                "dtype": curve.precision.name,
                "kv_dtype": curve.kv_dtype,
                "points": [
                    asdict(point)
                    | (
                        {"measured": dict(zip(("step", "chunk"), seen, strict=True))}
                        if measured and (seen := measured[index].get(point.context))
                        else {}
                    )
                    for point in points[index]
                ],
            }
            for index, curve in enumerate(curves)
        ],
        "crossings": [
            {"from": at, "what": what, "less": other.name, "than": one.name}
            for one, other, what, at in crossings(curves)
        ],
    }


def draw(curves: Sequence[Curve], points: Sequence[Sequence[Point]], measured: Sequence[Measured], path: Path) -> None:
    """Draw time and memory over the context, one line per model and a cross per measurement. Raise InvalidConfig."""
    picture = figure((10, 4.5))
    left, right = picture.subplots(1, 2)
    for index, (curve, line) in enumerate(zip(curves, points, strict=True)):
        x = [point.context for point in line]
        [drawn] = left.plot(x, [1e3 * point.step for point in line], label=curve.name)
        right.plot(x, [point.held / 1e9 for point in line], label=curve.name, color=drawn.get_color())
        if measured and measured[index]:
            seen = measured[index]
            left.plot(list(seen), [1e3 * step for step, _ in seen.values()], "x", color=drawn.get_color())
    left.set(title=f"a step of {curves[0].batch} decoding, least ms", xlabel="context, tokens")
    right.set(title="a request holds, GB", xlabel="context, tokens")
    for axes in (left, right):
        logarithmic(axes)
    left.legend()
    save(picture, path)

"""Tables beside a plan: chunks of prompts, static batches, stacked techniques, another model on the same devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from ridgeline.cli.rates import columns
from ridgeline.cli.sizes import read_config, short
from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.batching import batched, longest_answer, static_room
from ridgeline.perf.beside import beside, with_model
from ridgeline.perf.planner import Plan
from ridgeline.perf.stack import parsed, stacked

BATCHES = (1, 8, 64, 512)


@dataclass(frozen=True)
class StudyFlags:
    """Further questions about a deployment."""

    chunks: Annotated[
        str, typer.Option(help="Show a prompt's latency by chunk, beside the best batch: 256,512,2048.")
    ] = ""
    static: Annotated[
        bool, typer.Option("--static", help="Show what static batches reach, for answers of 1 to 2 x --output tokens.")
    ] = False
    stack: Annotated[
        list[str] | None,
        typer.Option(
            help="A technique, as NAME:key=value,…; repeat it: alone and upon those before. Keys: bits, kept, form "
            "(dense, bitmap, 2:4), drafts, tokens, head, passes, points."
        ),
    ] = None
    beside: Annotated[str, typer.Option(help="Show this model beside, on the same devices.")] = ""


class Study(NamedTuple):
    """One answer. records: for machines."""

    name: str
    title: str
    records: list[dict[str, Any]]
    table: Table


def studies(plan: Plan, flags: StudyFlags) -> Iterator[Study]:
    """Yield the answers to what was asked."""
    if flags.chunks:
        yield _chunks(plan, flags.chunks)
    if flags.static:
        yield _static(plan)
    if flags.stack:
        yield _stack(plan, flags.stack)
    if flags.beside:
        yield _beside(plan, flags.beside)


def _chunks(plan: Plan, text: str) -> Study:
    batch = plan.best.batch if plan.best else 1
    found = [plan.chunked(size, batch) for size in _sizes(text)]
    table = columns((), ("chunk", "steps", "TTFT ms", "longest step ms", "decode step ms"))
    for each in found:
        times = (f"{1e3 * seconds:.2f}" for seconds in (each.ttft, each.longest, each.alone))
        table.add_row(f"{each.chunk:,}", str(each.steps), *times)
    title = f"a prompt of {plan.deployment.input:,} tokens in chunks, beside {batch} decoding requests"
    return Study("chunks", title, [each._asdict() | {"batch": batch} for each in found], table)


def _sizes(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError as error:
        raise InvalidConfig(f"--chunks is {text!r}; write whole numbers, such as 256,512,2048.") from error


def _static(plan: Plan) -> Study:
    found = batched(plan)
    table = columns((), ("batch", "longest answer", "useful steps", "static tok/s", "continuous tok/s", "gain"))
    for each in found:
        rates = (f"{rate:,.0f}" for rate in (each.static, each.continuous))
        table.add_row(str(each.batch), f"{each.steps:.0f}", f"{each.useful:.0%}", *rates, f"{each.gain:.2f} x")
    title = (
        f"answers of 1 to {longest_answer(plan)} tokens: a static batch has room for {static_room(plan)} requests, a "
        f"continuous one for {plan.max_requests}"
    )
    return Study("static", title, [each._asdict() | {"gain": each.gain} for each in found], table)


def _stack(plan: Plan, techniques: list[str]) -> Study:
    found = stacked(plan.deployment, [parsed(each) for each in techniques], (1, 64))
    table = columns(("technique",), ("batch", "bits", "alone", "gain", "stacked", "more", "a point"))
    for each in found:
        worth = "no cost" if each.per_point is None else f"{each.per_point:,.0f}"
        alone = (f"{each.alone:,.0f}", f"{each.gain:.2f} x")
        both = (f"{each.stacked:,.0f}", f"{each.more:.2f} x", worth)
        table.add_row(each.name, str(each.batch), f"{each.bits:.3g}", *alone, *both)
    context = plan.deployment.decoding_context
    title = f"output tokens/s with each technique alone, and upon those before it, at {context:,} cached tokens"
    return Study("stack", title, [each._asdict() for each in found], table)


def _beside(plan: Plan, other: str) -> Study:
    d = plan.deployment
    names = ("this model", other)
    found = [beside(each, BATCHES) for each in (d, with_model(d, read_config(other).spec))]
    table = columns(("",), names)
    one, two = found
    rows = [
        ("devices", one.division, two.division),
        *((name, short(a), short(b)) for name, a, b in (
            ("parameters", one.parameters, two.parameters),
            ("of which a token uses", one.used, two.used),
            ("FLOPs a token", one.flops, two.flops),
        )),
        *((name, short(a, "B"), short(b, "B")) for name, a, b in (
            ("weights on a device", one.weights, two.weights),
            ("KV a token, on a device", one.kv_per_token, two.kv_per_token),
            ("sent by a device for a token", one.sent, two.sent),
            *((f"read in a step of {n}", a, b) for n, a, b in zip(BATCHES, one.read, two.read, strict=True)),
        )),
        *(
            (f"tokens/s of {n} requests", *("" if rate is None else f"{rate:,.0f}" for rate in pair))
            for n, *pair in zip(BATCHES, one.rates, two.rates, strict=True)
        ),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    records = [{"model": name} | each._asdict() for name, each in zip(names, found, strict=True)]
    return Study("beside", f"{other} beside this model", records, table)

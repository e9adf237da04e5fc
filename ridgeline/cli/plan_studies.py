"""Tables beside a plan: chunks, static batches, stacked techniques, other models beside and together, spot devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from ridgeline.cli.rates import columns
from ridgeline.cli.sizes import read_config, short
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.speculation import MOST_DRAFTS
from ridgeline.perf.batching import batched, longest_answer, static_room
from ridgeline.perf.beside import beside, with_model
from ridgeline.perf.packing import items_of, packed, shares
from ridgeline.perf.planner import Plan
from ridgeline.perf.spot import SpotTerms, compared
from ridgeline.perf.stack import parsed, stacked

BATCHES = (1, 8, 64, 512)


@dataclass(frozen=True)
class StudyFlags:
    """Further questions about a deployment."""

    drafts: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_DRAFTS, help="Show as well when it pays to verify so many drafts a row, at these batches."
        ),
    ] = 0
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
    pack: Annotated[
        list[str] | None,
        typer.Option(help="A further model, as MODEL or MODEL*COPIES; repeat it: on how few devices all of them fit."),
    ] = None
    pack_requests: Annotated[int, typer.Option(min=1, help="Requests for which each of these has room.")] = 8
    spot_price: Annotated[float | None, typer.Option(help="Price of a spot device for an hour: beside the other.")] = (
        None
    )
    spot_interruptions: Annotated[float, typer.Option(help="Interruptions of one spot device in an hour.")] = 0.05
    spot_lost: Annotated[float, typer.Option(help="Seconds from an interruption to serving again.")] = 300.0
    spot_notice: Annotated[float, typer.Option(help="Seconds between the notice and the end.")] = 30.0


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
    if flags.pack:
        yield _pack(plan, flags.pack, flags.pack_requests)
    if flags.spot_price is not None:
        lost = (flags.spot_interruptions, flags.spot_lost, flags.spot_notice)
        yield _spot(plan, SpotTerms(price=flags.spot_price, interruptions=lost[0], lost=lost[1], notice=lost[2]))


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


def _pack(plan: Plan, texts: list[str], requests: int) -> Study:
    d = plan.deployment
    wanted = [("this model", d, 1)]
    for text in texts:
        name, _, copies = text.partition("*")
        if copies and not copies.isdecimal():
            raise InvalidConfig(f"--pack is {text!r}; write MODEL or MODEL*COPIES.")
        wanted.append((name, replace(d, model=read_config(name).spec), int(copies or 1)))
    items, size = items_of(wanted, requests), d.hardware.memory * d.utilization
    found = packed([item.need for item in items], size)
    table, records = columns(("device", "model"), ("needs", "--gpu-memory-utilization")), []
    for device, numbers in enumerate(found.devices):
        needs = [items[number].need for number in numbers]
        for number, share in zip(numbers, shares(needs, size, d.hardware.memory), strict=True):
            table.add_row(str(device), items[number].name, short(items[number].need, "B"), f"{share:.3f}")
            records.append({"device": device, "model": items[number].name, "bytes": items[number].need, "share": share})
    best = "no packing needs fewer" if found.proven else f"at least {found.fewest} are needed"
    title = f"{len(items)} models with room for {requests} requests each on {len(found.devices)} x {d.hardware.name}"
    title = f"{title}; {best}"
    return Study("pack", title, records, table)


def _spot(plan: Plan, terms: SpotTerms) -> Study:
    d, best = plan.deployment, plan.best
    if d.price_per_hour is None or best is None:
        raise InvalidConfig("--spot-price is compared with --price-per-hour, for a batch that fits; give both.")
    request = best.ttft + (d.output - 1) * best.itl
    found = compared(
        terms, price=d.price_per_hour, devices=d.devices, tokens_per_second=best.tokens_per_second, request=request
    )
    table = columns(("",), ("a device, an hour", "serving", "per million", "saves"))
    table.add_row("on demand", f"{d.price_per_hour:g}", "100.00%", f"{found.on_demand:.3g}", "")
    table.add_row("spot", f"{terms.price:g}", f"{found.serving:.2%}", f"{found.cost:.3g}", f"{found.saving:.0%}")
    title = (
        f"spot: {terms.interruptions:g} interruptions of a device in an hour; it is cheaper below "
        f"{found.pays_below:.3g}. A request takes {request:.1f} s, and the notice is {terms.notice:g} s"
    )
    return Study("spot", title, [found._asdict() | {"saving": found.saving}], table)

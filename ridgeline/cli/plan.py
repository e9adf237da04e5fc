"""`ridgeline plan`: predict a deployment from the model's config alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ridgeline.cli.explain import verifying_table, views_of
from ridgeline.cli.options import with_records
from ridgeline.cli.plan_divisions import show_divisions
from ridgeline.cli.plan_host_layers import show_host_layers
from ridgeline.cli.plan_studies import StudyFlags, studies
from ridgeline.cli.plan_trace import show_settings
from ridgeline.cli.rates import Json, Model, RateFlags, figure, logarithmic, save
from ridgeline.cli.sizes import basis, print_json, read_config, read_hardware, read_links, read_precision, short
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.cache import DEFAULT_BLOCK_SIZE
from ridgeline.perf.bus import TierRoom
from ridgeline.perf.footprint import active_parameters, parameters
from ridgeline.perf.planner import Deployment, Plan, Point
from ridgeline.perf.streamed import ExpertsBelow, WeightsBelow

MUCH_EMPTY = 0.04  # of the room in running requests' blocks


@dataclass(frozen=True)
class DivisionFlags:
    """The devices that one model is divided over."""

    gpus: Annotated[
        int, typer.Option(min=0, help="So many devices: compare all ways to divide the model over them.")
    ] = 0
    tp: Annotated[int, typer.Option(help="Devices that share each layer (tensor parallelism).")] = 1
    pp: Annotated[int, typer.Option(help="Stages of layers (pipeline parallelism).")] = 1
    ep: Annotated[
        int,
        typer.Option(
            help="Devices that divide the experts: as many as --tp, or a multiple that brings requests of its own."
        ),
    ] = 1
    cp: Annotated[int, typer.Option(help="Devices that divide the cache and long prompts (context parallelism).")] = 1
    host_layers: Annotated[
        str, typer.Option(help="Compare rates with so many of the first layers on this machine's CPU: 0,8,16.")
    ] = ""

    @property
    def one(self) -> bool:
        """True for a single device."""
        return replace(self, gpus=0) == DivisionFlags()


@dataclass(frozen=True)
class DemandFlags:
    """The requests, and what is asked of their times."""

    input_tokens: Annotated[int, typer.Option("--input", help="Tokens of a prompt.")] = 1024
    output_tokens: Annotated[int, typer.Option("--output", help="Tokens of an answer.")] = 256
    patches: Annotated[
        str,
        typer.Option(help="Patches of each view of a request's pictures, such as 1024,576; --input counts vectors."),
    ] = ""
    block_size: Annotated[int, typer.Option(help="Tokens per KV cache block.")] = DEFAULT_BLOCK_SIZE["cuda"]
    slo_ttft: Annotated[float | None, typer.Option(help="Longest time to the first token, in ms.")] = None
    slo_itl: Annotated[float | None, typer.Option(help="Longest mean time between tokens, in ms.")] = None
    price_per_hour: Annotated[float | None, typer.Option(help="Price of one device for an hour, in any currency.")] = (
        None
    )
    utilization: Annotated[float, typer.Option(help="Share of the device's memory to use.")] = 0.9
    trace: Annotated[
        Path | None, typer.Option(help="Find the flags to start with for this file of requests, by simulation.")
    ] = None
    slo: Annotated[str, typer.Option(help="With --trace: the bounds to keep, ttft=500,itl=50 in ms.")] = ""
    kv_offloading_size: Annotated[
        float, typer.Option(help="GiB of the host's memory for cache blocks that the devices have no room for.")
    ] = 0.0
    cpu_offload_gb: Annotated[
        float, typer.Option(help="GiB of layers that wait in the host's memory and come to the device in every step.")
    ] = 0.0
    kv_kept: Annotated[float, typer.Option(help="Share of a request's tokens in the cache, if others are evicted.")] = (
        1.0
    )


@with_records
def plan(
    model: Model,
    gpu: Annotated[str, typer.Option("--gpu", help="Device, or several to compare: H200,A100.")],
    *,
    over: DivisionFlags,
    rates: RateFlags,
    demand: DemandFlags,
    study: StudyFlags,
    plot: Annotated[Path | None, typer.Option(help="Draw throughput over latency into this file.")] = None,
    as_json: Json = False,
) -> None:
    """Plan a deployment: what fits, how fast it can be, what it costs. Times are the hardware's limit."""
    config, gpus = read_config(model), over.gpus
    if over.host_layers and (over != DivisionFlags(host_layers=over.host_layers) or study != StudyFlags() or plot):
        raise InvalidConfig("--host-layers compares the CPU with one device; leave other divisions and studies out.")
    if gpus and not over.one:
        raise InvalidConfig("--gpus compares all divisions; leave --tp, --pp, --ep and --cp out, or --gpus.")
    if study.drafts and (gpus or not over.one):
        raise InvalidConfig("--drafts compares steps of one device by their limits; leave the divisions out.")
    deployments = [
        Deployment(
            model=config.spec,
            hardware=hardware,
            input=demand.input_tokens,
            output=demand.output_tokens,
            block_size=demand.block_size,
            tp=over.tp,
            pp=over.pp,
            ep=over.ep,
            cp=over.cp,
            links=read_links(hardware, rates.datasheet),
            dtype=read_precision(rates.dtype, model, config),
            kv_dtype=rates.kv_dtype,
            utilization=demand.utilization,
            kv_kept=demand.kv_kept,
            kv_offloading_size=demand.kv_offloading_size,
            cpu_offload_gb=demand.cpu_offload_gb,
            slo_ttft=None if demand.slo_ttft is None else demand.slo_ttft / 1e3,
            slo_itl=None if demand.slo_itl is None else demand.slo_itl / 1e3,
            price_per_hour=demand.price_per_hour,
            views=views_of(demand.patches),
        )
        for hardware in (read_hardware(name, rates.datasheet) for name in gpu.split(","))
    ]
    if demand.trace is not None:
        if gpus or not over.one or study != StudyFlags() or plot:
            raise InvalidConfig("--trace simulates replicas of one device; leave divisions, studies and --plot out.")
        show_settings(model, deployments, demand.trace, demand.slo, as_json=as_json)
        return
    if gpus and study != StudyFlags():
        raise InvalidConfig(
            "--gpus compares all divisions; leave out what is computed for one of them, such as --chunks."
        )
    if gpus:
        show_divisions(deployments, gpus, as_json=as_json, plot=plot)
        return
    if over.host_layers:
        show_host_layers(deployments, over.host_layers, datasheet=rates.datasheet, as_json=as_json)
        return
    plans = [Plan(deployment) for deployment in deployments]
    if as_json:
        print_json([_everything(one, study) for one in plans])
    else:
        asked = [list(studies(one, study)) for one in plans]  # all mistakes come before the first line
        for one, further in zip(plans, asked, strict=True):
            _print(one)
            if study.drafts:
                Console().print(verifying_table(one.verifying(study.drafts)))
            for each in further:
                print(each.title)
                Console().print(each.table)
    if plot is not None:
        draw(plans, plot)


def _everything(one: Plan, study: StudyFlags) -> dict[str, Any]:
    more = {"verifying": [each._asdict() for each in one.verifying(study.drafts)]} if study.drafts else {}
    return record(one) | more | {each.name: each.records for each in studies(one, study)}


def record(one: Plan) -> dict[str, Any]:
    """Return a plan for machines. Bytes are per device, and times in seconds."""
    return {
        "hardware": one.deployment.hardware.name,
        "rates": one.deployment.hardware.source,
        **vars(one.deployment.division),
        "devices": one.deployment.devices,
        "links": one.links.source,
        "parameters": parameters(one.deployment.model).total,
        "active_parameters": active_parameters(one.deployment.model),
        "exchanged_bytes_per_token": 2 * one.exchanged,
        "dtype": one.precision.name,
        "kv_dtype": one.kv_dtype,
        "weight_bytes": one.weights,
        "kv_bytes_per_token": one.kv_per_token,
        "state_bytes_per_request": one.state_per_request,
        "kv_bytes_per_request": one.kv_per_request,
        "blocks": one.blocks,
        "empty_share": one.empty_share(),
        "max_requests": one.max_requests,
        "host_tier": one.tier._asdict() if one.tier else None,
        "streamed_bytes": 0 if one.below is None else one.below.num_bytes,
        "streaming_seconds": one.copying,
        "tower_seconds": one.seeing,
        "shares": dict(zip(("tower", "prompt", "decoding"), one.shares, strict=True)),
        "crossover_tokens": one.crossover,
        "chunk": one.chunk,
        "largest_chunk_within_slo": one.largest_chunk,
        "best": asdict(one.best) if one.best else None,
        "points": [asdict(point) for point in one.points()],
    }


def _print(one: Plan) -> None:
    d = one.deployment
    print(f"{d.devices} x {basis(d.hardware, one.precision)}")
    if (total := parameters(d.model).total) != (active := active_parameters(d.model)):
        print(f"{total / 1e9:.3g} billion parameters, of which a token uses {active / 1e9:.3g} billion")
    print(f"per device: weights {short(one.weights, 'B')}, {_kept(one)}")
    if one.below is not None:
        print(_waiting(one, one.below))
    if one.tier is not None:
        print(_below(one.tier, d.block_size))
    if one.crossover is None:
        print("the layers' products stay memory-bound at any step size")
    else:
        print(
            f"the layers' products become compute-bound at {one.crossover} tokens a step; "
            f"chunks of at least {one.chunk} tokens{_chunk_limit(one)}"
        )
    if d.views:
        tower, prompt, decoding = one.shares
        print(
            f"the tower takes {1e3 * one.seeing:.3g} ms for a request's pictures; of a request's time on the device "
            f"{tower:.0%} are the tower's, {prompt:.0%} the prompt's and {decoding:.0%} those of decoding"
        )
    if d.devices > 1:
        print(f"{d.division}; links {one.links.source}")
    if d.division.groups > 1:
        print(_exchange(one))
    _print_points(one.points(), one.best)


def _kept(one: Plan) -> str:
    """Return a line on the memory that a request keeps, and the number of requests that fit."""
    d = one.deployment
    if not one.kv_per_token:
        return f"a state of {short(one.kv_per_request, 'B')} per request, room for {one.max_requests:,} requests"
    state = f" and a state of {short(one.state_per_request, 'B')} per request" if one.state_per_request else ""
    return (
        f"KV {short(one.kv_per_token, 'B', 6)} per token{state}, "
        f"room for {one.blocks:,} blocks of {d.block_size} tokens: "
        f"{one.max_requests:,} requests of {d.context:,} tokens{_empty(one)}"
    )


def _empty(one: Plan) -> str:
    """Return the share that blocks waste, and the size that wastes less, if it is much."""
    if one.empty_share() < MUCH_EMPTY:
        return ""
    size = one.deployment.block_size
    while size > 16 and one.empty_share(size) >= MUCH_EMPTY:
        size //= 2
    less = f" (--block-size {size}: {one.empty_share(size):.1%})" if size < one.deployment.block_size else ""
    return f"; {one.empty_share():.1%} of their room is empty ends of last blocks{less}"


def _waiting(one: Plan, below: WeightsBelow) -> str:
    size = short(below.num_bytes, "B")
    if isinstance(below, ExpertsBelow):
        return (
            f"{size} of experts wait in the host's memory; the device holds {below.slots} of each layer, and those "
            f"come that a step chooses: all of them in {1e3 * one.copying:.3g} ms"
        )
    return (
        f"{len(below.layers)} of {len(one.part.layers)} layers wait in the host's memory: {size} come to the device in "
        f"every step, in {1e3 * one.copying:.3g} ms"
    )


def _below(tier: TierRoom, block_size: int) -> str:
    """Return a line on the tier in the host's memory."""
    room = f"the host's memory holds {tier.blocks:,} blocks more for each device, {tier.blocks * block_size:,} tokens"
    if not tier.tokens:
        return f"{room}; a prompt fills no block"
    better = "loading" if tier.load < tier.run else "running them anew"
    return (
        f"{room}; {tier.tokens:,} tokens of a prompt come from there in {1e3 * tier.load:.3g} ms and run anew in "
        f"{1e3 * tier.run:.3g} ms: {better} is faster"
    )


def _exchange(one: Plan) -> str:
    """Return a line on the bytes that dispatch and combine move between the devices that divide the experts."""
    batch = one.best.batch if one.best else 1
    step = batch * one.exchanged
    return (
        f"each token is sent to its experts with {short(one.exchanged, 'B')} and comes back with as many; in a step of "
        f"{batch} requests a device sends {short(step, 'B')} and gets {short(step, 'B')} back, which takes "
        f"{1e3 * one.point(batch).decode.ep:.3g} ms"
    )


def _chunk_limit(one: Plan) -> str:
    if one.best is None or one.deployment.slo_itl is None:
        return ""
    if one.largest_chunk is None:
        return f", but beside {one.best.batch} requests no chunk keeps every step within the ITL"
    return f" (a step within the ITL beside {one.best.batch} requests has room for at most {one.largest_chunk})"


def _print_points(points: Sequence[Point], best: Point | None) -> None:
    found = Table()
    sent = any(p.decode.total > p.decode.compute for p in points)
    for name in (
        "batch",
        "TTFT ms",
        "step ms",
        *(["sent ms"] if sent else []),
        "ITL ms",
        "output tok/s",
        "per million",
    ):
        found.add_column(name, justify="right")
    for p in points:
        cost = "" if p.cost_per_million is None else f"{p.cost_per_million:.3g}"
        marked = f"> {p.batch}" if p == best else str(p.batch)
        times = [p.ttft, p.step, *([p.step - p.decode.compute] if sent else []), p.itl]
        found.add_row(marked, *(f"{t * 1e3:.2f}" for t in times), f"{p.tokens_per_second:,.0f}", cost)
    Console().print(found)
    print("> largest batch that fits and meets the SLOs" if best else "no batch meets the SLOs")


def draw(plans: Sequence[Plan], path: Path) -> None:
    """Draw output tokens per second over mean time between tokens, one line per device. Raise InvalidConfig."""
    picture = figure((8, 5))
    axes = picture.add_subplot(xlabel="mean time between tokens, ms", ylabel="output tokens per second")
    for one in plans:
        points = one.points()
        x, y = [p.itl * 1e3 for p in points], [p.tokens_per_second for p in points]
        axes.plot(x, y, marker="o", label=f"{one.deployment.devices} x {one.deployment.hardware.name}")
        for p, at in zip(points, zip(x, y, strict=True), strict=True):
            axes.annotate(str(p.batch), at, textcoords="offset points", xytext=(4, -10), fontsize=7)
    axes.set(title="Limit by batch size (numbers at the points)")
    logarithmic(axes)
    axes.legend()
    save(picture, path)

"""`ridgeline comm network`: collectives over a network of many hosts, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

import typer
from rich.console import Console

from ridgeline.cli.options import with_records
from ridgeline.cli.rates import Json, columns
from ridgeline.cli.sizes import print_json, read_hardware, read_links, short
from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.fabric import GENERATIONS, OPS, TOPOLOGIES, Fabric, Way, ways
from ridgeline.perf.links import Links, bus_factor


@dataclass(frozen=True)
class NetworkFlags:
    """The network, or several to compare."""

    devices: Annotated[int, typer.Option(min=2, help="Devices in all.")] = 1024
    per_host: Annotated[int, typer.Option(min=1, help="Devices of a host; each has a port into the network.")] = 8
    topology: Annotated[str, typer.Option(help="fat-tree, dragonfly, or both.")] = ",".join(TOPOLOGIES)
    rate: Annotated[str, typer.Option(help="Generations of InfiniBand: hdr, ndr, xdr.")] = "ndr,xdr"
    taper: Annotated[float, typer.Option(help="By what the outer links have less bandwidth: 2 for 2 : 1.")] = 1.0


@with_records
def network(
    gpu: Annotated[str, typer.Option("--gpu", help="Device, such as H100: the links within a host.")] = "H100",
    *,
    over: NetworkFlags,
    ops: Annotated[str, typer.Option(help="all_reduce, all_to_all.")] = ",".join(OPS),
    sizes: Annotated[str, typer.Option(help="8K,64K,1M, or 1K:1G in steps of four.")] = "64K,256M",
    as_json: Json = False,
) -> None:
    """Compute what collectives take over a fat tree or dragonfly of InfiniBand: nothing is measured. With SHARP the
    switches add; ring and tree are what hosts do without it."""
    from ridgeline_bench.communication.figures import parse_sizes  # as `comm bench` reads them

    hardware = read_hardware(gpu, datasheet=False)
    links, messages = read_links(hardware, datasheet=False), parse_sizes(sizes)
    fabrics = [
        Fabric(topology=topology, generation=_generation(rate), endpoints=over.devices, taper=over.taper)
        for topology, rate in product(_names(over.topology), _names(over.rate))
    ]
    found = [
        (fabric, op, size, ways(fabric, op, size, per_host=over.per_host, links=links))
        for fabric, op, size in product(fabrics, _names(ops.replace("-", "_")), messages)
    ]
    if as_json:
        print_json({"links": links.source, "fabrics": [_fabric(f) for f in fabrics], "ways": [_way(*f) for f in found]})
        return
    _print(fabrics, found, over, links)


def _names(text: str) -> list[str]:
    return [name.strip().lower() for name in text.split(",") if name.strip()]


def _generation(name: str) -> Any:
    if name not in GENERATIONS:
        raise InvalidConfig(f"unknown rate {name!r}; use {', '.join(GENERATIONS)}.")
    return GENERATIONS[name]


def _title(fabric: Fabric) -> str:
    return f"{fabric.topology} {fabric.generation.name}"


def _fabric(fabric: Fabric) -> dict[str, Any]:
    names = ("levels", "local", "switches", "passed", "bisection", "message")
    return {"topology": fabric.topology, "rate": fabric.generation.name} | {n: getattr(fabric, n) for n in names}


def _way(fabric: Fabric, op: str, size: int, found: list[Way]) -> dict[str, Any]:
    each = [way._asdict() | {"total": way.total} for way in found]
    return {"topology": fabric.topology, "rate": fabric.generation.name, "op": op, "bytes": size, "ways": each}


def _print(fabrics: list[Fabric], found: list[Any], over: NetworkFlags, links: Links) -> None:
    from ridgeline_bench.communication.figures import size_name

    print(
        f"{over.devices:,} devices in hosts of {over.per_host}; arithmetic, not measured; within hosts {links.source}"
    )
    shape = columns(("network",), ("levels", "switches", "passed", "bisection", "message µs"))
    for each in fabrics:
        figures = (str(each.levels or ""), f"{each.switches:,}", str(each.passed), short(each.bisection, "B/s"))
        shape.add_row(_title(each), *figures, f"{1e6 * each.message:.1f}")
    Console().print(shape)
    times = columns(("network", "op"), ("bytes", "fastest", "µs", "GB/s"))
    times.add_column("others, µs", no_wrap=True)
    for fabric, op, size, (best, *others) in found:
        bus = bus_factor(op, over.devices) * size / best.total / 1e9
        beside = ", ".join(f"{way.name} {1e6 * way.total:,.0f}" for way in others)
        times.add_row(_title(fabric), op, size_name(size), best.name, f"{1e6 * best.total:,.0f}", f"{bus:.0f}", beside)
    Console().print(times)
    print("GB/s: bus bandwidth, as `ridgeline comm bench` counts it")

"""`ridgeline plan --host-layers`: rates with some of a model's first layers on the CPU, and the others on a device."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ridgeline.cli.rates import columns
from ridgeline.cli.sizes import basis, print_json, read_hardware, read_links, short
from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.host_layers import HostLayers, Place, Places, host_layers
from ridgeline.perf.planner import Deployment
from ridgeline.perf.precision import precision


def show_host_layers(deployments: Sequence[Deployment], counts: str, *, datasheet: bool, as_json: bool) -> None:
    """Print the rates of one request with each device. Raise InvalidConfig for what is no number of layers."""
    host, records = read_hardware("CPU", datasheet), []
    for deployment in deployments:
        p = precision(deployment.dtype)
        places = Places(Place(host, p), Place(deployment.hardware, p), read_links(host, datasheet))
        found = _of(deployment, _counts(counts), places)
        if as_json:
            names = {"hardware": deployment.hardware.name, "host": host.name}
            records += [names | each._asdict() | {"rate": each.rate} for each in found]
        else:
            _print(deployment, found, places)
    if as_json:
        print_json(records)


def _of(deployment: Deployment, counts: list[int], places: Places) -> list[HostLayers]:
    kv_dtype, context = deployment.kv_dtype or places.device.precision.other_rate, deployment.decoding_context
    return host_layers(deployment.model, counts, places, kv_dtype, context, deployment.utilization)


def _counts(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError as error:
        raise InvalidConfig(f"--host-layers is {text!r}; write whole numbers, such as 0,8,16.") from error


def _print(deployment: Deployment, found: list[HostLayers], places: Places) -> None:
    print(f"1 x {basis(deployment.hardware, precision(deployment.dtype))}")
    host = places.host.hardware
    print(f"CPU: {short(host.bandwidth, 'B/s')}, {host.source}; links {places.links.source}")
    table = columns((), ("CPU layers", "CPU", "device", "CPU ms", "device ms", "handed ms", "tok/s"))
    for each in found:
        sizes = (short(each.host_bytes, "B"), short(each.device_bytes, "B") + ("" if each.fits else " !"))
        times = (f"{1e3 * seconds:.3g}" for seconds in (each.host, each.device, each.handed))
        table.add_row(str(each.layers), *sizes, *times, f"{each.rate:.3g}")
    Console().print(table)
    print(f"one request that decodes with {deployment.decoding_context:,} cached tokens; !: more than the device holds")

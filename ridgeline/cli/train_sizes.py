"""`ridgeline train sizes`: memory and messages of training a model on several devices, from its config alone."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from ridgeline.cli.rates import Gpu, Json, Model, columns
from ridgeline.cli.sizes import print_json, read_config, read_hardware, read_links, short
from ridgeline.perf.footprint import parameters
from ridgeline.perf.training import STAGES, chinchilla_tokens, sharded, training_flops


def sizes(
    model: Model,
    gpu: Gpu,
    devices: Annotated[int, typer.Option(min=1, help="Devices that train together.")] = 8,
    as_json: Json = False,
) -> None:
    """Compute what training a model takes: bytes on each device and bytes sent in a step, with DDP and by ZeRO's
    stages; FLOPs and tokens of a compute-optimal run."""
    hardware, weights = read_hardware(gpu, datasheet=False), parameters(read_config(model).spec).total
    links = read_links(hardware, datasheet=False)
    found = [sharded(weights, devices, stage, links) for stage in STAGES]
    tokens = chinchilla_tokens(weights)
    flops = training_flops(weights, tokens)
    days = flops / (devices * hardware.rate("bfloat16")) / 86400
    if as_json:
        stages = [each._asdict() | {"memory": each.memory} for each in found]
        print_json(
            {
                "parameters": weights,
                "devices": devices,
                "stages": stages,
                "tokens": tokens,
                "flops": flops,
                "days": days,
            }
        )
        return
    print(f"{weights / 1e9:.3g} billion parameters on {devices} x {hardware.name}; links {links.source}")
    table = columns(("ZeRO",), ("weights", "gradients", "Adam", "a device", "sent in a step", "ms"))
    for each in found:
        sizes_of = (each.weights, each.gradients, each.state, each.memory, each.sent)
        name = {0: "none (DDP)", 3: "3 (FSDP)"}.get(each.stage, str(each.stage))
        table.add_row(name, *(short(size, "B") for size in sizes_of), f"{1e3 * (each.seconds or 0):.0f}")
    Console().print(table)
    print(
        f"compute-optimal: {short(tokens)} tokens, {flops:.3g} FLOPs, {days:.3g} days at the full rate; activations "
        "come on top of the memory"
    )

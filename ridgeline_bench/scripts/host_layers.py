"""A GGUF model whose first layers are computed by the CPU and the others by a GPU: tokens/s beside the prediction.

    python -m ridgeline_bench.scripts.host_layers [--model FOLDER] [--form Q4_K_M] [--layers 0 8 16 24 32]
        [--devices cpu,cuda] [--input 64] [--tokens 24] [--dtype auto] [--quick] [--output FILE.jsonl]

FOLDER has a config.json of a Llama's or a Qwen3's shape; the default is Llama-3.1-8B's. Weights are random
(`random_gguf.py`). --layers are those on the first device. One request decodes.

    limit   the bytes of each part over the rate at which its device reads memory, measured here, and the hand-over
            (`ridgeline.perf.host_layers`, as `ridgeline plan --host-layers` predicts)
    scaled  the same, where each part takes as much more than its limit as all layers on that device take. It needs
            --layers with 0 and with all

--quick runs a small shape on two processes that are both on the CPU.
"""

from __future__ import annotations

import re
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ridgeline.assembly.forms import kept_forms
from ridgeline.core.settings.config import LLMConfig
from ridgeline.defaults import choose_device, choose_dtype
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.perf.hardware import Hardware, find
from ridgeline.perf.held import held_precision
from ridgeline.perf.host_layers import Place, Places, host_layers
from ridgeline.perf.links import assumed
from ridgeline.perf.precision import precision
from ridgeline.weights.loader import read_model_config, stored_forms
from ridgeline.worker.machine import device_name, hardware_of
from ridgeline_bench.machine.calibrate import as_calibration, probes
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.driven import Driven
from ridgeline_bench.scripts.random_gguf import write

SQUARE = r"gemm (bfloat16|float32) (1024x1024x1024|4096x4096x4096)$"
QUICK = {"model": "benchmarks/models/random-25m", "devices": "cpu,cpu", "tokens": 12, "form": "Q8_0"}


def calibrated(device: torch.device) -> Hardware:
    """Return the hardware of a device at the rates of memory and of a square product that are measured now."""
    wanted = [each for each in probes(device, quick=True) if each.name == "read" or re.match(SQUARE, each.name)]
    record = as_calibration(device, {each.name: each.run() for each in wanted})
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for the processes that follow
    return (hardware_of(device) or find("CPU")).with_calibration(record)


def place(file: Path, dtype: str, device: torch.device, hardware: Hardware) -> Place:
    """Return a device that holds weights of the file in the forms that it multiplies."""
    model, ops = read_model_config(file), Ops(Platform.of(device))
    forms = kept_forms(stored_forms(file, model), LLMConfig(model=file), file, ops)
    return Place(hardware, held_precision(precision(dtype), model.spec, forms))


def options_of(first: int, total: int, devices: Sequence[str]) -> dict[str, Any]:
    """Return the settings that compute so many first layers on the first device, and the others on the second."""
    if first in (0, total):
        return {"device": devices[0 if first else 1]}
    named = {"pipeline_devices": ",".join(devices), "pipeline_layer_partition": f"{first},{total - first}"}
    return {"pipeline_parallel_size": 2, **named}


def measured(file: Path, first: int, total: int, devices: Sequence[str], a: Namespace) -> tuple[float, list[int]]:
    """Return the seconds of a decode step, and the bytes of weights that each process holds."""
    settings = {"dtype": a.dtype, "max_model_len": a.input + a.tokens + 16, "max_num_seqs": 1}
    driven = Driven(str(file), kv_cache_memory=1 << 28, **settings, **options_of(first, total, devices))
    try:
        worker, own = driven.llm.assembly.worker, driven.llm.assembly.memory.weights
        held = [facts.weights for facts in worker.all_facts] if hasattr(worker, "all_facts") else [own]
        return driven.step_seconds(1, a.input, a.tokens), held
    finally:
        driven.close()


def study(file: Path, places: Places, a: Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each number of layers on the first device."""
    model, devices = read_model_config(file).spec, a.devices.split(",")
    total = len(model.layers)
    found = host_layers(model, a.layers, places, places.device.precision.other_rate, a.input + a.tokens // 2)
    for each in found:
        seconds, held = measured(file, each.layers, total, devices, a)
        yield {
            "layers": each.layers,
            "of": total,
            "devices": a.devices,
            "measured": 1 / seconds,
            "limit": each.rate,
            **{name: getattr(each, name) for name in ("host", "device", "handed", "host_bytes", "device_bytes")},
            "held": held,
        }


def scaled(lines: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Return the tokens/s of each line if parts take as much more than their limits as whole models do."""
    ends = {line["layers"]: line["limit"] / line["measured"] for line in lines if line["layers"] in (0, line["of"])}
    if len(ends) < 2:
        return [None] * len(lines)
    device, host = (ends[layers] for layers in sorted(ends))
    return [1 / (host * line["host"] + device * line["device"] + line["handed"]) for line in lines]


HEADS = ("first layers", "GB", "other layers", "GB", "tokens/s", "limit", "of it", "scaled")


def rows(lines: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the cells of each line."""
    for line, ends in zip(lines, scaled(lines), strict=True):
        first, others = (f"{line[name] / 1e9:.2f}" for name in ("host_bytes", "device_bytes"))
        rates = f"{line['measured']:.1f}", f"{line['limit']:.1f}", f"{line['measured'] / line['limit']:.0%}"
        after = f"{ends:.1f}" if ends else ""
        yield [str(line["layers"]), first, str(line["of"] - line["layers"]), others, *rates, after]


def main() -> None:
    a = asked(
        __doc__,
        model="benchmarks/models/llama-8b",
        form="Q4_K_M",
        layers=[0, 8, 16, 24, 32],
        devices=("cpu,cuda", "of the first and the other layers"),
        input=64,
        tokens=24,
        dtype="auto",
        quick=(False, "a small shape on the CPU"),
        output=Path,
    )
    if a.quick:
        vars(a).update(QUICK, layers=[0, 3, 6])
    kinds, lines = [choose_device(name) for name in a.devices.split(",")], list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as spare:
        file = write(Path(a.model), Path(spare) / "model.gguf", a.form)
        if a.dtype == "auto":
            a.dtype = choose_dtype("auto", read_model_config(file).dtype, choose_device("cpu")).name
        hardware = {kind: calibrated(kind) for kind in dict.fromkeys(kinds)}
        host, device = (place(file, a.dtype, kind, hardware[kind]) for kind in kinds)
        about = {"workload": "host layers", "model": Path(a.model).name, "form": a.form, "dtype": a.dtype}
        rates = {"read": [hardware[kind].bandwidth for kind in kinds], "on": list(map(device_name, kinds))}
        for line in study(file, Places(host, device, assumed(find("CPU"))), a):
            lines.append(line)
            keep(a.output, {**about, "gpu": gpu(), **rates, **line})
    read = " and ".join(f"{each / 1e9:.4g} GB/s" for each in rates["read"])
    print(f"{a.model} in {a.form} and {a.dtype} on {a.devices}, which read {read}")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in HEADS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows(lines):
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()

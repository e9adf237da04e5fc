"""One model in many forms of its weights, on one page: memory, time to first token, tokens per second, perplexity.

    python -m ridgeline_bench.scripts.formats_page [--model FOLDER] [--forms bf16 w8a8 gptq fp8 nvfp4 mxfp8 q4_k_m]
        [--quick] [--batches 1 8 64] [--input 1024] [--tokens 129] [--output FILE.jsonl]
    python -m ridgeline_bench.scripts.formats_page --model FOLDER --forms bf16@2 gptq   # two GPUs, and one
    python -m ridgeline_bench.scripts.formats_page --show FILE.jsonl   # the page, from stored lines

FOLDER has a config.json; the default is Llama-3.1-8B's shape. Weights are random, so the speed is the
model's and the perplexity is not: that is the embedded model's in the same form, as `ridgeline eval quantization` has
stored it in benchmarks/results/quantization.jsonl. Each form has a process of its own. Where a form cannot be held or
does not run on the device, the page says why.

    GB            weights on a device, and what is left for the KV cache
    TTFT          of one prompt of --input tokens on an idle engine, the median of five
    tokens/s      output of so many requests at once, while all of them decode, with --input tokens before them
    of the limit  those tokens/s over what the planner gives as the hardware's limit (0: its rates are unknown)
    per GB        tokens/s of the largest batch for each GB of weights on all devices

--quick measures a model of 25 M parameters with short prompts.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.core.errors import RidgelineError
from ridgeline.perf.division import Divided, Division
from ridgeline.perf.links import ideal
from ridgeline.worker.machine import hardware_of
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.apart import Apart
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.driven import Driven
from ridgeline_bench.scripts.weight_forms import arguments, split

ROOT = Path(__file__).parents[2]
SHAPES, QUALITY = ROOT / "benchmarks" / "models", ROOT / "benchmarks" / "results" / "quantization.jsonl"
DEFAULT = ["bf16", "w8a8", "gptq", "fp8", "nvfp4", "mxfp8", "q4_k_m"]
GROUP = 128  # weights that share a scale, in the lines whose perplexity is shown
FIRSTS = 5  # prompts whose time to the first token is taken
Line = dict[str, Any]


def perplexities(lines: Iterable[Mapping[str, Any]], model: str = "embedded") -> dict[str, float]:
    """Return the newest perplexity of each workload of `ridgeline eval quantization`, by "scheme:method"."""
    found: dict[str, float] = {}
    for line in lines:
        workload = str(line["workload"])
        wanted = workload.startswith("quantization:") and line["metric"] == "perplexity" and line["model"] == model
        if wanted and line["options"].get("group") == GROUP:
            found[workload.removeprefix("quantization:")] = float(line["value"])
    return found


def predicted(driven: Driven, devices: int, batches: Iterable[int], context: int) -> dict[int, float]:
    """Return the tokens per second of the planner's limit, by batch; nothing where the device's rates are unknown."""
    assembly = driven.llm.assembly
    hardware, precision = hardware_of(assembly.device), assembly.precision
    if hardware is None:
        return {}
    try:
        division, rate = Division(tp=devices), precision.other_rate
        divided = Divided(assembly.model.spec, division, hardware, ideal(hardware), precision, rate)
        return {batch: batch / divided.decode(batch, context).total for batch in batches}
    except RidgelineError:  # a rate that the hardware's calibration lacks
        return {}


def measured(a: Namespace, name: str) -> tuple[Line, Callable[[None], None]]:
    """Load one form, and return its figures."""
    _, devices = split(name)
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as spare:
        options = arguments(name, Path(a.model), Path(spare))
        longest = a.input + a.tokens + 16
        driven = Driven(**options, max_model_len=longest, max_num_seqs=max(a.batches))
    memory = driven.llm.assembly.memory
    driven.run(driven.alike(1, a.input, 2))  # code and kernels are prepared when they are first used
    firsts = [driven.run(driven.alike(1, a.input, 1)).first for _ in range(FIRSTS)]
    steps = {batch: driven.step_seconds(batch, a.input, a.tokens) for batch in a.batches}
    limits = predicted(driven, devices, a.batches, a.input + a.tokens // 2)
    line: Line = {
        "weights_gb": memory.weights / 1e9,
        "kv_gb": memory.kv_cache / 1e9,
        "dtype": driven.llm.assembly.dtype,
        "devices": devices,
        "ttft_ms": 1e3 * statistics.median(firsts),
        "tokens_per_second": {batch: batch / seconds for batch, seconds in steps.items()},
        "limit_tokens_per_second": limits,
    }
    driven.close()
    return line, lambda _: None


def line_of(a: Namespace, name: str) -> Line:
    """Return the figures of one form, or why it has none."""
    common = {
        "workload": "formats page", "model": Path(a.model).name, "form": name, "what": split(name)[0].what,
        "gpu": gpu(), "input": a.input, "tokens": a.tokens,
    }  # fmt: skip
    apart: Apart[None, None] = Apart(attempted, a, name)
    found = apart.told
    apart.close()
    return {**common, **found}


def attempted(a: Namespace, name: str) -> tuple[Line, Callable[[None], None]]:
    """Return `measured`, or the sentence with which the engine refused."""
    try:
        return measured(a, name)
    except RidgelineError as error:
        return {"left_out": str(error)}, lambda _: None


def page(lines: Iterable[Line], quality: Mapping[str, float]) -> tuple[Table, list[str]]:
    """Return the table, and a sentence for each form that is not in it."""
    lines = list(lines)
    there = [line for line in lines if "left_out" not in line]
    batches = [str(batch) for batch in there[0]["tokens_per_second"]] if there else []
    title = f"{lines[0]['model']} on {lines[0]['gpu'] or 'a CPU'}" if lines else ""
    heads = [f"tokens/s at {batch}" for batch in batches]
    table = Table("form", "GB", "KV GB", "TTFT, ms", *heads, "of the limit", "per GB", "perplexity", title=title)
    for line in there:
        rates, limits = ({str(k): v for k, v in line[name].items()} for name in ("tokens_per_second", LIMIT))
        last = batches[-1]
        share = f"{100 * rates[last] / limits[last]:.0f} %" if limits else "-"
        per_gb = rates[last] / (line["devices"] * line["weights_gb"])
        known = quality.get(split(line["form"])[0].quality)
        table.add_row(
            line["form"], f"{line['devices'] * line['weights_gb']:.2f}", f"{line['devices'] * line['kv_gb']:.1f}",
            f"{line['ttft_ms']:.1f}", *(f"{rates[batch]:,.0f}" for batch in batches), share, f"{per_gb:,.0f}",
            f"{known:.3f}" if known else "-",
        )  # fmt: skip
    return table, [line["left_out"] for line in lines if "left_out" in line]


LIMIT = "limit_tokens_per_second"


def stored_quality() -> dict[str, float]:
    return perplexities(map(json.loads, QUALITY.read_text(encoding="utf-8").splitlines()))


def show(lines: Iterable[Line]) -> None:
    table, left_out = page(lines, stored_quality())
    console = Console(width=140)
    console.print(table)
    for sentence in left_out:
        console.print(sentence, markup=False, soft_wrap=True)


def main() -> None:
    a = asked(
        __doc__, model=("", "a folder with a config.json; default: Llama-3.1-8B's shape"), forms=DEFAULT, quick=False,
        batches=[1, 8, 64], input=1024, tokens=129, output=Path, show=Path,
    )  # fmt: skip
    if a.show is not None:
        show(line for line in map(json.loads, a.show.read_text().splitlines()) if line["workload"] == "formats page")
        return
    a.model = a.model or str(SHAPES / ("random-25m" if a.quick else "llama-8b"))
    if a.quick:
        torch.set_num_threads(min(2, torch.get_num_threads()))
        a.batches, a.input, a.tokens = [1, 4], 32, 9
    for name in a.forms:
        split(name)
    lines = []
    for name in a.forms:
        lines.append(line_of(a, name))
        keep(a.output, lines[-1])
        print(json.dumps(lines[-1]), flush=True)
    show(lines)


if __name__ == "__main__":
    main()

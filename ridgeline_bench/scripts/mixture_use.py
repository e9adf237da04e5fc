"""A mixture of experts served: memory, the distribution of routes, and which experts work at which batch.

    python -m ridgeline_bench.scripts.mixture_use [--model FOLDER] [--form fp8-file]
        [--batches 1 2 4 8 16 32 64 128 256] [--input 128] [--tokens 65] [--router 0.05] [--options JSON]
        [--quick] [--output FILE.jsonl]

FOLDER has a config.json; the default is Mixtral-8x7B's shape: 93 GB in 16 bits, so one GPU of 80 GB holds
it in FP8 (`fp8-file`) or four bits (`gptq`), and two hold it as `bf16@2`. Weights are random. Routers get a wider
spread (--router), since with the usual one most tokens would choose the same experts; so the distribution is that of
an untrained router, and shows what is recorded rather than what training makes of it.

    memory    weights, of them experts, and the KV cache, on a device
    routes    of all tokens of the run: each layer's busiest expert over the mean, and the share of its rarest
    experts   with tokens in a step, the mean over layers and steps; "uniform" is E (1 - (1 - K / E)^B)
    limit     tokens/s if a step took its least time, with so many experts as uniform routing reaches
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.kernels.gemm.experts.cost import touched
from ridgeline.layers.experts import Experts
from ridgeline.perf.experts import imbalance
from ridgeline.perf.footprint import expert_parameters, parameters
from ridgeline.worker.local import LocalWorker
from ridgeline_bench.engines.ridgeline import used
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.batching import SHAPES
from ridgeline_bench.scripts.driven import Driven
from ridgeline_bench.scripts.formats_page import predicted
from ridgeline_bench.scripts.weight_forms import arguments, split


def widen(driven: Driven, std: float) -> None:
    """Give routers normal weights of this deviation. Ranks in other processes keep theirs."""
    worker = driven.llm.assembly.worker
    if not std or not isinstance(worker, LocalWorker):
        return
    generators: dict[torch.device, torch.Generator] = {}
    for module in worker.runner.decoder.modules():
        if isinstance(module, Experts):
            device = module.router.device
            generator = generators.setdefault(device, torch.Generator(device).manual_seed(1))
            torch.nn.init.normal_(module.router, std=std, generator=generator)


def spec_of(driven: Driven) -> ExpertsSpec:
    """Return the first mixture's spec. Raise InvalidConfig for a model without experts."""
    for layer in driven.llm.assembly.model.spec.layers:
        if isinstance(layer.feed_forward, ExpertsSpec):
            return layer.feed_forward
    raise InvalidConfig("the model has no experts; name a mixture, as benchmarks/models/mixtral-8x7b.")


def memory_line(driven: Driven, devices: int) -> dict[str, Any]:
    """Return gigabytes on a device. The part of the experts goes by their share of the parameters."""
    memory, spec = driven.llm.assembly.memory, driven.llm.assembly.model.spec
    share = expert_parameters(spec) / parameters(spec).total
    return {
        "devices": devices, "weights_gb": memory.weights / 1e9, "expert_share_of_parameters": share,
        "kv_gb": memory.kv_cache / 1e9, "kv_tokens": memory.tokens,
    }  # fmt: skip


def routes_line(load_LE: np.ndarray) -> dict[str, Any]:
    """Return the distribution of all tokens' routes. load_LE: tokens of each layer's experts."""
    share_LE = load_LE / load_LE.sum(1, keepdims=True)
    entropy_L = -(share_LE * np.log(np.maximum(share_LE, 1e-12))).sum(1) / np.log(load_LE.shape[1])
    return {
        "imbalance_of_layers": [round(imbalance(row), 4) for row in load_LE],
        "rarest_of_layers": [round(float(share), 5) for share in share_LE.min(1)],
        "entropy_of_layers": [round(float(entropy), 5) for entropy in entropy_L],
        "shares_of_first_layer": [round(float(share), 5) for share in share_LE[0]],
    }


def bench(driven: Driven, batches: list[int], length: int, tokens: int, devices: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each batch, as soon as it is measured."""
    spec = spec_of(driven).routing
    limits = predicted(driven, devices, batches, length + tokens // 2)
    for batch in batches:
        looks: list[ExpertLoad] = []
        driven.run(driven.alike(batch, length, 3))  # kernels of this batch
        seconds = driven.step_seconds(batch, length, tokens)
        with driven.llm.assembly.worker.watching_experts(looks.append):
            driven.run(driven.alike(batch, length, tokens))
        yield {
            "batch": batch, "step_ms": 1e3 * seconds, "tokens_per_second": batch / seconds, "experts": spec.experts,
            "used": spec.top_k, "experts_with_tokens": used(looks, batch),
            "uniform": touched(batch, spec.experts, spec.top_k), "limit_tokens_per_second": limits.get(batch, 0.0),
        }  # fmt: skip


def show(lines: list[dict[str, Any]], memory: dict[str, Any], routes: dict[str, Any]) -> None:
    console = Console(width=140)
    part = memory["expert_share_of_parameters"]
    console.print(
        f"memory of each of {memory['devices']}: weights {memory['weights_gb']:.2f} GB, {100 * part:.1f} % of the "
        f"parameters are experts'; KV cache {memory['kv_gb']:.2f} GB, {memory['kv_tokens']:,} tokens"
    )
    busiest, rarest = routes["imbalance_of_layers"], routes["rarest_of_layers"]
    console.print(
        f"routes: a layer's busiest expert has {min(busiest):.2f} to {max(busiest):.2f} times the mean, its rarest "
        f"{100 * min(rarest):.1f} to {100 * max(rarest):.1f} % of the tokens"
    )
    table = Table("batch", "experts with tokens", "uniform", "of", "ms a step", "tokens/s", "of the limit")
    for line in lines:
        limit = line["limit_tokens_per_second"]
        table.add_row(
            str(line["batch"]), f"{line['experts_with_tokens']:.2f}", f"{line['uniform']:.2f}", str(line["experts"]),
            f"{line['step_ms']:.2f}", f"{line['tokens_per_second']:,.0f}",
            f"{100 * line['tokens_per_second'] / limit:.0f} %" if limit else "-",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    a = asked(
        __doc__, model="", form=("fp8-file", "the form of the weights"), batches=[1, 2, 4, 8, 16, 32, 64, 128, 256],
        input=128, tokens=65, router=0.05, options=("{}", "JSON of arguments of LLM"), quick=False, output=Path,
    )  # fmt: skip
    if a.quick:
        a.form, a.batches, a.input, a.tokens = "bf16", [1, 2, 8], 16, 9
    a.model = a.model or str(SHAPES / ("mixtral-tiny" if a.quick else "mixtral-8x7b"))
    _, devices = split(a.form)
    longest = a.input + a.tokens + 16
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as spare:
        given = arguments(a.form, Path(a.model), Path(spare)) | json.loads(a.options)
        driven = Driven(**{"max_model_len": longest, "max_num_seqs": max(a.batches), **given})
    spec_of(driven)
    widen(driven, a.router)
    driven.llm.assembly.worker.forget_expert_load()
    common = {"workload": "mixture use", "model": Path(a.model).name, "form": a.form, "gpu": gpu(), "router": a.router}
    common |= {"input": a.input}
    memory, lines = memory_line(driven, devices), []
    keep(a.output, {**common, "memory": memory})
    for line in bench(driven, a.batches, a.input, a.tokens, devices):
        keep(a.output, {**common, **line})
        lines.append(line)
    routes = routes_line(driven.llm.expert_load())
    keep(a.output, {**common, "routes": routes})
    show(lines, memory, routes)
    driven.close()


if __name__ == "__main__":
    main()

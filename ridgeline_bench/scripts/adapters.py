"""The cost of LoRA adapters: a step with one of them and with many different ones, and the wait for one that is not on
the device, beside what bytes alone would take.

    python -m ridgeline_bench.scripts.adapters [--model FOLDER] [--peer vllm --peer-path DIR] [--output FILE.jsonl]
        [--batches 1 8 64 256] [--different 64] [--context 1024] [--rank 16] [--only steps pages]
    python -m ridgeline_bench.scripts.adapters --quick                        # a CPU, seconds

Adapters have random numbers and change all linear layers. They are written as PEFT's folders of the model's shape. Each
engine is a process of its own and runs the same requests. The device has room for --different adapters in the first
task, and for one in the second, which runs the shape --paged.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from ridgeline.core.errors import RidgelineError
from ridgeline.core.settings.adapters import TENSORS
from ridgeline_bench.adapters import WITH, WITHOUT
from ridgeline_bench.engines import LoadOptions
from ridgeline_bench.results import Record, append
from ridgeline_bench.runner import Job, Where, check, run
from ridgeline_bench.scripts.asked import OneOf, asked
from ridgeline_bench.workloads import Size

SHAPES = Path(__file__).parents[2] / "benchmarks" / "models"
WIDTH = 2  # bytes of a number
WRITTEN = 8  # adapters whose files are written; further ones have the same files, and memory of their own
PAGED, HELD = 8, 3  # adapters that are paged in, and those of them that the host keeps

Linear = tuple[str, int, int]  # a module's name, its inputs and outputs


def linears(config: Mapping[str, Any]) -> list[Linear]:
    """Return the linear modules of one layer of a Llama."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return [
        ("self_attn.q_proj", hidden, queries), ("self_attn.k_proj", hidden, keys), ("self_attn.v_proj", hidden, keys),
        ("self_attn.o_proj", queries, hidden), ("mlp.gate_proj", hidden, inner), ("mlp.up_proj", hidden, inner),
        ("mlp.down_proj", inner, hidden),
    ]  # fmt: skip


def adapter_bytes(config: Mapping[str, Any], rank: int) -> int:
    """Return the bytes of an adapter on all linear layers."""
    return config["num_hidden_layers"] * WIDTH * rank * sum(inputs + outputs for _, inputs, outputs in linears(config))


def step_bytes(config: Mapping[str, Any], requests: int, context: int) -> int:
    """Return the bytes that a decode step without adapters reads: all weights but the embedding, keys and values."""
    layer = sum(inputs * outputs for _, inputs, outputs in linears(config))
    weights = config["num_hidden_layers"] * layer + config["vocab_size"] * config["hidden_size"]
    keys_and_values = 2 * config["num_hidden_layers"] * linears(config)[1][2]
    return WIDTH * (weights + requests * context * keys_and_values)


def written(folder: Path, config: Mapping[str, Any], rank: int, count: int) -> list[str]:
    """Write adapters as PEFT does and return their folders. Their numbers come from one pool, from another place in it
    for each that is written."""
    most = rank * max(max(inputs, outputs) for _, inputs, outputs in linears(config))
    pool = 0.02 * torch.randn(most + count, generator=torch.Generator().manual_seed(0))
    pool = pool.to(torch.bfloat16)
    about = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none",
        "target_modules": [name.rpartition(".")[2] for name, _, _ in linears(config)],
    }  # fmt: skip
    found = []
    for number in range(count):
        own = folder / f"adapter-{number}"
        own.mkdir(parents=True)
        found.append(str(own))
        (own / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
        if number >= WRITTEN:
            (own / TENSORS).hardlink_to(folder / f"adapter-{number % WRITTEN}" / TENSORS)
            continue
        tensors = {}
        for layer, (name, inputs, outputs) in (
            (layer, linear) for layer in range(config["num_hidden_layers"]) for linear in linears(config)
        ):
            start = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                numbers = pool[number : number + shape[0] * shape[1]].clone()
                tensors[f"{start}.{part}.weight"] = numbers.view(shape)
        save_file(tensors, str(own / TENSORS), {"format": "pt"})
    return found


def jobs(a: Namespace, work: Path) -> Iterator[tuple[Mapping[str, Any], Job]]:
    """Yield the model's config and our job of each task, when its adapters are written."""
    for task in a.only:
        model = Path(a.model if task == "steps" else a.paged)
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        count = max(1, a.different) if task == "steps" else PAGED
        sizes: dict[str, Any] = {"task": task, "rank": a.rank, "rounds": a.rounds}
        limits = {"enable_lora": True, "max_lora_rank": a.rank, "max_loras": 1, "max_cpu_loras": HELD + 1}
        if task == "steps":
            sizes |= {name: getattr(a, name) for name in ("batches", "input_len", "different", "context", "steps")}
            limits |= {"max_loras": count, "max_cpu_loras": count, "max_num_seqs": max(*a.batches, count)}
        else:
            sizes["held"] = HELD
        longest = max(a.input_len, a.context) + a.steps + 16
        options = LoadOptions(
            device="cpu" if a.quick else "auto", dtype="float32" if a.quick else "auto", dummy=True,
            max_model_len=longest, extra={**limits, **a.options},
        )  # fmt: skip
        folders = written(work / task, config, a.rank, count)
        size = Size(vocab_size=config["vocab_size"])
        yield (
            config,
            Job(
                engine="ridgeline", model=str(model), options=options, size=size, adapters={**sizes, "folders": folders}
            ),
        )


def for_peer(job: Job, extra: Mapping[str, Any]) -> Job:
    """Return the same work for vLLM, which makes graphs of the sizes that run, or none where it does not matter."""
    own: dict[str, Any] = {name: value for name, value in job.options.extra.items() if "lora" in name}
    assert job.adapters is not None
    if job.adapters["task"] == "steps":
        sizes = sorted({*job.adapters["batches"], max(1, job.adapters["different"])})
        own |= {"max_num_seqs": sizes[-1], "compilation_config": {"cudagraph_capture_sizes": sizes}}
    else:
        own["enforce_eager"] = True
    return replace(job, engine="vllm", options=replace(job.options, extra={**own, **extra}))


def shares(records: Sequence[Record]) -> dict[str, float]:
    """Return the share by which a step with adapters takes longer than one without, by its name."""
    found = {record.metric: record.value for record in records}
    names = [metric.removesuffix(f": {WITH}") for metric in found if metric.endswith(f": {WITH}")]
    return {name: found[f"{name}: {WITH}"] / found[f"{name}: {WITHOUT}"] - 1 for name in names}


def predicted(config: Mapping[str, Any], asked_for: Mapping[str, Any]) -> dict[str, float]:
    """Return the same shares of the bytes alone."""
    one = adapter_bytes(config, asked_for["rank"])
    half = asked_for["steps"] // 2
    found = {}
    for count in asked_for["batches"]:
        found[f"step of {count} with one"] = one / step_bytes(config, count, asked_for["input_len"] + half)
    if count := asked_for["different"]:
        found[f"step of {count} with {count}"] = count * one / step_bytes(config, count, asked_for["context"] + half)
    return found


def show(console: Console, task: Mapping[str, Any], config: Mapping[str, Any], found: Sequence[Record]) -> None:
    table = Table("figure", "ms", title=f"{found[0].engine} {found[0].version}, {task['task']}")
    for record in found:
        table.add_row(record.metric, f"{record.value:.3f}")
    console.print(table)
    bytes_alone = predicted(config, task) if task["task"] == "steps" else {}
    for name, share in shares(found).items():
        console.print(f"{name}: {100 * share:.1f} % more, {100 * bytes_alone[name]:.1f} % of bytes alone")


def main() -> None:
    a = asked(
        __doc__, model=(str(SHAPES / "llama-8b"), "a folder with a Llama's config.json"),
        paged=(str(SHAPES / "llama-1b"), "the shape whose adapters are paged in"), peer=OneOf(("none", "vllm")),
        peer_path=(Path, "a folder put first on the peer's module path"), peer_python="", peer_extra="{}",
        options=("{}", "JSON of further arguments of our LLM"), batches=[1, 8, 64, 256], input_len=128,
        different=(64, "requests that each have an adapter of their own"), context=1024, rank=16, steps=100, rounds=5,
        only=[OneOf(("steps", "pages"))], timeout=(600.0, "seconds for an engine"), commit="", quick=False, output=Path,
    )  # fmt: skip
    a.options = json.loads(a.options)
    if a.quick:
        a.model = a.paged = str(SHAPES / "random-25m")
        a.batches, a.input_len, a.different, a.context, a.rank, a.steps, a.rounds = [1, 2], 8, 2, 32, 4, 3, 1
    here = Where(timeout=a.timeout)
    there = replace(here, path=(a.peer_path.resolve(),) if a.peer_path else ())
    there = replace(there, python=a.peer_python) if a.peer_python else there
    if a.peer != "none":
        check(Job(engine=a.peer, model=a.model, options=LoadOptions(), size=Size()), there)
    console, failed = Console(width=120), False
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as work:
        for config, job in jobs(a, Path(work)):
            peers = [(for_peer(job, json.loads(a.peer_extra)), there)] if a.peer != "none" else []
            for each, where in [(job, here), *peers]:
                try:
                    outcome = run(each, where, model_name=Path(each.model).name, commit=a.commit)
                except RidgelineError as error:  # the other engine is measured all the same
                    console.print(f"{each.engine}: {error}", markup=False)
                    failed = True
                    continue
                for note in outcome.notes:
                    console.print(note, markup=False)
                failed |= outcome.failed
                if a.output is not None:
                    append(a.output, outcome.records)
                found = [record for record in outcome.records if record.workload == "adapters"]
                if found and each.adapters is not None:
                    show(console, each.adapters, config, found)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Steps of fine-tuning on random weights: tokens per second, the share of the device's peak, peak memory.

    python -m ridgeline_bench.scripts.fine_tuning [--models benchmarks/models/llama-1b] [--methods lora qlora full]
        [--objective sft] [--length 4096] [--sequences 4] [--packs 1] [--rank 16] [--steps 5] [--recompute] [--paged]
        [--kernels 0] [--commit HASH] [--output FILE.jsonl]

Every example has --length tokens, all of which count; a pack has --sequences of them, and a step --packs packs. With
--objective dpo two examples are a pair, of which half of the tokens count. A step is the trainer's own (`Tuner.begin`):
forward and backward passes, the norm of the gradients, AdamW. FLOPs are those that are needed: nothing that runs again,
and no gradients of weights that do not learn. host_seconds is the time in which the host begins a step, and memory the
allocator's peak, from before the weights on.

torchrun --nproc-per-node 2 -m ridgeline_bench.scripts.fine_tuning shares --packs out between two GPUs. Figures are then
those of both, and memory that of the first one.

--kernels prints and stores as many of the longest kernels of steps one behind the other, as training has them, and in
which time of a step no kernel runs.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.training.base import held_bytes, opened
from ridgeline.training.conversations import AnswerPair, Example
from ridgeline.training.lora import Lora, LoraConfig
from ridgeline.training.objective import needed_flops
from ridgeline.training.packs import Packs
from ridgeline.training.preferences import Preferences, with_reference
from ridgeline.training.replicas import TrainingReplicas, joined
from ridgeline.training.tuned import NextTokens, PackRunner, loss_chunk, recompute
from ridgeline.training.tuning import Tuner, TuningConfig
from ridgeline.weights.loader import read_model_config
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.asked import OneOf, asked, keep

WARM = 2  # steps that are not timed: kernels are compiled, memory grows
PROFILED = 3  # steps, one behind the other


def tuner_of(
    folder: Path,
    method: Any,
    given: Any,
    device: torch.device,
    out: Path,
    replicas: TrainingReplicas = TrainingReplicas(),
) -> tuple[Tuner, dict[str, int]]:
    """Return the trainer of random examples, and the bytes of the weights that it began with."""
    model = read_model_config(folder)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = opened(folder, model, method, dtype, device, load_format="dummy")
    held = dict(held_bytes(decoder))
    learnt = decoder if method == "full" else Lora(decoder, model, LoraConfig(rank=given.rank), 0)
    if given.recompute:
        recompute(decoder)
    full = method == "full"
    autocast = dtype if full and device.type == "cuda" else None
    runs = PackRunner(decoder, autocast=autocast, chunk=loss_chunk(device, full=full))
    together = 2 if given.objective == "dpo" else 1  # examples of an item
    objective, scored = objective_of(given, runs, model.spec.vocab_size)
    lengths = [objective.tokens([index]) for index in range(given.sequences * given.packs // together)]
    packs = Packs(lengths, room=given.sequences * (given.length + 1), per_step=given.packs, seed=0)
    thin = None if method == "full" else sum(p.numel() for p in learnt.parameters() if p.requires_grad)
    each = needed_flops(model.spec, [given.length] * together, scored, thin=thin)
    tuning = TuningConfig(steps=1 << 20, lr=1e-5, warmup=0, checkpoint_every=0, paged=given.paged)
    tuner = Tuner(
        learnt, objective, packs, tuning, out, identity={}, console=Console(quiet=True),
        flops=lambda pack: each * len(pack), replicas=replicas,
    )  # fmt: skip
    return tuner, held


def objective_of(given: Any, runs: PackRunner, vocabulary: int) -> tuple[NextTokens | Preferences, int]:
    """Return the loss of random examples, and the scored tokens of one of its items."""
    draw = torch.Generator().manual_seed(0)
    drawn = torch.randint(vocabulary, (given.sequences * given.packs, given.length + 1), generator=draw)
    if given.objective == "sft":
        counted = (False, *(True,) * given.length)
        return NextTokens(runs, [Example(tuple(row), counted, 0) for row in drawn.tolist()]), given.length
    half = given.length // 2
    counted = (*(False,) * (given.length + 1 - half), *(True,) * half)
    rows = [Example(tuple(row), counted, 0) for row in drawn.tolist()]
    pairs = [AnswerPair(*both) for both in zip(rows[::2], rows[1::2], strict=True)]
    return Preferences(runs, with_reference(runs, pairs), beta=0.1), 2 * half


def measured(folder: Path, method: str, given: Any, device: torch.device, replicas: TrainingReplicas) -> dict[str, Any]:
    """Return the figures of one model and method."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    with tempfile.TemporaryDirectory() as out:
        tuner, held = tuner_of(folder, method, given, device, Path(out), replicas)
        losses = [tuner.update()[0] for _ in range(WARM)]
        started, before = now(), tuner.tokens
        ended, host = [], 0.0
        for _ in range(given.steps):
            begun = time.perf_counter()
            tuner.begin()
            host += time.perf_counter() - begun
            ended += tuner.settle(tuner.ahead)
        ended += tuner.settle()
        seconds, needed = now() - started, sum(each.begun.needed for each in ended)
        losses += [each.loss for each in ended]
        rate = (tuner.tokens - before) / seconds
        kernels = profiled(tuner, given.kernels) if given.kernels and on_gpu else None
    return {
        "seconds": seconds / given.steps,
        "host_seconds": host / given.steps,
        "tokens_per_s": rate,
        "mfu": needed / seconds / tuner.peak if tuner.peak else None,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "held": held,
        "losses": [losses[0], losses[-1]],
        **({} if kernels is None else {"profile": kernels}),
    }


def profiled(tuner: Tuner, count: int) -> dict[str, Any]:
    """Return where the time of a step goes in ms, and print it: the steps are one behind the other."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            tuner.begin()
            tuner.settle(tuner.ahead)
        tuner.settle()
        torch.cuda.synchronize()
    on_device = [each for each in seen.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    ran = [each for each in on_device if not (each.is_user_annotation or each.name.startswith("Optimizer."))]
    spans = [(each.time_range.start, each.time_range.end, each.name) for each in ran]
    found = of_spans(spans, PROFILED, count)
    for row in found["kernels"]:
        print(f"{row['ms']:9.2f} ms {row['share']:6.1%} {row['count']:7.0f} {row['name'][:160]}")
    print({name: value for name, value in found.items() if name != "kernels"}, flush=True)
    return found


def of_spans(spans: Sequence[tuple[float, float, str]], steps: int, count: int) -> dict[str, Any]:
    """Return the figures of a step. spans: begin, end and name of each kernel in microseconds.

    step: from the first begin to the last end. kernels: so many names with the most time. between: the time in which
    none runs; gaps, longest: how often, and the longest ones. copies and fills count as kernels.
    """
    by_name, until, gaps = defaultdict[str, list[float]](list), min(begin for begin, _, _ in spans), list[float]()
    whole = max(end for _, end, _ in spans) - until
    for begin, end, name in sorted(spans):
        by_name[name].append(end - begin)
        if begin > until:
            gaps.append(begin - until)
        until = max(until, end)
    order = sorted(by_name.items(), key=lambda each: -sum(each[1]))
    rows = [
        {"name": name, "ms": sum(each) / steps / 1e3, "share": sum(each) / whole, "count": len(each) / steps}
        for name, each in order[:count]
    ]
    return {
        "step": whole / steps / 1e3,
        "all": sum(map(sum, by_name.values())) / steps / 1e3,
        "between": sum(gaps) / steps / 1e3,
        "gaps": len(gaps) / steps,
        "median_gap_us": median(gaps) if gaps else 0.0,
        "longest_us": sorted(gaps, reverse=True)[:8],
        "launches": len(spans) / steps,
        "kernels": rows,
    }


def main() -> None:
    given = asked(
        __doc__,
        models=[str(Path("benchmarks/models/llama-1b"))],
        methods=[OneOf(("lora", "qlora", "full"))],
        objective=OneOf(("sft", "dpo")),
        length=4096,
        sequences=(4, "of a pack"),
        packs=(1, "of a step"),
        rank=16,
        steps=5,
        recompute=False,
        paged=False,
        kernels=0,
        commit="",
        output=Path,
    )
    if given.objective == "dpo" and given.sequences % 2:
        raise SystemExit(f"a pack of pairs has an even number of --sequences, got {given.sequences}.")
    with joined(torch.device("cuda" if torch.cuda.is_available() else "cpu")) as (replicas, device):
        if given.packs % replicas.size:
            raise SystemExit(f"{replicas.size} processes share --packs out, so it is a multiple of that.")
        measure(given, device, replicas)


def measure(given: Any, device: torch.device, replicas: TrainingReplicas) -> None:
    """Measure all models and methods; the first process tells."""
    table = Table("model", "method", "pack", "tokens/s", "MFU", "peak", "weights", "losses")
    here = asdict(host_with(device, given.commit))
    for model in given.models or [str(Path("benchmarks/models/llama-1b"))]:
        for method in given.methods:
            gc.collect()  # what the model before was held by
            found = measured(Path(model), method, given, device, replicas)
            options = {k: v for k, v in vars(given).items() if k in _STORED} | {"processes": replicas.size}
            name = Path(model).name
            what = {"workload": "fine-tuning", "model": name, "method": method}
            if replicas.rank == 0:
                keep(given.output, {"machine": here, **what, **options, **found})
            table.add_row(
                name, method, f"{given.sequences} x {given.length}", f"{found['tokens_per_s']:,.0f}",
                "" if found["mfu"] is None else f"{found['mfu']:.1%}",
                "" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 1e9:.2f} GB",
                f"{sum(found['held'].values()) / 1e9:.2f} GB", "{:.4f} {:.4f}".format(*found["losses"]),
            )  # fmt: skip
    if replicas.rank == 0:
        Console(width=140).print(table)


_STORED = ("objective", "length", "sequences", "packs", "rank", "steps", "recompute", "paged")

if __name__ == "__main__":
    main()

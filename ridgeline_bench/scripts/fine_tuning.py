"""Steps of fine-tuning on random weights: tokens per second, the share of the device's peak, peak memory.

    python -m ridgeline_bench.scripts.fine_tuning [--models benchmarks/models/llama-1b] [--methods lora qlora full]
        [--length 4096] [--sequences 4] [--packs 1] [--rank 16] [--steps 5] [--recompute] [--paged] [--kernels 0]
        [--commit HASH] [--output FILE.jsonl]

Every example has --length tokens, all of which count; a pack has --sequences of them, and a step --packs packs. A step
is the trainer's own (`Tuner.begin`): forward and backward passes, the norm of the gradients, AdamW. FLOPs are those
that are needed: nothing that runs again, and no gradients of weights that do not learn. --kernels prints as many of a
step's longest kernels. host_seconds is the time in which the host begins a step. Memory is the allocator's peak, from
before the weights on.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ridgeline.training.base import held_bytes, opened
from ridgeline.training.conversations import Example
from ridgeline.training.lora import Lora, LoraConfig
from ridgeline.training.objective import needed_flops
from ridgeline.training.packs import Packs
from ridgeline.training.tuned import NextTokens, PackRunner, loss_chunk, recompute
from ridgeline.training.tuning import Tuner, TuningConfig
from ridgeline.weights.loader import read_model_config
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.asked import OneOf, asked, keep

WARM = 2  # steps that are not timed: kernels are compiled, memory grows


def tuner_of(folder: Path, method: Any, given: Any, device: torch.device, out: Path) -> tuple[Tuner, dict[str, int]]:
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
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.spec.vocab_size, (given.sequences * given.packs, given.length + 1), generator=draw)
    counted = (False, *(True,) * given.length)
    objective = NextTokens(runs, [Example(tuple(row), counted, 0) for row in tokens.tolist()])
    lengths = [given.length + 1] * len(tokens)
    packs = Packs(lengths, room=given.sequences * (given.length + 1), per_step=given.packs, seed=0)
    thin = None if method == "full" else sum(p.numel() for p in learnt.parameters() if p.requires_grad)
    each = needed_flops(model.spec, [given.length], given.length, thin=thin)
    tuning = TuningConfig(steps=1 << 20, lr=1e-5, checkpoint_every=0, paged=given.paged)
    tuner = Tuner(
        learnt, objective, packs, tuning, out, identity={}, console=Console(quiet=True),
        flops=lambda pack: each * len(pack),
    )  # fmt: skip
    return tuner, held


def measured(folder: Path, method: str, given: Any, device: torch.device) -> dict[str, Any]:
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
        tuner, held = tuner_of(folder, method, given, device, Path(out))
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
        if given.kernels:
            print_kernels(tuner, given.kernels)
    return {
        "seconds": seconds / given.steps,
        "host_seconds": host / given.steps,
        "tokens_per_s": rate,
        "mfu": needed / seconds / tuner.peak if tuner.peak else None,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "held": held,
        "losses": [losses[0], losses[-1]],
    }


def print_kernels(tuner: Tuner, count: int) -> None:
    """Print the longest kernels of one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        tuner.update()
        torch.cuda.synchronize()
    kernels = [each for each in seen.key_averages() if each.self_device_time_total and not each.self_cpu_time_total]
    kernels = [each for each in kernels if "#" not in each.key]  # a span, whose kernels are there too
    total = sum(each.self_device_time_total for each in kernels)
    print(f"kernels of a step: {total / 1e3:.1f} ms")
    for each in sorted(kernels, key=lambda each: -each.self_device_time_total)[:count]:
        print(f"{each.self_device_time_total / 1e3:9.2f} ms {each.count:6d} {each.key[:110]}")


def main() -> None:
    given = asked(
        __doc__,
        models=[str(Path("benchmarks/models/llama-1b"))],
        methods=[OneOf(("lora", "qlora", "full"))],
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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = Table("model", "method", "pack", "tokens/s", "MFU", "peak", "weights", "losses")
    here = asdict(host_with(device, given.commit))
    for model in given.models or [str(Path("benchmarks/models/llama-1b"))]:
        for method in given.methods:
            found = measured(Path(model), method, given, device)
            options = {k: v for k, v in vars(given).items() if k in _STORED}
            name = Path(model).name
            what = {"workload": "fine-tuning", "model": name, "method": method}
            keep(given.output, {"machine": here, **what, **options, **found})
            table.add_row(
                name, method, f"{given.sequences} x {given.length}", f"{found['tokens_per_s']:,.0f}",
                "" if found["mfu"] is None else f"{found['mfu']:.1%}",
                "" if found["peak_bytes"] is None else f"{found['peak_bytes'] / 1e9:.2f} GB",
                f"{sum(found['held'].values()) / 1e9:.2f} GB", "{:.4f} {:.4f}".format(*found["losses"]),
            )  # fmt: skip
    Console(width=140).print(table)


_STORED = ("length", "sequences", "packs", "rank", "steps", "recompute", "paged")

if __name__ == "__main__":
    main()

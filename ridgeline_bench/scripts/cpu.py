"""The CPU path, plain and quantized, beside transformers and llama.cpp: random weights, bfloat16 or float32.

    python -m ridgeline_bench.scripts.cpu [--model qwen3-0.6b] [--rounds 3] [--threads 2] [--scale 4]
        [--only 'batch 16']
                             [--dtype bfloat16] [--schemes plain int8 w8a8 w4a16] [--clock wall]
                             [--output benchmarks/results/cpu.jsonl] [--gguf BF16.gguf] [--gguf-int8 Q8_0.gguf]
                             [--gguf-int4 Q4_K_M.gguf]

--model is a folder of `benchmarks/models`; moe-tiny and qwen3-30b-a3b-2-layers are mixtures of experts.

`ridgeline_bench/scripts/random_gguf.py` writes the files that llama.cpp reads; its own `llama-quantize` makes Q4_K_M of
BF16. Each engine has a process of its own, since OpenMP's threads wait actively for work only if there are no more of
them than cores. The engines take turns, so that other work on the machine slows all of them alike. The table has
medians and the best of the rounds; their distance tells how noisy the run was. It has the median of the rounds' own
ratios too, which other work moves least. On a machine without a quiet minute, `--clock processor --threads 1` counts
the time that an engine computed, without that in which it waited for a core. Achieved bytes per second count the
weights once per output token of the longest request; beside them stands the rate of a sum over memory. --scale divides
the lengths of the ragged batch.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ridgeline_bench.engines import ENGINES, LoadOptions
from ridgeline_bench.scripts.apart import Apart, in_turn, seconds, speedup
from ridgeline_bench.scripts.asked import OneOf, asked, keep

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
VOCABULARY = 30_000  # ids of prompts, which every model has
OPTIONS: dict[str, Any] = {"device": "cpu", "dummy": True, "max_model_len": 1024}
ALONE = {"enable_prefix_caching": False, "max_num_seqs": 32}  # a round must not find the last round's prompts
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
Requests = tuple[list[list[int]], list[int]]


@dataclass(frozen=True)
class Load:
    """The way to load an engine, and the clock that times it."""

    threads: int
    dtype: str = "bfloat16"
    clock: str = "wall"


def engine(kind: str, model: str, load: Load, extra: dict[str, Any]) -> tuple[int, Callable[[Requests], float]]:
    """Return the bytes of weights that a step reads, 0 if they are not known, and what runs requests."""
    torch.set_num_threads(load.threads)
    options = {**OPTIONS, "dtype": load.dtype, "dummy": not model.endswith(".gguf")}
    made = ENGINES[kind](model, LoadOptions(**options, extra=extra))
    weights = 0
    if kind == "ridgeline":
        decoder = made.llm.assembly.worker.runner.decoder
        weights = decoder.weight_bytes - decoder.embed.weight.nbytes  # all but the table that ids are looked up in
    return weights, lambda requests: seconds(partial(made.generate, *requests, 0.0), CLOCKS[load.clock])


Engine = Apart[Requests, float]


def engine_of(kind: str, model: str, load: Load, extra: dict[str, Any]) -> Engine:
    return Engine(engine, kind, model, load, extra)


def llama_cpp(path: str, load: Load) -> Engine:
    threads = {"n_threads": load.threads, "n_threads_batch": load.threads, "parallel": 8}
    return engine_of("llama_cpp", path, load, threads)


def read_bandwidth(rounds: int) -> float:
    """Return the bytes per second of the fastest sum over 2 GB."""
    numbers = torch.ones(256 << 20, dtype=torch.int64)
    times = [seconds(numbers.sum) for _ in range(4 * rounds)]
    return numbers.nbytes / min(times)


def ragged(count: int, inputs: tuple[int, int], outputs: tuple[int, int], seed: int) -> Requests:
    """Return random prompts and output lengths, each uniform between its bounds."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(*inputs))] for _ in range(count)]
    return prompts, [rng.randint(*outputs) for _ in range(count)]


def main() -> None:
    a = asked(
        __doc__, model=OneOf(("qwen3-0.6b", *sorted(path.name for path in MODELS.iterdir()))), rounds=3, threads=2,
        scale=4, output=Path, only=("", "workloads whose name begins so"), dtype=OneOf(("bfloat16", "float32")),
        schemes=(["plain", "int8", "w8a8", "w4a16"], "of Ridgeline's weights"), clock=OneOf(CLOCKS),
        gguf=str, gguf_int8=str, gguf_int4=str,
    )  # fmt: skip
    torch.set_num_threads(a.threads)
    bandwidth = read_bandwidth(a.rounds)
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, load {os.getloadavg()[0]:.1f}", flush=True)
    model, load = str(MODELS / a.model), Load(a.threads, a.dtype, a.clock)
    engines = {}
    for scheme in a.schemes:
        held = {} if scheme == "plain" else {"quantization": scheme}
        name = " ".join(["ridgeline", *held.values()])
        engines[name] = engine_of("ridgeline", model, load, {**ALONE, **held})
    engines["transformers"] = engine_of("transformers", model, load, {})
    files = {"llama.cpp": a.gguf, "llama.cpp Q8_0": a.gguf_int8, "llama.cpp Q4_K_M": a.gguf_int4}
    for name, path in files.items():
        if path:
            engines[name] = llama_cpp(path, load)
    cut = a.scale
    loads = {
        "batch 1, 32 in, 64 out": (1, (32, 32), (64, 64)),
        "batch 8, 32 in, 64 out": (8, (32, 32), (64, 64)),
        f"batch 16 ragged, {128 // cut}-{512 // cut} in, {64 // cut}-{256 // cut} out": (
            16, (128 // cut, 512 // cut), (64 // cut, 256 // cut),
        ),
        "batch 32, 32 in, 64 out": (32, (32, 32), (64, 64)),
        "batch 8, 512 in, 8 out": (8, (512, 512), (8, 8)),
    }  # fmt: skip
    for engine in engines.values():
        engine.ask(ragged(2, (16, 16), (4, 4), 7))
    for number, (name_of_load, shape) in enumerate(loads.items()):
        if not name_of_load.startswith(a.only):
            continue
        requests = ragged(*shape, seed=number)
        there = {name: e for name, e in engines.items() if shape[0] <= 8 or not name.startswith("llama.cpp")}
        rounds = list(in_turn({name: partial(engine.ask, requests) for name, engine in there.items()}, a.rounds))
        times = {name: [each[name] for each in rounds] for name in there}
        for name, taken in times.items():
            row = {
                "model": a.model,
                "dtype": a.dtype,
                "clock": a.clock,
                "workload": name_of_load,
                "engine": name,
                "tokens_per_s_median": sum(requests[1]) / statistics.median(taken),
                "tokens_per_s_best": sum(requests[1]) / min(taken),
                "speedup_over_transformers_median": statistics.median(times["transformers"]) / statistics.median(taken),
                "speedup_over_transformers_median_of_ratios": speedup(times["transformers"], taken),
                "speedup_over_transformers_best": min(times["transformers"]) / min(taken),
                "weights_gb_per_s_best": there[name].told * max(requests[1]) / min(taken) / 1e9,
                "read_gb_per_s": bandwidth / 1e9,
                "rounds": a.rounds,
                "threads": a.threads,
                "load_average": os.getloadavg()[0],
            }
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            keep(a.output, row)


if __name__ == "__main__":
    main()

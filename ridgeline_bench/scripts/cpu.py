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

import argparse
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ridgeline_bench.engines import ENGINES, LoadOptions
from ridgeline_bench.results import host

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
VOCABULARY = 30_000  # ids of prompts, which every model has
OPTIONS: dict[str, Any] = {"device": "cpu", "dummy": True, "max_model_len": 1024}
ALONE = {"enable_prefix_caching": False, "max_num_seqs": 32}  # a round must not find the last round's prompts
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
Requests = tuple[list[list[int]], list[int]]


class Engine:
    """An engine in a process of its own.

    weights: the bytes of weights that a step reads, or 0 if they are not known.
    """

    def __init__(self, kind: str, model: str, asked: argparse.Namespace, extra: dict[str, Any]) -> None:
        self._pipe, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(other, kind, model, asked, extra), daemon=True
        )
        self._process.start()
        self.weights: int = self._pipe.recv()

    def seconds(self, requests: Requests) -> float:
        self._pipe.send(requests)
        taken: float = self._pipe.recv()
        return taken

    def close(self) -> None:
        self._pipe.close()  # which ends the process
        self._process.join()


def _serve(pipe: Connection, kind: str, model: str, asked: argparse.Namespace, extra: dict[str, Any]) -> None:
    torch.set_num_threads(asked.threads)
    dummy = not model.endswith(".gguf")
    engine = ENGINES[kind](model, LoadOptions(**{**OPTIONS, "dtype": asked.dtype, "dummy": dummy}, extra=extra))
    weights = 0
    if kind == "ridgeline":
        decoder = engine.llm.assembly.worker.runner.decoder
        weights = decoder.weight_bytes - decoder.embed.weight.nbytes  # all but the table that ids are looked up in
    pipe.send(weights)
    with suppress(EOFError):  # the other end is gone
        while True:
            prompts, counts = pipe.recv()
            pipe.send(_seconds(partial(engine.generate, prompts, counts, 0.0), CLOCKS[asked.clock]))


def read_bandwidth(rounds: int) -> float:
    """Return the bytes per second of the fastest sum over 2 GB."""
    numbers = torch.ones(256 << 20, dtype=torch.int64)
    times = [_seconds(numbers.sum) for _ in range(4 * rounds)]
    return numbers.nbytes / min(times)


def ragged(count: int, inputs: tuple[int, int], outputs: tuple[int, int], seed: int) -> Requests:
    """Return random prompts and output lengths, each uniform between its bounds."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(*inputs))] for _ in range(count)]
    return prompts, [rng.randint(*outputs) for _ in range(count)]


def _seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    run()
    return clock() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(path.name for path in MODELS.iterdir()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scale", type=int, default=4)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default="", help="workloads whose name begins so")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--schemes", nargs="+", default=["plain", "int8", "w8a8", "w4a16"], help="of Ridgeline's weights"
    )
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--gguf")
    parser.add_argument("--gguf-int8")
    parser.add_argument("--gguf-int4")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    bandwidth = read_bandwidth(asked.rounds)
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, load {os.getloadavg()[0]:.1f}", flush=True)
    model = str(MODELS / asked.model)
    engines = {}
    for scheme in asked.schemes:
        held = {} if scheme == "plain" else {"quantization": scheme}
        name = " ".join(["ridgeline", *held.values()])
        engines[name] = Engine("ridgeline", model, asked, {**ALONE, **held})
    engines["transformers"] = Engine("transformers", model, asked, {})
    threads = {"n_threads": asked.threads, "n_threads_batch": asked.threads, "parallel": 8}
    files = {"llama.cpp": asked.gguf, "llama.cpp Q8_0": asked.gguf_int8, "llama.cpp Q4_K_M": asked.gguf_int4}
    for name, path in files.items():
        if path:
            engines[name] = Engine("llama_cpp", path, asked, threads)
    cut = asked.scale
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
        engine.seconds(ragged(2, (16, 16), (4, 4), 7))
    for number, (load, shape) in enumerate(loads.items()):
        if not load.startswith(asked.only):
            continue
        requests = ragged(*shape, seed=number)
        there = {name: e for name, e in engines.items() if shape[0] <= 8 or not name.startswith("llama.cpp")}
        times: dict[str, list[float]] = {name: [] for name in there}
        for _ in range(asked.rounds):
            for name, engine in there.items():
                times[name].append(engine.seconds(requests))
        for name, taken in times.items():
            row = {
                "model": asked.model,
                "dtype": asked.dtype,
                "clock": asked.clock,
                "workload": load,
                "engine": name,
                "tokens_per_s_median": sum(requests[1]) / statistics.median(taken),
                "tokens_per_s_best": sum(requests[1]) / min(taken),
                "speedup_over_transformers_median": statistics.median(times["transformers"]) / statistics.median(taken),
                "speedup_over_transformers_median_of_ratios": statistics.median(
                    theirs / ours for theirs, ours in zip(times["transformers"], taken, strict=True)
                ),
                "speedup_over_transformers_best": min(times["transformers"]) / min(taken),
                "weights_gb_per_s_best": there[name].weights * max(requests[1]) / min(taken) / 1e9,
                "read_gb_per_s": bandwidth / 1e9,
                "rounds": asked.rounds,
                "threads": asked.threads,
                "load_average": os.getloadavg()[0],
                "machine": asdict(host()),
                "date": time.strftime("%Y-%m-%d"),
            }
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            if asked.output:
                with asked.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

"""The CPU path on a model of Qwen3 0.6B's shape, random weights, bfloat16: beside transformers, and int8 beside both.

    python benchmarks/cpu.py [--rounds 5] [--threads 2] [--scale 4] [--output benchmarks/results/cpu.jsonl]

All engines are loaded in one process and take turns, so that what else the machine does falls on all of them alike; the
table has medians and the best of the rounds, and their distance says how noisy it was. Achieved bytes per second count
the weights once per step, beside what a sum over memory reads. --scale divides the ragged batch's lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ridgeline.bench.engines import LoadOptions
from ridgeline.bench.engines.ridgeline import Ridgeline
from ridgeline.bench.engines.transformers import Transformers

MODEL = str(Path(__file__).parent / "models" / "qwen3-0.6b")
VOCABULARY = 150_000
Requests = tuple[list[list[int]], list[int]]


def read_bandwidth(rounds: int) -> float:
    """Bytes per second of the fastest sum over 512 MB."""
    numbers = torch.ones(64 << 20, dtype=torch.int64)
    times = [_seconds(numbers.sum) for _ in range(4 * rounds)]
    return numbers.nbytes / min(times)


def ragged(count: int, inputs: tuple[int, int], outputs: tuple[int, int], seed: int) -> Requests:
    """Random prompts and output lengths, each uniform between its bounds."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(*inputs))] for _ in range(count)]
    return prompts, [rng.randint(*outputs) for _ in range(count)]


def _read_by_a_step(engine: Ridgeline) -> int:
    """Bytes of weights: all but the table that ids are looked up in."""
    decoder = engine.llm.assembly.worker.runner.decoder
    return decoder.weight_bytes - decoder.embed.weight.nbytes


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scale", type=int, default=4)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    options = {"dtype": "bfloat16", "device": "cpu", "dummy": True, "max_model_len": 1024}
    batch_free = {"enable_prefix_caching": False, "max_num_seqs": 16}  # a round must not find the last one's prompts
    engines = {
        "ridgeline": Ridgeline(MODEL, LoadOptions(**options, extra=batch_free)),
        "ridgeline int8": Ridgeline(MODEL, LoadOptions(**options, extra={**batch_free, "quantization": "int8"})),
        "transformers": Transformers(MODEL, LoadOptions(**options)),
    }
    weights = {name: _read_by_a_step(e) for name, e in engines.items() if isinstance(e, Ridgeline)}
    cut = asked.scale
    loads = {
        "batch 1, 16 in, 16 out": ragged(1, (16, 16), (16, 16), 0),
        f"batch 16 ragged, {128 // cut}-{512 // cut} in, {64 // cut}-{256 // cut} out": ragged(
            16, (128 // cut, 512 // cut), (64 // cut, 256 // cut), 1
        ),
    }
    bandwidth = read_bandwidth(asked.rounds)
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, load {os.getloadavg()[0]:.1f}", flush=True)
    for load, (prompts, counts) in loads.items():
        times: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(asked.rounds + 1):
            for name, engine in engines.items():
                seconds = _seconds(partial(engine.generate, prompts, counts, 0.0))
                if turn:  # the first one warms up
                    times[name].append(seconds)
        for name, taken in times.items():
            row = {
                "workload": load,
                "engine": name,
                "tokens_per_s_median": sum(counts) / statistics.median(taken),
                "tokens_per_s_best": sum(counts) / min(taken),
                "speedup_over_transformers_median": statistics.median(times["transformers"]) / statistics.median(taken),
                "speedup_over_transformers_best": min(times["transformers"]) / min(taken),
                "weights_gb_per_s_best": weights.get(name, 0) * max(counts) / min(taken) / 1e9,
                "read_gb_per_s": bandwidth / 1e9,
                "rounds": asked.rounds,
                "threads": asked.threads,
                "load_average": os.getloadavg()[0],
                "torch": str(torch.__version__),
                "date": time.strftime("%Y-%m-%d"),
            }
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            if asked.output:
                with asked.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()

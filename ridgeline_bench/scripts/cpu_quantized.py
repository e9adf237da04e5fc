"""Quantized weights on a CPU beside llama.cpp: time of a token and of a prompt, with one thread and with two.

    python -m ridgeline_bench.scripts.cpu_quantized Q4_K_M.gguf=w4a16 Q8_0.gguf=w8a8 [Q6_K.gguf …] [--model llama-1b]
        [--rounds 7]
        [--threads 1 2] [--only 'batch 1'] [--output benchmarks/results/cpu-quantized.jsonl]

`ridgeline_bench/scripts/random_gguf.py` writes a BF16 file of the same shape, and llama.cpp's `llama-quantize` makes
the others of it. Both engines read them. Behind a file stands the scheme of Ridgeline's own that it is compared with,
if there is one, which gets random weights.

Each engine has a process of its own. They take turns, a few tokens at a time, so that other work on the machine slows
all of them alike: ratios are medians of the rounds' ratios. A token's time is that of so many tokens without the time
of the prompt and the first one. The limit is a token's weights over the rate of a sum of 2 GB, taken in each round.
"""

from __future__ import annotations

import os
import random
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ridgeline_bench.scripts.apart import drawn, in_turn, speedup
from ridgeline_bench.scripts.asked import OneOf, asked, keep
from ridgeline_bench.scripts.cpu import (
    ALONE,
    MODELS,
    VOCABULARY,
    Engine,
    Load,
    Requests,
    engine_of,
    llama_cpp,
    read_bandwidth,
)

TOKENS = 16  # after the first, whose time is taken


@dataclass(frozen=True)
class Work:
    """Some prompts of one length. `tokens` 0: the time is that of the prompts."""

    batch: int
    inputs: int
    tokens: int

    def requests(self, outputs: int) -> Requests:
        prompts = drawn(random.Random(self.batch), self.batch, self.inputs, VOCABULARY)
        return prompts, [outputs] * self.batch

    def seconds(self, engine: Engine) -> float:
        """Return the seconds of the prompts, or those of each further step."""
        first = engine.ask(self.requests(1))
        return (engine.ask(self.requests(1 + self.tokens)) - first) / self.tokens if self.tokens else first


LOADS = {
    "batch 1": Work(1, 8, TOKENS),
    "batch 8": Work(8, 8, TOKENS),
    "prompt of 256": Work(1, 256, 0),
}


def engines(gguf: Path, scheme: str, model: str, threads: int) -> dict[str, tuple[Engine, int]]:
    """Return the engines for a file, each with the bytes of weights that a step reads. llama.cpp comes first."""
    load = Load(threads)
    made = {
        f"llama.cpp {gguf.stem}": llama_cpp(str(gguf), load),
        f"ridgeline {gguf.stem}": engine_of("ridgeline", str(gguf), load, ALONE),
    }
    if scheme:
        own: dict[str, Any] = {**ALONE, "quantization": scheme}
        made[f"ridgeline {scheme}"] = engine_of("ridgeline", str(MODELS / model), load, own)
    return {name: (engine, engine.told or gguf.stat().st_size) for name, engine in made.items()}


def measure(
    there: dict[str, tuple[Engine, int]], load: Work, rounds: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Return each engine's seconds of all rounds, and the memory's rates."""
    ways = {name: partial(load.seconds, engine) for name, (engine, _) in there.items()}
    found = list(in_turn({**ways, "": lambda: read_bandwidth(1)}, rounds))
    return {name: [each[name] for each in found] for name in ways}, [each[""] for each in found]


def rows(
    there: dict[str, tuple[Engine, int]], times: dict[str, list[float]], rates: list[float]
) -> list[dict[str, Any]]:
    """Return a line of the results for each engine."""
    peer, rate = next(iter(times.values())), max(rates)
    return [
        {
            "engine": name,
            "ms_median": 1e3 * statistics.median(taken),
            "ms_best": 1e3 * min(taken),
            "speed_over_llama_cpp_median": speedup(peer, taken),
            "speed_over_llama_cpp_best": min(peer) / min(taken),
            "weights_gb": there[name][1] / 1e9,
            "limit_ms": 1e3 * there[name][1] / rate,
            "read_gb_per_s": rate / 1e9,
        }
        for name, taken in times.items()
    ]


def main() -> None:
    a = asked(
        __doc__, "files...",  model=OneOf(("llama-1b", *sorted(p.name for p in MODELS.iterdir()))),
        rounds=7, threads=[1, 2], only=("", "workloads whose name begins so"), output=Path,
    )  # fmt: skip
    for threads in a.threads:
        torch.set_num_threads(threads)
        for name in a.files:
            path, _, scheme = name.partition("=")
            there = engines(Path(path), scheme, a.model, threads)
            for engine, _ in there.values():
                engine.ask(Work(8, 4, 1).requests(2))  # warm
            for workload, load in LOADS.items():
                if not workload.startswith(a.only):
                    continue
                common = {
                    "model": a.model,
                    "workload": workload,
                    "threads": threads,
                    "rounds": a.rounds,
                    "load_average": os.getloadavg()[0],
                }
                for row in rows(there, *measure(there, load, a.rounds)):
                    report({**row, **common}, a.output)
            for engine, _ in there.values():
                engine.close()


def report(row: dict[str, Any], output: Path | None) -> None:
    """Print a line, and append it to the file."""
    print(
        f"{row['threads']} threads, {row['workload']:13} {row['engine']:18} {row['ms_median']:8.1f} ms"
        f" (best {row['ms_best']:.1f}, limit {row['limit_ms']:.1f} at {row['read_gb_per_s']:.1f} GB/s),"
        f" {row['speed_over_llama_cpp_median']:.2f} of llama.cpp's speed (best {row['speed_over_llama_cpp_best']:.2f})",
        flush=True,
    )
    keep(output, row)


if __name__ == "__main__":
    main()

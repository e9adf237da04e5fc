"""One model through our own layers and through transformers' modules, with the same engine around them.

    python -m ridgeline_bench.scripts.model_impl [--model benchmarks/models/random-25m benchmarks/models/qwen3-0.6b]
        [--layers 6] [--requests 8] [--prompt 128] [--tokens 64] [--rounds 5] [--threads 1]
        [--device cpu] [--dtype float32] [--output benchmarks/results/model-impl-cpu.jsonl]

Weights are random, and both ways have the same sizes. Each way has a process of its own, and they take turns. "share"
is the rate through transformers' modules over ours: the median of the rounds' ratios.

    decode     one token of a prompt, and so many tokens written, by all requests at once
    prefill    so many prompts, of which one token is written
"""

from __future__ import annotations

import os
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ridgeline import LLM, SamplingParams
from ridgeline_bench.scripts.apart import Apart, as_prompts, drawn, in_turn, speedup
from ridgeline_bench.scripts.asked import asked, keep

Asked = tuple[list[list[int]], int]
IMPLS = ("ridgeline", "transformers")


def way(settings: dict[str, Any], threads: int) -> tuple[int, Callable[[Asked], float]]:
    """Return the vocabulary, and a function that returns the seconds that generating takes."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    llm = LLM(**settings)

    def answer(question: Asked) -> float:
        prompts, tokens = question
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        started = time.perf_counter()
        llm.generate(as_prompts(prompts), params, use_tqdm=False)
        return time.perf_counter() - started

    return llm.assembly.model.spec.vocab_size, answer


def main() -> None:
    a = asked(
        __doc__, model=["benchmarks/models/random-25m", "benchmarks/models/qwen3-0.6b"], layers=6, requests=8,
        prompt=128, tokens=64, rounds=5, threads=1, device="cpu", dtype="float32", output=Path,
    )  # fmt: skip
    table = Table("model", "kind", "ridgeline, tokens/s", "transformers, tokens/s", "share")
    for model in a.model:
        for row in _measured(a, model):
            table.add_row(*row)
    Console(width=120).print(table)


def _measured(a: Namespace, model: str) -> list[tuple[str, ...]]:
    """Return the table's rows of a model."""
    settings = {
        "model": model, "device": a.device, "dtype": a.dtype, "load_format": "dummy", "skip_tokenizer_init": True,
        "max_model_len": 1024, "enable_prefix_caching": False, "max_num_seqs": a.requests,
        "kv_cache_memory": 1 << (28 if a.device == "cpu" else 33),
        "hf_overrides": {"num_hidden_layers": a.layers},
    }  # fmt: skip
    ways: dict[str, Apart[Asked, float]]
    ways = {impl: Apart(way, {**settings, "model_impl": impl}, a.threads) for impl in IMPLS}
    draw, found = random.Random(1), []
    for kind, length, tokens in (("decode", 1, a.tokens), ("prefill", a.prompt, 1)):
        prompts = drawn(draw, a.requests, length, ways["ridgeline"].told)
        asks = {impl: lambda each=each, own=prompts, n=tokens: each.ask((own, n)) for impl, each in ways.items()}
        next(in_turn(asks, 1))  # the first run allocates
        rounds = list(in_turn(asks, a.rounds))
        seconds = {impl: [each[impl] for each in rounds] for impl in IMPLS}
        count = a.requests * (tokens if kind == "decode" else length)
        rates = {impl: count / statistics.median(seconds[impl]) for impl in IMPLS}
        share = speedup(seconds["ridgeline"], seconds["transformers"])
        keep(a.output, _line(a, model, kind, rates, share))
        found.append((Path(model).name, kind, *(f"{rates[impl]:,.0f}" for impl in IMPLS), f"{share:.2f}"))
    for each in ways.values():
        each.close()
    return found


def _line(a: Namespace, model: str, kind: str, rates: dict[str, float], share: float) -> dict[str, object]:
    names = ("layers", "requests", "prompt", "tokens", "rounds", "threads", "device", "dtype")
    sizes = {name: getattr(a, name) for name in names}
    rates = {f"{impl}_tokens_per_second": rate for impl, rate in rates.items()}
    return {"workload": "model impl", "model": Path(model).name, "kind": kind, **rates, "share": share, **sizes}


if __name__ == "__main__":
    main()

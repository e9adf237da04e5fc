"""Prompts that come back from the host's memory beside prompts that run again, and what a tier costs that is not used.

    python -m ridgeline_bench.scripts.host_resume [--model FOLDER] [--beside FOLDER] [--tokens 32768] [--rounds 3]
        [--pairs 10] [--device cuda] [--output FILE.jsonl] [--commit HASH]

Weights are random. The cache of --model holds one prompt of --tokens and a fourth more.

    again      a prompt that no cache has
    host       the same prompt, once another one has pushed it out to the host's memory. The check: all of its whole
               blocks are found, and the tokens are those of a hit on the device
    unused     --pairs times in turns, decode steps of 256 requests of --beside by an engine without a tier and by one
               whose tier has nothing to do; milliseconds a step
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ridgeline import LLM, SamplingParams
from ridgeline.core.settings.cache import DEFAULT_BLOCK_SIZE
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.engine.engine import Engine
from ridgeline.offline.jobs import TokensPrompt
from ridgeline.weights.loader import read_model_config
from ridgeline.worker.machine import device_name
from ridgeline_bench.scripts.asked import asked, keep

GIB = 1 << 30
ROWS, PROMPT, FEW, MANY = 256, 48, 8, 136
FILLER = 2048  # tokens of prompts that push others out; 4,096 of an 8B fill the staging memory to its last byte


def resumed(settings: dict[str, Any], tokens: int, rounds: int) -> dict[str, float]:
    """Return the seconds of prompts that run and of those that come back, and the bytes and seconds of loads."""
    draw = random.Random(5)
    with LLM(**settings) as llm:
        top = llm.assembly.model.spec.vocab_size
        size = _engine(llm).layout.block_size
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

        def ask(prompt: list[int]) -> tuple[float, int, tuple[int, ...]]:
            start = time.perf_counter()
            [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            return seconds, output.num_cached_tokens or 0, tuple(output.outputs[0].token_ids)

        again, host, before = list[float](), list[float](), (0.0, 0.0)
        for number in range(rounds + 1):  # the first one prepares code and memory
            if number == 1:
                again, host, before = [], [], _moved(llm)
            prompt = [draw.randrange(10, top) for _ in range(tokens)]
            again.append(ask(prompt)[0])
            on_device = ask(prompt)[2]
            for _ in range(-(-tokens * 3 // 2 // FILLER)):  # no step evicts more than may be on its way to the host
                ask([draw.randrange(10, top) for _ in range(min(FILLER, tokens))])
            seconds, cached, found = ask(prompt)
            host.append(seconds)
            if cached < (tokens - 1) // size * size:
                raise SystemExit(f"{cached} tokens of {tokens} were found; all whole blocks should be.")
            if found != on_device:
                raise SystemExit("a prompt from the host's memory goes on in other tokens than one from the device.")
        loaded, took = (now - then for now, then in zip(_moved(llm), before, strict=True))
    return {
        "again_seconds": statistics.median(again),
        "host_seconds": statistics.median(host),
        "loaded_bytes": loaded,
        "load_seconds": took,
    }


def _moved(llm: LLM) -> tuple[float, float]:
    """Return the bytes that came from the host's memory so far, and the seconds of these copies."""
    tier = _engine(llm).scheduler.cache.tier
    assert tier is not None
    found = tier.figures()
    return found["loaded"], found.get("load_seconds", 0.0)


def _engine(llm: LLM) -> Engine:
    assert isinstance(llm.engine, Engine)
    return llm.engine


def step(llm: LLM, prompts: Sequence[TokensPrompt]) -> float:
    """Return the seconds of a decode step of all prompts together, from two runs of unlike numbers of tokens."""
    seconds = dict[int, float]()
    for count in (FEW, MANY):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds[count] = time.perf_counter() - start
    return (seconds[MANY] - seconds[FEW]) / (MANY - FEW)


def unused(settings: dict[str, Any], pairs: int, rows: int) -> list[tuple[float, float]]:
    """Return the seconds of a decode step without a tier and with one, in turns."""
    draw = random.Random(6)
    with LLM(**settings) as plain, LLM(**settings, kv_offloading_size=4.0) as tiered:
        top = plain.assembly.model.spec.vocab_size
        prompts: list[TokensPrompt] = [
            {"prompt_token_ids": [draw.randrange(10, top) for _ in range(PROMPT)]} for _ in range(rows)
        ]
        for llm in (plain, tiered):
            step(llm, prompts)
        found = list[tuple[float, float]]()
        for number in range(pairs):
            order = (plain, tiered)[:: -1 if number % 2 else 1]
            times = {llm: step(llm, prompts) for llm in order}
            found.append((times[plain], times[tiered]))
    return found


def main() -> None:
    a = asked(
        __doc__,
        model="benchmarks/models/llama-8b",
        beside="benchmarks/models/llama-1b",
        tokens=32_768,
        rounds=3,
        pairs=10,
        rows=ROWS,
        device="cuda",
        dtype="bfloat16",
        output=("", "a file to which lines are added"),
        commit="",
    )
    output = Path(a.output) if a.output else None
    about = {"kind": "host resume", "device": device_name(torch.device(a.device)), "torch": torch.__version__}
    about["commit"] = a.commit
    common = {"load_format": "dummy", "skip_tokenizer_init": True, "device": a.device, "dtype": a.dtype}
    most = 8192 if a.device == "cuda" else 512
    groups, size = read_model_config(Path(a.model)).spec.cache_groups, DEFAULT_BLOCK_SIZE[a.device]
    layout = CacheLayout(groups=groups, block_size=size, dtype=a.dtype, num_pages=2)
    pages = 1 + layout.pages_needed(a.tokens + 64, most) * 5 // 4
    bytes_of = {"kv_cache_memory": pages * layout.page_bytes, "kv_offloading_size": 3 * pages * layout.page_bytes / GIB}
    settings = {"model": a.model, **common, "max_model_len": a.tokens + 64, "max_num_seqs": 2, **bytes_of}
    found = resumed(settings | {"max_num_batched_tokens": most}, a.tokens, a.rounds)
    rate = found["loaded_bytes"] / found["load_seconds"] / 1e9 if found["load_seconds"] else 0.0
    again, host = found["again_seconds"], found["host_seconds"]
    print(
        f"again {1e3 * again:.0f} ms, from the host {1e3 * host:.0f} ms: {again / host:.2f} times as fast", flush=True
    )
    print(f"loads at {rate:.1f} GB/s", flush=True)
    keep(output, {**about, "model": Path(a.model).name, "tokens": a.tokens, **found})
    settings = {"model": a.beside, **common, "max_model_len": 512, "max_num_seqs": a.rows, "kv_cache_memory": 4 * GIB}
    times = unused(settings, a.pairs, a.rows)
    ratios = [with_tier / without for without, with_tier in times]
    gaps = [1e6 * (with_tier - without) for without, with_tier in times]
    print(f"a step without a tier {1e3 * statistics.median(x for x, _ in times):.3f} ms; with one that is not used "
          f"{statistics.median(gaps):+.1f} us in the median of {len(gaps)} pairs, {min(gaps):+.1f} to {max(gaps):+.1f} "
          f"({statistics.median(ratios):.4f} times)")  # fmt: skip
    keep(output, {**about, "model": Path(a.beside).name, "rows": a.rows, "pairs": times})


if __name__ == "__main__":
    main()

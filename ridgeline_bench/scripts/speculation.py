"""Speculative decoding beside plain decoding on a CPU, with proposers of known quality.

    python -m ridgeline_bench.scripts.speculation [--model FOLDER] [--dummy] [--threads 2] [--rounds 5]
        [--batches 1 4 16]
        [--tokens 128] [--drafts 4] [--ways lookup eagle3] [--draft FOLDER]
        [--eagle3 FOLDER] [--medusa FOLDER]
        [--output benchmarks/results/speculation-cpu.jsonl]

Each way has a process of its own, and they take turns, so that other work on the machine slows all of them alike: the
speedup is the median of the rounds' ratios to plain decoding.

    plain      no drafts
    lookup     prompt lookup, which takes at least one and at most three tokens
    draft      a draft model: that of the embedded model, or the one that is named
    eagle3, medusa    heads, if they are named
    skip       the model itself without every other layer
    lookahead  lookahead decoding, with its default sizes: --drafts means nothing to it
    cascade    prompt lookup, and the draft model where that finds nothing
    right P    drafts of the known continuation, each of which is spoiled with probability 1 - P. Only a proposer that
               runs no model can know it, so this is what a free proposer of that quality would bring
    wrong      drafts that are never right

The embedded model goes on with pieces of this project's own code. It runs in float32: in bfloat16 products of several
rows round otherwise, and known continuations would end where the first token differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ridgeline import LLM, SamplingParams
from ridgeline_bench.results import host
from ridgeline_bench.scripts.told_drafts import tell

LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
LENGTH = 600  # characters of a prompt of text
Texts = list[list[int]]


class Known:
    """A proposer that knows the texts. share: the probability that a draft is right if those before it are."""

    def __init__(self, texts: Texts, share: float) -> None:
        self._share, self._draw = share, random.Random(0)
        self._texts = {tuple(text[:8]): np.array(text, np.int32) for text in texts}

    def propose(self, known_N: np.ndarray, count: int) -> np.ndarray:
        text = self._texts.get(tuple(known_N[:8].tolist()), known_N)
        drafts = text[len(known_N) : len(known_N) + count].copy()
        for place in range(len(drafts)):
            if self._draw.random() >= self._share:
                drafts[place] += 1 if drafts[place] == 0 else -1
        return drafts


def serve(pipe: Connection, settings: dict[str, Any], threads: int, share: float | None) -> None:
    """Generate what is asked for, until the other end is gone."""
    torch.set_num_threads(threads)
    llm = LLM(**settings)
    with suppress(EOFError):
        while True:
            prompts, tokens, texts = pipe.recv()
            if share is not None:
                tell(llm.assembly.local.runner, Known(texts, share).propose)
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            before = llm.assembly.engine.scheduler.figures().drafts or {}
            started = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            seconds = time.perf_counter() - started
            after = llm.assembly.engine.scheduler.figures().drafts or {}
            counts = {name: after[name] - before.get(name, 0) for name in after}
            pipe.send((seconds, [list(output.outputs[0].token_ids) for output in outputs], counts))


class Way:
    """A process that generates in one way."""

    def __init__(self, settings: dict[str, Any], threads: int, share: float | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        context.Process(target=serve, args=(other, settings, threads, share), daemon=True).start()

    def run(self, prompts: Texts, tokens: int, texts: Texts) -> tuple[float, Texts, dict[str, int]]:
        self._pipe.send((prompts, tokens, texts))
        found: tuple[float, Texts, dict[str, int]] = self._pipe.recv()
        return found


def prompts_of(llm: LLM, count: int) -> Texts:
    """Return pieces of the project's own code, or random tokens for a model of random weights."""
    draw = random.Random(1)
    if llm.config.skip_tokenizer_init:
        return [[draw.randrange(3, llm.assembly.model.spec.vocab_size) for _ in range(150)] for _ in range(count)]
    files = sorted((Path(__file__).parents[2] / "ridgeline").rglob("*.py"))
    long = [text for file in files if len(text := file.read_text(encoding="utf-8")) > 4 * LENGTH]
    return [llm.get_tokenizer().encode(text[LENGTH : 2 * LENGTH]) for text in draw.sample(long, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--ways", nargs="+", help="beside plain (default: all that there is a model for)")
    parser.add_argument("--draft", help="folder of a draft model")
    parser.add_argument("--eagle3", help="folder of a head of EAGLE-3")
    parser.add_argument("--medusa", help="folder of Medusa's heads")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    settings: dict[str, Any] = {
        "model": asked.model,
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 1024,
        "enable_prefix_caching": False,
        "kv_cache_memory": 1 << 29,
    }
    if asked.dummy:
        settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
    drafts = {**settings, "speculative_config": {**LOOKUP, "num_speculative_tokens": asked.drafts}}
    shares = {"right 0.8": 0.8, "right 0.6": 0.6, "wrong": 0.0}
    with LLM(**settings) as llm:
        prompts_by = {batch: prompts_of(llm, batch) for batch in asked.batches}
    model = {"method": "draft_model", "num_speculative_tokens": asked.drafts}
    model |= {"model": asked.draft} if asked.draft else {}
    known: dict[str, tuple[dict[str, Any], float | None]] = {"lookup": (drafts, None)}
    if asked.draft or not asked.model:
        known["draft"] = {**settings, "speculative_config": model}, None
    names = {"skip": {"method": "layer_skip"}}
    if "draft" in known:
        names["cascade"] = {**LOOKUP, **model}
    heads = {"eagle3": asked.eagle3, "medusa": asked.medusa}
    names |= {method: {"method": method, "model": folder} for method, folder in heads.items() if folder}
    for name, config in names.items():
        known[name] = {**settings, "speculative_config": {**config, "num_speculative_tokens": asked.drafts}}, None
    known["lookahead"] = {**settings, "speculative_config": {"method": "lookahead"}}, None
    known |= {name: (drafts, share) for name, share in shares.items()}
    ways = {"plain": Way(settings, asked.threads, None)}
    ways |= {name: Way(known[name][0], asked.threads, known[name][1]) for name in asked.ways or known}
    table = Table(*("batch", *ways), title=f"{asked.model or 'embedded model'}, tokens/s (speedup)")
    for batch, prompts in prompts_by.items():
        texts = [a + b for a, b in zip(prompts, ways["plain"].run(prompts, asked.tokens, [])[1], strict=True)]
        times: dict[str, list[float]] = {name: [] for name in ways}
        counts: dict[str, dict[str, int]] = {}
        same: dict[str, float] = {}
        for number in range(asked.rounds + 1):  # the first one warms up
            for name, way in ways.items():
                seconds, tokens, counts[name] = way.run(prompts, asked.tokens, texts)
                same[name] = statistics.mean(a + b == text for a, b, text in zip(prompts, tokens, texts, strict=True))
                if number:
                    times[name].append(seconds)
        cells = []
        for name in ways:
            speedup = statistics.median(a / b for a, b in zip(times["plain"], times[name], strict=True))
            rate = batch * asked.tokens / statistics.median(times[name])
            made = counts[name]
            length = 1 + made["accepted_tokens"] / made["drafts"] if made.get("drafts") else 1.0
            cells.append(f"{rate:,.0f} ({speedup:.2f}; {length:.1f})")
            line = {
                "workload": "speculation",
                "model": Path(asked.model).name or "embedded",
                "way": name,
                "batch": batch,
                "tokens": asked.tokens,
                "drafts": asked.drafts,
                "tokens_per_second": rate,
                "speedup": speedup,
                "tokens_of_a_row": length,
                "texts_as_plain": same[name],
                "counts": made,
                "rounds": asked.rounds,
                "threads": asked.threads,
                "date": time.strftime("%Y-%m-%d"),
                **asdict(host()),
            }
            if asked.output is not None:
                with asked.output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        table.add_row(str(batch), *cells)
    Console(width=140).print(table, "in brackets: speedup; tokens of a row that verified drafts")


if __name__ == "__main__":
    main()

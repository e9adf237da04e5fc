"""Prompt lookup with and without what other requests wrote, on a CPU.

    python -m ridgeline_bench.scripts.recent_outputs [--requests 16] [--at-once 1 4 16] [--tokens 128] [--drafts 4]
        [--longest 3 5]
        [--rounds 5] [--threads 2] [--recent 65536] [--output benchmarks/results/recent-outputs-cpu.jsonl]

Each round takes another file of this project. "alike": all requests want it continued from the same place, with unlike
first lines and one name of it changed. "unlike": each request has a file of its own, so others wrote nothing of use.
Each way has a process of its own, and they take turns, as in speculation.py.

    plain            no drafts
    own N            prompt lookup in a request's own text: at least one token (N = 3) or N, and N at most
    recent N         the same, and n-grams of N tokens in what all requests wrote
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline import LLM
from ridgeline_bench.results import host
from ridgeline_bench.scripts.speculation import LENGTH, Texts, Way

NAMES = ("value", "item", "entry", "part", "thing", "piece", "element", "object")


def files() -> list[str]:
    """Return pieces of this project's files, as many characters each as a prompt has."""
    paths = sorted((Path(__file__).parents[2] / "ridgeline").rglob("*.py"))
    long = [text for path in paths for text in [path.read_text(encoding="utf-8")] if len(text) > 4 * LENGTH]
    return [text[LENGTH : 2 * LENGTH] for text in long]


def alike(text: str, count: int, draw: random.Random) -> list[str]:
    """Return prompts for nearly the same file: another first line each, and another name for one of its words."""
    words = [word for word in set(re.findall(r"\b[a-z]{4,}\b", text)) if text.count(word) == 1] or ["self"]
    return [
        f"# {draw.randrange(10**6)}: {draw.choice(NAMES)}\n"
        + text.replace(draw.choice(sorted(words)), draw.choice(NAMES), 1)
        for _ in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--longest", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--recent", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    table = Table("requests", "at once", "plain, tokens/s", *_names(asked.longest), title="speedup; tokens of a row")
    for at_once in asked.at_once:
        ways = _ways(asked, at_once)
        for kind in ("alike", "unlike"):
            table.add_row(kind, str(at_once), *_measured(asked, at_once, kind, ways))
    Console(width=140).print(table)


def _names(lengths: list[int]) -> list[str]:
    return [f"{kind} {longest}" for longest in lengths for kind in ("own", "recent")]


def _ways(asked: argparse.Namespace, at_once: int) -> dict[str, Way]:
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": at_once,
        "enable_prefix_caching": False,
        "kv_cache_memory": 1 << 29,
    }
    ways = {"plain": Way(settings, asked.threads, None)}
    for longest in asked.longest:
        config = {"method": "ngram", "num_speculative_tokens": asked.drafts, "prompt_lookup_max": longest}
        config |= {"prompt_lookup_min": 1 if longest == 3 else longest}
        for kind, recent in (("own", 0), ("recent", asked.recent)):
            config = {**config, "lookup_recent_tokens": recent}
            ways[f"{kind} {longest}"] = Way({**settings, "speculative_config": config}, asked.threads, None)
    return ways


def _measured(asked: argparse.Namespace, at_once: int, kind: str, ways: dict[str, Way]) -> list[str]:
    """Measure all ways. Return the cells of a row of the table."""
    draw = random.Random(at_once)
    pieces = draw.sample(files(), (asked.rounds + 1) * asked.requests)
    with LLM(device="cpu") as llm:
        encode = llm.get_tokenizer().encode
    times: dict[str, list[float]] = {name: [] for name in ways}
    counts: dict[str, list[dict[str, int]]] = {name: [] for name in ways}
    same: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(asked.rounds + 1):  # the first one warms up
        own = pieces[number * asked.requests : (number + 1) * asked.requests]
        texts = alike(own[0], asked.requests, draw) if kind == "alike" else own
        prompts: Texts = [encode(text) for text in texts]
        want: Texts = []
        for name, way in ways.items():
            seconds, written, made = way.run(prompts, asked.tokens, [])
            want = want or written
            if number:
                times[name].append(seconds)
                counts[name].append(made)
                same[name].append(statistics.mean(a == b for a, b in zip(written, want, strict=True)))
    cells = [f"{asked.requests * asked.tokens / statistics.median(times['plain']):,.0f}"]
    for name in ways:
        speedup = statistics.median(a / b for a, b in zip(times["plain"], times[name], strict=True))
        verified = sum(made.get("drafts", 0) for made in counts[name])
        right = sum(made.get("accepted_tokens", 0) for made in counts[name])
        emitted = asked.rounds * asked.requests * asked.tokens
        line = {
            "workload": "recent outputs",
            "model": "embedded",
            "kind": kind,
            "way": name,
            "requests": asked.requests,
            "at_once": at_once,
            "tokens": asked.tokens,
            "drafts": asked.drafts,
            "recent": asked.recent if name.startswith("recent") else 0,
            "tokens_per_second": asked.requests * asked.tokens / statistics.median(times[name]),
            "speedup": speedup,
            "tokens_of_a_row": 1 + right / verified if verified else 1.0,
            "share_drafted": right / emitted,
            "texts_as_plain": statistics.mean(same[name]),
            "rounds": asked.rounds,
            "threads": asked.threads,
            "date": time.strftime("%Y-%m-%d"),
            **asdict(host()),
        }
        if asked.output is not None:
            with asked.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        if name != "plain":
            cells.append(f"{speedup:.2f}; {line['tokens_of_a_row']:.2f} ({line['share_drafted']:.2f})")
    return cells


if __name__ == "__main__":
    main()

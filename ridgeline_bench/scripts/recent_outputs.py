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

import random
import re
import statistics
from argparse import Namespace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ridgeline import LLM
from ridgeline_bench.scripts.apart import Apart, own_code, speedup
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.speculation import LENGTH, Asked, Texts, Written, settings_of, way

Way = Apart[Asked, Written]
NAMES = ("value", "item", "entry", "part", "thing", "piece", "element", "object")


def alike(text: str, count: int, draw: random.Random) -> list[str]:
    """Return prompts for nearly the same file: another first line each, and another name for one of its words."""
    words = [word for word in set(re.findall(r"\b[a-z]{4,}\b", text)) if text.count(word) == 1] or ["self"]
    return [
        f"# {draw.randrange(10**6)}: {draw.choice(NAMES)}\n"
        + text.replace(draw.choice(sorted(words)), draw.choice(NAMES), 1)
        for _ in range(count)
    ]


def main() -> None:
    a = asked(
        __doc__, requests=16, at_once=[1, 4, 16], tokens=128, drafts=4, longest=[3, 5], recent=65_536, rounds=5,
        threads=2, output=Path,
    )  # fmt: skip
    table = Table("requests", "at once", "plain, tokens/s", *_names(a.longest), title="speedup; tokens of a row")
    for at_once in a.at_once:
        ways = _ways(a, at_once)
        for kind in ("alike", "unlike"):
            table.add_row(kind, str(at_once), *_measured(a, at_once, kind, ways))
    Console(width=140).print(table)


def _names(lengths: list[int]) -> list[str]:
    return [f"{kind} {longest}" for longest in lengths for kind in ("own", "recent")]


def _ways(a: Namespace, at_once: int) -> dict[str, Way]:
    settings = settings_of(max_num_seqs=at_once)
    ways: dict[str, Way] = {"plain": Apart(way, settings, a.threads, None)}
    for longest in a.longest:
        config = {"method": "ngram", "num_speculative_tokens": a.drafts, "prompt_lookup_max": longest}
        config |= {"prompt_lookup_min": 1 if longest == 3 else longest}
        for kind, recent in (("own", 0), ("recent", a.recent)):
            config = {**config, "lookup_recent_tokens": recent}
            own = {**settings, "speculative_config": config}
            ways[f"{kind} {longest}"] = Apart(way, own, a.threads, None)
    return ways


def _measured(a: Namespace, at_once: int, kind: str, ways: dict[str, Way]) -> list[str]:
    """Measure all ways. Return the cells of a row of the table."""
    draw = random.Random(at_once)
    pieces = draw.sample(own_code(LENGTH), (a.rounds + 1) * a.requests)
    with LLM(device="cpu") as llm:
        encode = llm.get_tokenizer().encode
    times: dict[str, list[float]] = {name: [] for name in ways}
    counts: dict[str, list[dict[str, int]]] = {name: [] for name in ways}
    same: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(a.rounds + 1):  # the first one warms up
        own = pieces[number * a.requests : (number + 1) * a.requests]
        texts = alike(own[0], a.requests, draw) if kind == "alike" else own
        prompts: Texts = [encode(text) for text in texts]
        want: Texts = []
        for name, each in ways.items():
            seconds, _, written, made, *_ = each.ask(Asked(prompts, a.tokens, [], 0.0))
            want = want or written
            if number:
                times[name].append(seconds)
                counts[name].append(made)
                same[name].append(statistics.mean(one == other for one, other in zip(written, want, strict=True)))
    cells = [f"{a.requests * a.tokens / statistics.median(times['plain']):,.0f}"]
    for name in ways:
        faster = speedup(times["plain"], times[name])
        verified = sum(made.get("drafts", 0) for made in counts[name])
        right = sum(made.get("accepted_tokens", 0) for made in counts[name])
        emitted = a.rounds * a.requests * a.tokens
        line = {
            "workload": "recent outputs",
            "model": "embedded",
            "kind": kind,
            "way": name,
            "requests": a.requests,
            "at_once": at_once,
            "tokens": a.tokens,
            "drafts": a.drafts,
            "recent": a.recent if name.startswith("recent") else 0,
            "tokens_per_second": a.requests * a.tokens / statistics.median(times[name]),
            "speedup": faster,
            "tokens_of_a_row": 1 + right / verified if verified else 1.0,
            "share_drafted": right / emitted,
            "texts_as_plain": statistics.mean(same[name]),
            "rounds": a.rounds,
            "threads": a.threads,
        }
        keep(a.output, line)
        if name != "plain":
            cells.append(f"{faster:.2f}; {line['tokens_of_a_row']:.2f} ({line['share_drafted']:.2f})")
    return cells


if __name__ == "__main__":
    main()

"""Drafts of requests with token masks, beside plain decoding on a CPU.

    python -m ridgeline_bench.scripts.masked_drafts [--rounds 7] [--batches 1 4] [--drafts 4] [--threads 2]
        [--output benchmarks/results/masked-drafts-cpu.jsonl]

The embedded model answers in float32, with its likeliest tokens, within

    records    an array of JSON objects, whose keys are forced
    text       a JSON object with one long text, in which nothing is
    words      text without some bad words: nothing is forced, and lookup finds what repeats

One engine has no drafts, one those that are forced, and one those of prompt lookup too. They take turns, so that other
work on the machine slows all alike: a speedup is the median of the rounds' ratios to plain decoding. The host's time is
that in which it finds masks and drafts for a step, in microseconds: the median, and the 99th percentile.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor, LLTokenizer
from rich.console import Console
from rich.table import Table

from ridgeline import LLM, SamplingParams
from ridgeline.core.plan.request import Request, TokenMask
from ridgeline.serving.grammars.grammar import matcher
from ridgeline.serving.grammars.kept import Compiled
from ridgeline.serving.grammars.masks import GrammarMask
from ridgeline.transport.messages import Grammar
from ridgeline_bench.scripts.apart import in_turn, own_code, speedup
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.speculation import LENGTH, LOOKUP, row_length, settings_of

RECORD = {
    "type": "object",
    "properties": {
        "function_name": {"type": "string", "maxLength": 12},
        "visibility": {"enum": ["public", "private", "protected"]},
        "line_number": {"type": "integer", "minimum": 1, "maximum": 999},
        "is_deprecated": {"type": "boolean"},
    },
    "required": ["function_name", "visibility", "line_number", "is_deprecated"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "records": {"type": "array", "items": RECORD, "minItems": 4, "maxItems": 4},
    "text": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 600}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
TOKENS = 128  # of an output at most


class Engine:
    """One of the ways. looks_up: prompt lookup drafts too."""

    def __init__(self, settings: dict[str, Any], *, looks_up: bool = False) -> None:
        self.llm = LLM(**settings)
        self._engine, self._vocab = self.llm.assembly.engine, self.llm.assembly.model.spec.vocab_size
        texts = self.llm.get_tokenizer().backend.to_str()
        self._tokenizer, self._executor = LLTokenizer(texts, self._vocab, [0]), LLExecutor()
        self._grammars = {
            name: Compiled(matcher(Grammar(kind="json", text=json.dumps(schema)), self._tokenizer), self._tokenizer)
            for name, schema in SCHEMAS.items()
        }
        scheduler = self._engine.scheduler
        scheduler.config = replace(scheduler.config, lookup=scheduler.config.lookup if looks_up else (0, 0))
        self.host: list[float] = []
        due = self._engine.scheduler.masks_due

        def timed() -> Any:
            started = time.perf_counter()
            found = due()
            if found is not None:
                self.host.append(time.perf_counter() - started)
            return found

        self._engine.scheduler.masks_due = timed  # type: ignore[method-assign]

    def run(self, case: str, prompts: list[list[int]]) -> tuple[float, list[list[int]], dict[str, int]]:
        """Return the seconds, the tokens and the counts of drafts."""
        self.host.clear()
        before = self._engine.scheduler.figures().drafts or {}
        for number, prompt in enumerate(prompts):
            grammar = self._grammars.get(case)
            mask: TokenMask | None = grammar and GrammarMask(grammar, self._executor)
            bad = None if grammar else [[700, 701], [9]]
            params = SamplingParams(temperature=0, max_tokens=TOKENS, bad_words=bad)
            self._engine.add(
                Request(
                    id=str(number),
                    prompt_token_ids=tuple(prompt),
                    params=params,
                    seed=0,
                    max_total_tokens=len(prompt) + TOKENS,
                    stop_ids=frozenset([0]),
                    token_mask=mask,
                    lookahead=1,
                )
            )
        tokens: list[list[int]] = [[] for _ in prompts]
        started = time.perf_counter()
        while self._engine.has_work:
            for event in self._engine.step():
                assert event.error is None
                tokens[int(event.request_id)].append(event.token_id)
        seconds = time.perf_counter() - started
        after = self._engine.scheduler.figures().drafts or {}
        return seconds, tokens, {name: int(after[name] - before.get(name, 0)) for name in after}


def prompts_of(llm: LLM, count: int) -> list[list[int]]:
    """Return pieces of the project's own code."""
    long = own_code(LENGTH)
    return [llm.get_tokenizer().encode(text) for text in long[:: len(long) // count][:count]]


def main() -> None:
    a = asked(__doc__, rounds=7, batches=[1, 4], drafts=4, threads=2, output=Path)
    torch.set_num_threads(a.threads)
    settings = settings_of(kv_cache_memory=1 << 28)
    drafts = {**settings, "speculative_config": {**LOOKUP, "num_speculative_tokens": a.drafts}}
    ways = {"plain": Engine(settings), "forced": Engine(drafts), "lookup": Engine(drafts, looks_up=True)}
    table = Table("case", "batch", *ways, title="tokens/s (speedup; tokens of a row that verified drafts; host, µs)")
    for case in (*SCHEMAS, "words"):
        for batch in a.batches:
            prompts = prompts_of(ways["plain"].llm, batch)
            hosts: dict[str, list[float]] = {name: [] for name in ways}
            found: list[dict[str, Any]] = []
            for each in in_turn({name: partial(way.run, case, prompts) for name, way in ways.items()}, a.rounds + 1):
                for name, way in ways.items():
                    hosts[name] += [1e6 * each for each in way.host] if found else []  # the first round warms up
                found.append(each)
            times = {name: [each[name][0] for each in found[1:]] for name in ways}
            outputs, counts = ({name: found[-1][name][place] for name in ways} for place in (1, 2))
            cells, made = [], sum(map(len, outputs["plain"]))
            for name in ways:
                rate, drafted = made / statistics.median(times[name]), counts[name]
                faster, length = speedup(times["plain"], times[name]), row_length(drafted)
                median, worst = (float(np.percentile(hosts[name], p)) for p in (50, 99))
                cells.append(f"{rate:.0f} ({faster:.2f}; {length:.1f}; {median:.0f} to {worst:.0f})")
                line = {
                    "workload": "masked drafts",
                    "case": case,
                    "way": name,
                    "batch": batch,
                    "tokens": made,
                    "drafts": a.drafts,
                    "tokens_per_second": rate,
                    "speedup": faster,
                    "tokens_of_a_row": length,
                    "texts_as_plain": outputs["plain"] == outputs[name],
                    "host_microseconds": {"median": median, "p99": worst},
                    "counts": drafted,
                    "rounds": a.rounds,
                    "threads": a.threads,
                }
                keep(a.output, line)
            table.add_row(case, str(batch), *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

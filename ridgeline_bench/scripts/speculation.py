"""Speculative decoding beside plain decoding on a CPU, with proposers of known quality.

    python -m ridgeline_bench.scripts.speculation [--model FOLDER] [--dummy] [--threads 2] [--rounds 5]
        [--batches 1 4 16]
        [--tokens 128] [--drafts 4] [--ways lookup eagle3] [--draft FOLDER]
        [--eagle3 FOLDER] [--medusa FOLDER] [--dflash FOLDER] [--temperatures 0 1] [--quick]
        [--output benchmarks/results/speculation-cpu.jsonl]
    python -m ridgeline_bench.scripts.speculation --show FILE.jsonl     # a table of stored lines

Each way has a process of its own, and they take turns, so that other work on the machine slows all of them alike: the
speedup is the median of the rounds' ratios to plain decoding, once of seconds and once of the process's CPU time, which
other work moves less. Behind the rounds each way is asked once more with rows that verify all drafts, whatever it
costs: these show which share of rows had the first draft right, the first two, and so on.

    plain      no drafts
    lookup     prompt lookup, which takes at least one and at most three tokens
    draft      a draft model: that of the embedded model, or the one that is named
    eagle3, medusa, dflash    heads, if they are named
    random     the head of DFlash, each of whose tensors has its numbers in another order
    skip       the model itself without every other layer
    lookahead  lookahead decoding, with its default sizes: --drafts means nothing to it
    cascade    prompt lookup, and the draft model where that finds nothing
    right P    drafts of the known continuation, each of which is spoiled with probability 1 - P. Only a proposer that
               runs no model can know it, so this is what a free proposer of that quality would bring
    wrong      drafts that are never right

The embedded model goes on with pieces of this project's own code. It runs in float32: in bfloat16 products of several
rows round otherwise, and known continuations would end where the first token differs. Above temperature 0 every request
has a seed, and the tokens are those of another draw than without drafts, so nothing is known of the continuation.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from ridgeline import LLM, SamplingParams
from ridgeline.engine.plan_builder import InFlight
from ridgeline_bench.scripts.apart import Apart, as_prompts, drawn, in_turn, own_code, speedup
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.told_drafts import always_verified, tell

LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
LENGTH = 600  # characters of a prompt of text
Texts = list[list[int]]


class Asked(NamedTuple):
    """What a way is asked: texts are those that are known. always: rows verify all drafts."""

    prompts: Texts
    tokens: int
    texts: Texts
    temperature: float
    always: bool = False


class Written(NamedTuple):
    """What it answers. cpu: seconds of all of the process's threads. emitted: tokens of each row that verified all
    drafts, if it was asked to. verified: True for each step that verified drafts."""

    seconds: float
    cpu: float
    texts: Texts
    counts: dict[str, int]
    emitted: list[int]
    verified: list[bool]


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


def way(settings: dict[str, Any], threads: int, share: float | None) -> tuple[None, Callable[[Asked], Written]]:
    """Return a function that generates with these settings."""
    torch.set_num_threads(threads)
    llm = LLM(**settings)

    verified: list[bool] = []
    if (drafting := llm.assembly.engine.scheduler.running.drafting) is not None:
        note = drafting.note

        def noting(record: InFlight, *others: Any) -> bool:
            verified.append(record.verifies)
            return note(record, *others)

        drafting.note = noting  # type: ignore[method-assign]

    def answer(question: Asked) -> Written:
        prompts, tokens, texts, temperature, always = question
        if share is not None:
            tell(llm.assembly.local.runner, Known(texts, share).propose)
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True)
            for seed in range(len(prompts))
        ]
        verified.clear()
        before = llm.assembly.engine.scheduler.figures().drafts or {}
        started = time.perf_counter(), time.process_time()
        with always_verified(llm) if always else nullcontext([]) as emitted:
            outputs = llm.generate(as_prompts(prompts), params, use_tqdm=False)
        seconds = time.perf_counter() - started[0], time.process_time() - started[1]
        after = llm.assembly.engine.scheduler.figures().drafts or {}
        counts = {name: after[name] - before.get(name, 0) for name in after}
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        return Written(*seconds, ids, counts, emitted, list(verified))

    return None, answer


def shuffled(head: Path, folder: Path) -> Path:
    """Write a head of the same form, each of whose tensors has its numbers in another order."""
    shutil.copytree(head, folder)
    order, found = torch.Generator().manual_seed(0), load_file(head / "model.safetensors")
    mixed = {
        name: each.flatten()[torch.randperm(each.numel(), generator=order)].view_as(each)
        for name, each in found.items()
    }
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def by_position(emitted: Sequence[int], drafts: int) -> list[float]:
    """Return the share of rows that had the first draft right, the first two, and so on."""
    return [statistics.mean(count > place + 1 for count in emitted) for place in range(drafts)] if emitted else []


def settings_of(model: str = "", **others: Any) -> dict[str, Any]:
    return {
        "model": model, "device": "cpu", "dtype": "float32", "max_model_len": 1024, "enable_prefix_caching": False,
        "kv_cache_memory": 1 << 29, **others,
    }  # fmt: skip


def row_length(counts: Mapping[str, float]) -> float:
    """Return the tokens that a row brings which verifies drafts."""
    return 1 + counts["accepted_tokens"] / counts["drafts"] if counts.get("drafts") else 1.0


def acceptance(counts: Mapping[str, float]) -> float | None:
    """Return the share of drafts that were accepted, or None without any."""
    return counts["accepted_tokens"] / counts["draft_tokens"] if counts.get("draft_tokens") else None


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of stored lines, as docs/speculation.md has it."""
    places = [str(place + 1) for place in range(max(len(line["right_by_position"]) for line in lines))]
    head = ["way", *places, "tokens/s", "speedup", "by CPU time", "steps with drafts: of the first 64", "of the rest"]
    rows = [head, ["---", *["--:"] * (len(head) - 1)]]
    for line in lines:
        right, first = line["right_by_position"], line["first_steps"]
        drafts = [str(first["of_64"]), f"{first['behind']} of {max(0, first['steps'] - 64)}"] if right else ["-", "-"]
        shares = [f"{share:.2f}" for share in right] or ["-"] * len(places)
        rates = f"{line['tokens_per_second']:.0f}", f"{line['speedup']:.2f}", f"{line['cpu_speedup']:.2f}"
        rows.append([line["way"], *shares, *rates, *drafts])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def prompts_of(llm: LLM, count: int) -> Texts:
    """Return pieces of the project's own code, or random tokens for a model of random weights."""
    draw = random.Random(1)
    if llm.config.skip_tokenizer_init:
        return drawn(draw, count, 150, llm.assembly.model.spec.vocab_size)
    return [llm.get_tokenizer().encode(text) for text in draw.sample(own_code(LENGTH), count)]


def main() -> None:
    a = asked(
        __doc__, model="", dummy=False, threads=2, rounds=5, batches=[1, 4, 16], tokens=128, drafts=4,
        ways=([str], "beside plain (default: all that there is a model for)"), draft=(str, "folder of a draft model"),
        eagle3=(str, "folder of a head of EAGLE-3"), medusa=(str, "folder of Medusa's heads"),
        dflash=(str, "folder of a head of DFlash"), temperatures=[0.0],
        quick=(False, "lookup alone, one round of 16 tokens"), show=(str, "print the table of a stored file"),
        output=Path,
    )  # fmt: skip
    if a.show:
        print(page([json.loads(line) for line in Path(a.show).read_text().splitlines()]))
        return
    if a.quick:
        a.ways, a.threads, a.rounds, a.batches, a.tokens = a.ways or ["lookup"], 1, 1, [1], 16
    settings = settings_of(a.model)
    if a.dummy:
        settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
    drafts = {**settings, "speculative_config": {**LOOKUP, "num_speculative_tokens": a.drafts}}
    shares = {"right 0.8": 0.8, "right 0.6": 0.6, "wrong": 0.0}
    with LLM(**settings) as llm:
        prompts_by = {batch: prompts_of(llm, batch) for batch in a.batches}
    model = {"method": "draft_model", "num_speculative_tokens": a.drafts}
    model |= {"model": a.draft} if a.draft else {}
    known: dict[str, tuple[dict[str, Any], float | None]] = {"lookup": (drafts, None)}
    if a.draft or not a.model:
        known["draft"] = {**settings, "speculative_config": model}, None
    names = {"skip": {"method": "layer_skip"}}
    if "draft" in known:
        names["cascade"] = {**LOOKUP, **model}
    heads = {"eagle3": a.eagle3, "medusa": a.medusa, "dflash": a.dflash}
    names |= {method: {"method": method, "model": folder} for method, folder in heads.items() if folder}
    if a.dflash:
        random_head = shuffled(Path(a.dflash), Path(tempfile.mkdtemp()) / "random")
        names["random"] = {"method": "dflash", "model": str(random_head)}
    for name, config in names.items():
        known[name] = {**settings, "speculative_config": {**config, "num_speculative_tokens": a.drafts}}, None
    known["lookahead"] = {**settings, "speculative_config": {"method": "lookahead"}}, None
    known |= {name: (drafts, share) for name, share in shares.items()}
    known = {"plain": (settings, None), **{name: known[name] for name in a.ways or known}}
    ways = {name: Apart(way, config, a.threads, share) for name, (config, share) in known.items()}
    table = Table(*("temperature", "batch", *ways), title=f"{a.model or 'embedded model'}, tokens/s (speedup)")
    for temperature, (batch, prompts) in product(a.temperatures, prompts_by.items()):
        plain = ways["plain"].ask(Asked(prompts, a.tokens, [], temperature)).texts
        texts = [start + end for start, end in zip(prompts, plain, strict=True)]
        asks = {name: partial(each.ask, Asked(prompts, a.tokens, texts, temperature)) for name, each in ways.items()}
        first, *found = in_turn(asks, a.rounds + 1)  # the first round warms up
        always = Asked(prompts, a.tokens, texts, temperature, always=True)
        right = {
            name: [] if name in ("plain", "lookahead") else by_position(each.ask(always).emitted, a.drafts)
            for name, each in ways.items()
        }
        times, busy = ({name: [each[name][at] for each in found] for name in ways} for at in (0, 1))
        cells = []
        for name in ways:
            _, _, tokens, made, *_ = found[-1][name]
            steps = first[name].verified
            faster, length = speedup(times["plain"], times[name]), row_length(made)
            rate = batch * a.tokens / statistics.median(times[name])
            cells.append(f"{rate:,.0f} ({faster:.2f}; {length:.1f})")
            keep(a.output, {
                "workload": "speculation", "model": Path(a.model).name or "embedded", "way": name, "batch": batch,
                "temperature": temperature, "acceptance": acceptance(made),
                "tokens": a.tokens, "drafts": a.drafts, "tokens_per_second": rate, "speedup": faster,
                "cpu_speedup": speedup(busy["plain"], busy[name]), "right_by_position": right[name],
                "first_steps": {"steps": len(steps), "of_64": sum(steps[:64]), "behind": sum(steps[64:])},
                "tokens_of_a_row": length,
                "texts_as_plain": statistics.mean(one == other for one, other in zip(tokens, plain, strict=True)),
                "counts": made, "rounds": a.rounds, "threads": a.threads,
            })  # fmt: skip
        table.add_row(f"{temperature:g}", str(batch), *cells)
    Console(width=140).print(table, "in brackets: speedup; tokens of a row that verified drafts")


if __name__ == "__main__":
    main()

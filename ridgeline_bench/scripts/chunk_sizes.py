"""The size of a prompt's chunks against the latency of those who decode beside it.

    python -m ridgeline_bench.scripts.chunk_sizes [--model FOLDER] [--chunks 256 512 1024 2048 4096 8192]
        [--decoding 16] [--contexts 16] [--prompts 8] [--input 8192] [--options JSON] [--quick] [--output FILE.jsonl]
        [--keys 160000] [--long 100000 --beside 32 --targets 25 50]

FOLDER has a config.json; the default is Llama-3.1-8B's shape with random weights. --decoding requests decode all the
time, behind prompts of --contexts tokens; such loads are left out that have more than --keys in all. --prompts prompts
of --input tokens come one after another, each when the one before has its first token. A step runs a token of each
request that decodes, and as much of a prompt as the chunk's size leaves room for. So a small chunk means short pauses
between tokens, more steps for a prompt, and weights that are read more often.

    alone     ms between tokens of those who decode before the first prompt comes, the median
    between   ms between tokens of those who decode, while a prompt runs: median, 99th percentile, longest
    step      the least ms of a step of a whole chunk beside them, by the planner
    TTFT      ms to a prompt's first token, the median
    prompt/s  tokens of prompts per second

The limit of a step's tokens is changed in one engine, whose buffers have the size of the largest chunk.

--long: then one prompt of so many tokens alone, and beside --beside requests that decode behind 1,000 tokens, with each
bound on the time between tokens (`--itl-target`) in place of a limit. The prompt's rate alone is that of steps as large
as the engine takes, the faster of two prompts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.roofline import Roofline
from ridgeline.worker.machine import hardware_of
from ridgeline_bench.child import percentile
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.batching import SHAPES
from ridgeline_bench.scripts.driven import Answered, Driven, Wanted

SHORT = 16  # tokens of the prompts of those who decode
ALONE = 24  # steps before the first prompt, of which the last two thirds are timed
BEHIND, LONGEST_ANSWER = 1000, 2500  # tokens of those who decode beside a long prompt


def limit_steps(driven: Driven, tokens: int, rows: int) -> None:
    """Let steps have so many tokens at most from now on."""
    pace = driven.engine.scheduler._pace
    pace.tokens = max(tokens, rows)


def beside(
    driven: Driven, background: Sequence[Sequence[int]], chunk: int, prompts: int, length: int
) -> tuple[list[Answered], list[Answered]]:
    """Return (those who decode behind the prompts `background`, the prompts), which come one after the other. Only
    the prompts run in chunks: what comes before takes as large steps as there are."""
    rows = len(background)
    steps = -(-length // (chunk - rows))
    limit_steps(driven, driven.engine.config.max_num_batched_tokens, rows + 1)
    names = [driven.add(Wanted(prompt, steps * (prompts + 1) + ALONE + 32)) for prompt in background]
    answers = {name: Answered(0.0) for name in names}
    clock = driven.clock()
    while not all(answers[name].moments for name in names):
        driven.step(answers, clock)
    for _ in range(ALONE):
        driven.step(answers, clock)
    limit_steps(driven, chunk, rows + 1)
    found = []
    for prompt in driven.prompts(prompts, length):
        name = driven.add(Wanted(prompt, 1))
        answers[name] = Answered(clock())
        found.append(answers[name])
        while not answers[name].moments:
            driven.step(answers, clock)
    for name in names:
        driven.engine.abort(name)
    while driven.engine.has_work:
        driven.step(answers, clock)
    return [answers[name] for name in names], found


def least_step(driven: Driven, decoding: int, context: int, chunk: int, length: int) -> float:
    """Return the planner's least seconds of a step of a chunk in the middle of a prompt; 0 where it knows no rates."""
    assembly = driven.llm.assembly
    if (hardware := hardware_of(assembly.device)) is None:
        return 0.0
    piece = min(length, max(1, chunk - decoding))
    shape = StepShape([1] * decoding + [piece], [context] * decoding + [max(piece, length // 2)], decoding)
    try:
        return Roofline(assembly.model.spec, hardware, assembly.precision).step_limit(shape)
    except InvalidConfig:
        return 0.0


def bench(
    driven: Driven,
    chunks: Sequence[int],
    decoding: int,
    prompts: int,
    length: int,
    contexts: Sequence[int] = (SHORT,),
) -> Iterator[dict[str, Any]]:
    """Yield a line for each length of contexts and chunk size, as soon as it is measured."""
    for chunk in chunks:
        if chunk <= decoding:
            raise InvalidConfig(f"a chunk of {chunk} tokens leaves no room beside {decoding} requests that decode.")
    few = driven.prompts(decoding, min(contexts))
    for context in contexts:
        background = driven.prompts(decoding, context)
        for chunk in chunks:
            beside(driven, few, chunk, 1, length)  # kernels of these shapes
            yield _line(driven, background, chunk, prompts, length)


def _line(driven: Driven, background: Sequence[Sequence[int]], chunk: int, prompts: int, length: int) -> dict[str, Any]:
    decoding, context = len(background), len(background[0])
    decoders, found = beside(driven, background, chunk, prompts, length)
    begun, ended = found[0].at, found[-1].moments[-1]
    alone = [[b - a for a, b in pairwise(answer.moments) if b <= begun][ALONE // 3 - ALONE :] for answer in decoders]
    gaps = [
        1e3 * gap
        for answer in decoders
        for gap, at in zip(answer.between, answer.moments[1:], strict=True)
        if begun < at <= ended
    ]
    return {
        "chunk": chunk, "decoding": decoding, "context": context, "input": length, "prompts": prompts,
        "steps_of_a_prompt": -(-length // (chunk - decoding)),
        "alone_p50_ms": 1e3 * statistics.median(gap for each in alone for gap in each),
        "itl_p50_ms": percentile(gaps, 50), "itl_p99_ms": percentile(gaps, 99), "itl_max_ms": max(gaps),
        "least_step_ms": 1e3 * least_step(driven, decoding, context, chunk, length),
        "ttft_ms": 1e3 * statistics.median(answer.first for answer in found),
        "prompt_tokens_per_second": prompts * length / (ended - begun), "gaps": len(gaps),
    }  # fmt: skip


def long_prompt(driven: Driven, length: int, rows: int, targets: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield a line for each bound in milliseconds: a prompt of `length` tokens beside `rows` requests that decode."""
    limit_steps(driven, driven.engine.config.max_num_batched_tokens, rows + 1)
    bound = driven.engine.scheduler._itl
    driven.run(driven.alike(1, length // 4, 1))  # kernels of these shapes
    alone = min(driven.run(driven.alike(1, length, 1)).first for _ in range(2))
    for target in targets:
        bound.own = bound.target = None
        names = [driven.add(Wanted(prompt, LONGEST_ANSWER)) for prompt in driven.prompts(rows, BEHIND)]
        answers = {name: Answered(0.0) for name in names}
        clock = driven.clock()
        while min(len(each.moments) for each in answers.values()) < ALONE:
            driven.step(answers, clock)
        bound.own = bound.target = target / 1e3
        name = driven.add(Wanted(driven.prompts(1, length)[0], 1))
        found = answers[name] = Answered(clock())
        while not found.moments:
            driven.step(answers, clock)
        gaps = [
            1e3 * gap
            for each in map(answers.__getitem__, names)
            for gap, at in zip(each.between, each.moments[1:], strict=True)
            if found.at < at <= found.moments[0]
        ]
        for each in names:
            driven.engine.abort(each)
        while driven.engine.has_work:
            driven.step(answers, clock)
        yield {
            "input": length, "decoding": rows, "context": BEHIND, "target_ms": target, "alone_ms": 1e3 * alone,
            "ttft_ms": 1e3 * found.first, "of_alone": alone / found.first, "gaps": len(gaps),
            "itl_p50_ms": percentile(gaps, 50), "itl_p99_ms": percentile(gaps, 99), "itl_max_ms": max(gaps),
        }  # fmt: skip
    bound.own = bound.target = None


def main() -> None:
    a = asked(
        __doc__, model="", chunks=[256, 512, 1024, 2048, 4096, 8192], decoding=[16], contexts=[SHORT], prompts=8,
        input=8192, keys=160_000, long=0, beside=32, targets=[25.0, 50.0],
        options=("{}", "JSON of arguments of LLM"), quick=False, output=Path,
    )  # fmt: skip
    if a.quick:
        a.chunks, a.decoding, a.prompts, a.input = [16, 64, 256], [4], 2, 256
    model = a.model or str(SHAPES / ("random-25m" if a.quick else "llama-8b"))
    most = max(a.decoding)
    steps = max(-(-a.input // max(1, chunk - most)) for chunk in a.chunks)
    longest = max(a.input + 16, max(a.contexts) + steps * (a.prompts + 1) + ALONE + 48)
    given = {"load_format": "dummy", "max_model_len": longest, "max_num_batched_tokens": max(a.chunks)}
    if a.long:
        given["max_model_len"] = max(longest, a.long + 16, BEHIND + LONGEST_ANSWER)
        most = max(most, a.beside)
    driven = Driven(model, **{**given, "max_num_seqs": most + 1, **json.loads(a.options)})
    heads = "chunk", "decoding", "context", "steps of a prompt", "alone, ms", "between tokens, ms", "step, at least"
    table = Table(*heads, "TTFT, ms", "prompt tokens/s")
    loads = [(rows, [context for context in a.contexts if rows * context <= a.keys]) for rows in a.decoding]
    for line in chain.from_iterable(
        bench(driven, a.chunks, rows, a.prompts, a.input, contexts) for rows, contexts in loads if contexts
    ):
        keep(a.output, {"workload": "chunk sizes", "model": Path(model).name, "gpu": gpu(), **line})
        between = " / ".join(f"{line[f'itl_{name}_ms']:.1f}" for name in ("p50", "p99", "max"))
        table.add_row(
            str(line["chunk"]), str(line["decoding"]), str(line["context"]), str(line["steps_of_a_prompt"]),
            f"{line['alone_p50_ms']:.2f}", between,
            f"{line['least_step_ms']:.1f}",
            f"{line['ttft_ms']:.0f}", f"{line['prompt_tokens_per_second']:,.0f}",
        )  # fmt: skip
    Console(width=140).print(table)
    for line in long_prompt(driven, a.long, a.beside, a.targets) if a.long else ():
        keep(a.output, {"workload": "long prompt", "model": Path(model).name, "gpu": gpu(), **line})
        print(f"{a.long} tokens beside {a.beside} rows, target {line['target_ms']:g} ms: between tokens "
              f"{line['itl_p50_ms']:.1f} / {line['itl_p99_ms']:.1f} / {line['itl_max_ms']:.1f} ms, "
              f"{line['of_alone']:.0%} of the rate alone ({line['alone_ms']:.0f} ms)", flush=True)  # fmt: skip
    driven.close()


if __name__ == "__main__":
    main()

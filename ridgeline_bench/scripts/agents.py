"""Agents that call tools: long instructions that all share, results that are added, attempts that branch off.

    python -m ridgeline_bench.scripts.agents [--model FOLDER] [--engine vllm] [--agents 16] [--steps 12] [--shared 4096]
        [--task 256] [--result 512] [--call 96] [--branches 3] [--every 4] [--options JSON] [--output FILE.jsonl]
    python -m ridgeline_bench.scripts.agents --quick                          # a CPU, seconds

An agent's prompt is the shared instructions, its own task, and all that happened so far. In a step a tool's result is
added, and the model writes the next call. In every --every-th step the agent tries --branches results from the same
place, each with a call of its own, and goes on with the first. All tokens are random, and calls have a fixed length.
Agents take their steps together and tools take no time, so the figures are the engine's alone.

The same work runs with the prefix cache and without. Beside the prompt tokens that ran stands the least number: each
token of the tree of texts once. A step's call ends with a token that was emitted and never ran, so it counts too.
"""

from __future__ import annotations

import json
import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ridgeline.weights.loader import read_model_config
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.apart import as_prompts, drawn, loaded
from ridgeline_bench.scripts.asked import OneOf, asked, keep

SHAPES = Path(__file__).parents[2] / "benchmarks" / "models"


@dataclass(frozen=True)
class Work:
    """Sizes in tokens: of the shared instructions, of each task, result and call. every: steps from one in which each
    agent tries several branches to the next."""

    agents: int
    steps: int
    shared: int
    task: int
    result: int
    call: int
    branches: int
    every: int

    @classmethod
    def of(cls, a: Namespace) -> Work:
        return cls(a.agents, a.steps, a.shared, a.task, a.result, a.call, a.branches, a.every)

    def width(self, step: int) -> int:
        """Return the branches of each agent in a step, counted from 0."""
        return self.branches if (step + 1) % self.every == 0 else 1

    def least(self, step: int) -> int:
        """Return the fewest prompt tokens that must run in a step."""
        before = self.shared + self.agents * self.task if step == 0 else self.agents
        return before + self.agents * self.width(step) * self.result

    @property
    def longest(self) -> int:
        return self.shared + self.task + self.steps * (self.result + self.call)


class Step(NamedTuple):
    """A step of all agents: seconds, tokens of its prompts, those that ran, the least, and tokens that were written."""

    seconds: float
    prompts: int
    ran: int
    least: int
    written: int


class Answer(NamedTuple):
    """cached: tokens of the prompt that did not run. tokens: what was written."""

    cached: int
    tokens: Sequence[int]


def played(
    work: Work, generate: Callable[[list[list[int]]], list[Answer]], vocabulary: int, seed: int = 0
) -> Iterator[Step]:
    """Yield the steps. generate: answers prompts that come at once."""
    draw = random.Random(seed)
    (shared,) = drawn(draw, 1, work.shared, vocabulary)
    texts = [shared + task for task in drawn(draw, work.agents, work.task, vocabulary)]
    for step in range(work.steps):
        width = work.width(step)
        results = drawn(draw, work.agents * width, work.result, vocabulary)
        prompts = [texts[number // width] + result for number, result in enumerate(results)]
        began = time.perf_counter()
        answers = generate(prompts)
        seconds, total = time.perf_counter() - began, sum(map(len, prompts))
        ran = total - sum(answer.cached for answer in answers)
        yield Step(seconds, total, ran, work.least(step), sum(len(answer.tokens) for answer in answers))
        texts = [[*prompts[number], *answers[number].tokens] for number in range(0, len(prompts), width)]


def generator(llm: Any, sampling: Any, call: int) -> Callable[[list[list[int]]], list[Answer]]:
    """Return the function that lets an engine write a call behind each prompt."""
    params = sampling(max_tokens=call, temperature=0.0, ignore_eos=True, detokenize=False)

    def generate(prompts: list[list[int]]) -> list[Answer]:
        outputs = llm.generate(as_prompts(prompts), params, use_tqdm=False)
        return [Answer(output.num_cached_tokens or 0, output.outputs[0].token_ids) for output in outputs]

    return generate


def bench(work: Work, engine: str, given: dict[str, Any], vocabulary: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each way: with the prefix cache, and without."""
    for way, cached in (("prefix cache", True), ("no cache", False)):
        longest = {"max_model_len": work.longest + 16}
        llm, sampling = loaded(engine, {**longest, **given, "enable_prefix_caching": cached})
        generate = generator(llm, sampling, work.call)
        generate([[1, 2, 3]])  # warm
        steps = list(played(work, generate, vocabulary))
        llm.shutdown() if hasattr(llm, "shutdown") else None
        seconds, later = sum(step.seconds for step in steps), steps[1:] or steps
        yield {
            "way": way, **vars(work), "seconds": seconds, "first_step_s": steps[0].seconds,
            "later_step_s": sum(step.seconds for step in later) / len(later),
            "prompt_tokens": sum(step.prompts for step in steps), "ran": sum(step.ran for step in steps),
            "least": sum(step.least for step in steps),
            "written_per_second": sum(step.written for step in steps) / seconds,
        }  # fmt: skip


def main() -> None:
    a = asked(
        __doc__, model=("", "a folder with a config.json; default: Llama-3.1-8B's shape"),
        engine=OneOf(("ridgeline", "vllm")), agents=16, steps=12, shared=4096, task=256, result=512, call=96,
        branches=(3, "attempts from the same place"), every=(4, "steps from one with branches to the next"),
        options=("{}", "JSON of arguments of LLM"), quick=False, output=Path,
    )  # fmt: skip
    options = json.loads(a.options)
    if a.quick:
        a.agents, a.steps, a.shared, a.task, a.result, a.call = 3, 4, 128, 16, 16, 4
        options = {"device": "cpu", "dtype": "float32", **options}
    model = a.model or str(SHAPES / ("random-25m" if a.quick else "llama-8b"))
    given = {"model": model, "load_format": "dummy", "skip_tokenizer_init": True, "seed": 0, **options}
    vocabulary, about = read_model_config(Path(model)).spec.vocab_size, {"model": Path(model).name, "gpu": gpu()}
    table = Table("way", "seconds", "first step, s", "later, s", "prompt tokens", "ran", "least", "written/s")
    for line in bench(Work.of(a), a.engine, given, vocabulary):
        keep(a.output, {"workload": "agents", "engine": a.engine, **about, **line})
        table.add_row(
            line["way"], *(f"{line[name]:.3f}" for name in ("seconds", "first_step_s", "later_step_s")),
            *(f"{line[name]:,}" for name in ("prompt_tokens", "ran", "least")), f"{line['written_per_second']:,.0f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

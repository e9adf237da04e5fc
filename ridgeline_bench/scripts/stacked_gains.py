"""Quantization, continuous batching and speculation, put on top of each other: what each step adds, in one run.

    python -m ridgeline_bench.scripts.stacked_gains [--model FOLDER] [--form fp8] [--slots 8] [--requests 64]
        [--input 512] [--mean 128] [--drafts 5] [--right 0.7] [--quick] [--output FILE.jsonl]

    1  bf16, static batches whose rows are padded to the longest output
    2  the weights in another form (`ridgeline_bench/scripts/weight_forms.py`)
    3  continuous batching
    4  prompt lookup with at most --drafts drafts a row, whose number the engine chooses

FOLDER has a config.json; the default is Llama-3.1-8B's shape. Weights are random, so drafts would never be
right: whether one is right is decided by a hash, with probability --right (`verified_steps.py`). The requests are those
of `batching.py`, and the same in all steps. tokens/s counts tokens that were asked for, not those of padding.
"""

from __future__ import annotations

import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ridgeline_bench.results import gpu
from ridgeline_bench.scripts import batching
from ridgeline_bench.scripts.apart import Apart
from ridgeline_bench.scripts.asked import asked, keep
from ridgeline_bench.scripts.driven import Driven, Wanted
from ridgeline_bench.scripts.verified_steps import force
from ridgeline_bench.scripts.weight_forms import arguments, split

STEPS = ("bf16, static, padded", "quantized", "continuous batching", "speculation")
LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def engine(a: Namespace, form: str, drafts: int) -> tuple[None, Callable[[bool], tuple[float, float, int]]]:
    """Return a function that runs the requests, continuously or in static batches: (seconds, mean latency, steps)."""
    longest = a.input + 8 * a.mean + 64
    set_share: Callable[[float, int], None] = lambda share, salt: None  # noqa: E731
    settings: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": a.slots}
    if drafts:
        settings["speculative_config"] = {**LOOKUP, "num_speculative_tokens": drafts}
        set_share = force(a.slots + 1, longest + 1)
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as spare:
        driven = Driven(**{**arguments(form, Path(a.model), Path(spare)), **settings})
    outputs = batching.lengths(a.requests, a.mean)

    def work() -> list[Wanted]:
        prompts = driven.prompts(a.requests, a.input)
        return [Wanted(prompt, tokens) for prompt, tokens in zip(prompts, outputs, strict=True)]

    set_share(a.right, 0)
    driven.run(work()[: 2 * a.slots])  # kernels are compiled, and the engine learns how many drafts pay

    def answer(continuous: bool) -> tuple[float, float, int]:
        if continuous:
            found = batching.continuous(driven, work())
        else:
            found = batching.static(driven, work(), a.slots, padded=True)
        return found.seconds, statistics.fmean(found.latencies), found.steps

    return None, answer


def bench(a: Namespace) -> list[dict[str, Any]]:
    """Return a line for each step."""
    found = []
    for form, drafts, ways in (("bf16", 0, [False]), (a.form, 0, [False, True]), (a.form, a.drafts, [True])):
        apart: Apart[bool, tuple[float, float, int]] = Apart(engine, a, form, drafts)
        found += [apart.ask(continuous) for continuous in ways]
        apart.close()
    total = sum(batching.lengths(a.requests, a.mean))
    first, lines = found[0][0], []
    for number, (seconds, latency, steps) in enumerate(found):
        before = found[max(0, number - 1)][0]
        lines.append({
            "workload": "stacked gains", "model": Path(a.model).name, "gpu": gpu(), "step": STEPS[number],
            "form": a.form if number else "bf16", "tokens_per_second": total / seconds, "gain": before / seconds,
            "gain_in_all": first / seconds, "latency_mean_s": latency, "steps": steps, "slots": a.slots,
            "requests": a.requests, "input": a.input, "output_tokens": total, "drafts": a.drafts, "right": a.right,
        })  # fmt: skip
    return lines


def main() -> None:
    a = asked(
        __doc__, model="", form=("fp8", "the form of the weights from the second step on"), slots=8, requests=64,
        input=512, mean=128, drafts=5, right=(0.7, "probability that a draft is right"), quick=False, output=Path,
    )  # fmt: skip
    if a.quick:
        a.form, a.slots, a.requests, a.input, a.mean, a.drafts = "w8a8", 4, 12, 16, 12, 3
    split(a.form)
    a.model = a.model or str(batching.SHAPES / ("random-25m" if a.quick else "llama-8b"))
    title = f"{Path(a.model).name} on {gpu() or 'a CPU'}"
    table = Table("step", "tokens/s", "gain", "in all", "engine's steps", "mean latency, s", title=title)
    for line in bench(a):
        keep(a.output, line)
        table.add_row(
            line["step"], f"{line['tokens_per_second']:,.0f}", f"{line['gain']:.2f}", f"{line['gain_in_all']:.2f}",
            str(line["steps"]), f"{line['latency_mean_s']:.2f}",
        )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

"""The cost of a beam search beside as many plain completions of the same length.

    python -m ridgeline_bench.scripts.beams [--width 4] [--tokens 64] [--prompts 8 400 900] [--rounds 7]
        [--output FILE.jsonl]

`beam_search(beam_width=4)` and `generate(n=4)` run as many rows for as many steps. The time that the first takes longer
is what the search adds: rounds that wait for each other, candidates, requests, and parts of beams that run twice. The
two take turns, so that other work on the machine slows both alike. Figures are medians, with the best in brackets.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

from ridgeline import LLM, BeamSearchParams, SamplingParams


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure(llm: LLM, length: int, width: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round but the first. The prompt is random, and both ways find its cache blocks."""
    rng = random.Random(length)
    prompt = {"prompt_token_ids": [rng.randrange(20, 200) for _ in range(length)]}
    search = BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True)
    params = SamplingParams(n=width, max_tokens=tokens, temperature=1.0, seed=1, ignore_eos=True)
    times: dict[str, list[float]] = {"beams": [], "completions": []}
    for _ in range(rounds + 1):
        times["beams"].append(seconds(lambda: llm.beam_search(prompt, search)))
        times["completions"].append(seconds(lambda: llm.generate(prompt, params, use_tqdm=False)))
    return {name: each[1:] for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 400, 900], help="lengths in tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--label", default="", help="goes into the result lines")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    given = {} if asked.model is None else {"model": asked.model}
    with LLM(device=asked.device, **given) as llm:
        for length in asked.prompts:
            times = measure(llm, length, asked.width, asked.tokens, asked.rounds)
            line: dict[str, object] = {
                "workload": f"prompt of {length}, {asked.width} beams of {asked.tokens} tokens",
                "label": asked.label,
                **{f"{name}_s_median": statistics.median(each) for name, each in times.items()},
                **{f"{name}_s_best": min(each) for name, each in times.items()},
                "rounds": asked.rounds,
                "device": asked.device,
                "load_average": os.getloadavg()[0],
                "torch": torch.__version__,
                "date": datetime.now(UTC).date().isoformat(),
            }
            beams, completions = (f"{statistics.median(each):.3f} s ({min(each):.3f})" for each in times.values())
            ratio = statistics.median(times["beams"]) / statistics.median(times["completions"])
            print(f"{line['workload']}: {beams}, plain completions {completions}: {ratio:.2f} times", flush=True)
            if asked.output is not None:
                with asked.output.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

"""The time of one long prompt, and of tokens behind it, on one device and on several that divide it.

    python -m benchmarks.long_prompts FOLDER [--tokens 131000] [--ranks 1 2] [--dummy] [--output FILE.jsonl]

With --dummy the folder need hold no more than a config.json: weights are random. Every prompt is a new one. Ranks are
measured one after the other, so the machine should do nothing else. The first tokens' log-probabilities on several
devices are compared with those on the first.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from ridgeline import LLM, SamplingParams


def measure(given: argparse.Namespace, ranks: int) -> dict[str, object]:
    rng = random.Random(0)
    prompts = [[rng.randrange(20, 4_000) for _ in range(given.tokens)] for _ in range(given.rounds + 1)]
    settings = {
        "prefill_context_parallel_size": ranks,
        "prefill_context_parallel_threshold": given.threshold if ranks > 1 else None,
        "load_format": "dummy" if given.dummy else "auto",
        "skip_tokenizer_init": given.dummy,
        "enforce_eager": given.eager,
        "max_num_seqs": 4,
        "max_num_batched_tokens": given.chunk,
    }
    began = time.perf_counter()
    with LLM(given.folder, device=given.device, **settings) as llm:
        started, prompt_s, step_s, likely = time.perf_counter() - began, [], [], []
        for number, prompt in enumerate(prompts):
            asked = {"prompt_token_ids": prompt}
            one = SamplingParams(max_tokens=1, temperature=0, logprobs=1)
            since = time.perf_counter()
            [output] = llm.generate(asked, one, use_tqdm=False)
            prompt_s.append(time.perf_counter() - since)
            likely.append((output.outputs[0].token_ids[0], output.outputs[0].logprobs[0]))
            if number == len(prompts) - 1:  # the prompt is cached now
                many = SamplingParams(max_tokens=given.decode + 1, temperature=0, ignore_eos=True)
                since = time.perf_counter()
                llm.generate(asked, one, use_tqdm=False)
                again = time.perf_counter() - since
                since = time.perf_counter()
                llm.generate(asked, many, use_tqdm=False)
                step_s.append((time.perf_counter() - since - again) / given.decode)
    return {
        "ranks": ranks,
        "tokens": given.tokens,
        "started_s": round(started, 1),
        "first_prompt_s": prompt_s[0],
        "prompt_s": min(prompt_s[1:]),
        "ms_per_token_behind_it": 1000 * step_s[0],
        "tokens_per_s_and_rank": given.tokens / min(prompt_s[1:]) / ranks,
        "first_tokens": [token for token, _ in likely],
        "first_logprobs": [entries[token].logprob for token, entries in likely],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=131_000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--threshold", type=int, default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    alone: dict[str, object] | None = None
    for ranks in given.ranks:
        row = measure(given, ranks)
        alone = alone or row
        row["speedup"] = float(str(alone["prompt_s"])) / float(str(row["prompt_s"]))
        row["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        row["torch"], row["date"] = torch.__version__, datetime.now(UTC).isoformat(timespec="seconds")
        print(json.dumps(row), flush=True)
        if given.output is not None:
            with given.output.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

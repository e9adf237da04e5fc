"""The tokens of several ranks beside those of one device, for every way in which tokens are drawn.

    python -m ridgeline_bench.scripts.ranks_against_one [--ranks 2] [--stages 1] [--device cpu] [--dtype float32]
        [--model MODEL]
        [--apart]

In float32 the tokens must agree. In bfloat16 sums are rounded otherwise, so requests part ways at some token; then the
share of tokens before that says whether something is wrong (a fault shows at the first token of all requests).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from ridgeline import LLM, SamplingParams

LENGTH = 32
PROMPTS = ["The capital of France is", "Once upon a time", "def main():", "1, 2, 3, 4,"]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0},
    "penalties, bias": {"temperature": 0.8, "presence_penalty": 0.5, "logit_bias": {5: 2.0}, "min_tokens": 8},
    "top-k": {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    "top-p": {"temperature": 0.7, "top_p": 0.95},
    "logprobs": {"temperature": 0, "logprobs": 5, "prompt_logprobs": 2},
    "guidance": {"temperature": 0.7, "guidance_scale": 1.5},
    "three of each": {"temperature": 1.0, "n": 3},
}


def outputs(options: dict[str, Any]) -> tuple[dict[str, list[list[int]]], dict[str, float]]:
    """Return the tokens of all completions, and the milliseconds a token, by way."""
    found, took = {}, {}
    with LLM(**options) as llm:
        for name, params in WAYS.items():
            asked = SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True, "seed": 7, **params})
            begun = time.perf_counter()
            done = llm.generate(PROMPTS, asked, use_tqdm=False)
            took[name] = 1000 * (time.perf_counter() - begun) / LENGTH
            found[name] = [list(output.token_ids) for request in done for output in request.outputs]
    return found, took


def alike(one: list[int], other: list[int]) -> int:
    """Return how many tokens agree before the first that does not."""
    pairs = zip(one, other, strict=True)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1, help="stages of a pipeline, of so many ranks each")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", default="")
    parser.add_argument("--experts", action="store_true", help="whole experts on ranks")
    parser.add_argument("--apart", action="store_true", help="ranks with requests of their own, which share experts")
    parser.add_argument("--all2all-backend", default="distributed")
    parser.add_argument("--eager", action="store_true", help="no captured graphs")
    given = parser.parse_args()
    options = {"model": given.model or None, "device": given.device, "dtype": given.dtype, "max_num_seqs": 16}
    options |= {"max_model_len": 128, "gpu_memory_utilization": 0.3}
    experts = {"enable_expert_parallel": True} if given.experts else {}
    # Ranks first: they end, and leave the GPUs to what this process runs
    ranks: dict[str, Any] = {"tensor_parallel_size": given.ranks, "pipeline_parallel_size": given.stages, **experts}
    if given.apart:
        ranks = {"data_parallel_size": given.ranks, "enable_expert_parallel": True}
        ranks["all2all_backend"] = given.all2all_backend
    many, took_many = outputs({**options, **ranks, "enforce_eager": given.eager})
    one, took_one = outputs(options)
    for name in WAYS:
        agreed = sum(alike(*pair) for pair in zip(one[name], many[name], strict=True))
        total = sum(map(len, one[name]))
        print(
            f"{name:16} {agreed:4} of {total:4} tokens agree  "
            f"{took_one[name]:6.2f} ms a token on one, {took_many[name]:6.2f} on {given.ranks * given.stages}",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""The tokens of several ranks beside those of one device, for every way in which tokens are drawn.

    python -m ridgeline_bench.scripts.ranks_against_one [--ranks 2] [--stages 1] [--device cpu] [--dtype float32]
        [--model MODEL]
        [--apart]

In float32 the tokens must agree. In bfloat16 sums are rounded otherwise, so requests part ways at some token; then the
share of tokens before that says whether something is wrong (a fault shows at the first token of all requests).
"""

from __future__ import annotations

import time
from typing import Any

from ridgeline import LLM, SamplingParams
from ridgeline_bench.scripts.asked import asked

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
            wanted = SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True, "seed": 7, **params})
            begun = time.perf_counter()
            done = llm.generate(PROMPTS, wanted, use_tqdm=False)
            took[name] = 1000 * (time.perf_counter() - begun) / LENGTH
            found[name] = [list(output.token_ids) for request in done for output in request.outputs]
    return found, took


def alike(one: list[int], other: list[int]) -> int:
    """Return the number of tokens that agree before the first that does not."""
    pairs = zip(one, other, strict=True)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(one))


def main() -> None:
    given = asked(
        __doc__, ranks=2, stages=(1, "stages of a pipeline, of so many ranks each"), device="auto", dtype="float32",
        model="", experts=(False, "whole experts on ranks"),
        apart=(False, "ranks with requests of their own, which share experts"), all2all_backend="distributed",
        eager=(False, "no captured graphs"),
    )  # fmt: skip
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

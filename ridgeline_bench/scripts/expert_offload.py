"""Experts in the host's memory: milliseconds a token by the number that the device holds, with the prediction and not.

    python -m ridgeline_bench.scripts.expert_offload MODEL [--dummy] [--layers 12] [--slots 32 64] [--batches 1 8]

All decode greedily behind prompts of random tokens. Beside each time stands what arithmetic allows: the bytes that were
copied, over the rate of a copy of an expert's size from page-locked memory, measured here. With random weights routers
choose nearly evenly, which is the worst case for a cache; a trained mixture's experts are found more often. Slots of 0
hold all experts on the device, as without the cache, op by op like the others.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ridgeline import LLM, SamplingParams
from ridgeline.layers.expert_cache import ExpertCache
from ridgeline_bench.scripts.apart import as_prompts, drawn
from ridgeline_bench.scripts.asked import asked, keep

VOCABULARY = 1_000  # token ids below this are drawn


def copy_rate(size: int, rounds: int = 50) -> float:
    """Return the bytes a second of copies of `size` bytes from page-locked memory to the GPU."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    for number in range(rounds + 5):
        if number == 5:
            torch.cuda.synchronize()
            began = time.perf_counter()
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return size * rounds / (time.perf_counter() - began)


def measure(llm: LLM, batch: int, context: int, tokens: int, rounds: int) -> tuple[float, Any]:
    """Return the milliseconds of a decode step, and the cache's counts of all steps of one round."""
    prompts = as_prompts(drawn(random.Random(batch), batch, context, VOCABULARY))
    took: dict[int, list[float]] = {1: [], tokens: []}
    counts: dict[int, Any] = {}
    for _ in range(rounds + 1):
        for number, times in took.items():
            before = llm.assembly.local.figures().expert_cache
            params = SamplingParams(temperature=0, max_tokens=number, ignore_eos=True, detokenize=False)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            times.append(time.perf_counter() - began)
            after = llm.assembly.local.figures().expert_cache
            if before is not None and after is not None:
                counts[number] = [now - then for now, then in zip(after, before, strict=True)]
    step = (statistics.median(took[tokens][1:]) - statistics.median(took[1][1:])) / (tokens - 1)
    if not counts:
        return 1e3 * step, None
    return 1e3 * step, [many - one for many, one in zip(counts[tokens], counts[1], strict=True)]


def main() -> None:
    a = asked(
        __doc__, "model", dummy=(False, "random weights"), layers=(int, "only so many layers"), slots=[0, 32, 64],
        batches=[1, 8], context=64, tokens=65, rounds=3, device="auto", output=Path,
    )  # fmt: skip
    foresee = ExpertCache.foresee
    options: dict[str, Any] = {"device": a.device, "skip_tokenizer_init": True, "enforce_eager": True}
    options |= {"enable_prefix_caching": False, "max_num_seqs": max(a.batches)}
    options |= {"max_model_len": a.context + a.tokens + 16}
    if a.dummy:
        options["load_format"] = "dummy"
    if a.layers:
        options["hf_overrides"] = {"num_hidden_layers": a.layers}
    rate = 0.0
    for slots in a.slots:
        # First without: then nothing but what was missing is copied, from which the size of a copy follows
        for predicts in (False, True) if slots else (True,):
            ExpertCache.foresee = foresee if predicts else lambda self, experts: None  # type: ignore[method-assign]
            with LLM(a.model, moe_expert_cache_size=slots, **options) as llm:
                for batch in a.batches:
                    step, counts = measure(llm, batch, a.context, a.tokens, a.rounds)
                    line = {"model": a.model, "slots": slots, "predicts": predicts, "batch": batch, "step_ms": step}
                    if counts is not None:
                        needed, found, foreseeable, foreseen, copied = counts
                        line |= {"found": found / needed, "foreseen": foreseen / max(1, foreseeable)}
                        line |= {"copied_bytes_a_step": copied / (a.tokens - 1)}
                        if torch.cuda.is_available() and needed > found:
                            rate = rate or copy_rate(max(1, copied // max(1, needed - found)))
                            line |= {"copy_rate": rate, "copies_ms": 1e3 * copied / (a.tokens - 1) / rate}
                    if torch.cuda.is_available():
                        line["device"] = torch.cuda.get_device_name()
                    print(json.dumps(line), flush=True)
                    keep(a.output, line)


if __name__ == "__main__":
    main()

"""The gain of a cache tier in the host's memory: conversations that return when others have pushed them out.

    python -m ridgeline_bench.scripts.host_tier

Sessions take turns, one turn of each after the other, as agents do whose tools run for a while. All sessions together
need so many times the blocks that the device's cache has (`OVER`). The embedded model runs on the CPU, once without the
tier and once with it. Prompt tokens that ran are the same in every run; seconds are those of this machine.

Then the engine ends, and another one gets the last prompt of each session: once with nothing but memory, and once with
a disk below it (`--kv-disk`).
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from typing import Any

from ridgeline import LLM, SamplingParams
from ridgeline.worker.memory import host_memory

SESSIONS, TURNS = 12, 4
FIRST, MORE, ANSWER = 160, 48, 8  # tokens of a first prompt, of each later question, of an answer
OVER = 3
CONTEXT = FIRST + TURNS * (MORE + ANSWER) + 16


def conversations(settings: dict[str, Any]) -> tuple[dict[str, float], list[list[int]]]:
    """Return figures of all sessions, and their last prompts."""
    draw, params = random.Random(7), SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    llm = LLM(**settings)
    history = [[draw.randrange(1000) for _ in range(FIRST)] for _ in range(SESSIONS)]
    prompts, cached, start, last = 0, 0, time.perf_counter(), list[list[int]]()
    for _ in range(TURNS):
        last = [list(session) for session in history]
        for session in history:
            [output] = llm.generate({"prompt_token_ids": list(session)}, params, use_tqdm=False)
            prompts, cached = prompts + len(session), cached + (output.num_cached_tokens or 0)
            session += [*output.outputs[0].token_ids, *(draw.randrange(1000) for _ in range(MORE))]
    seconds = time.perf_counter() - start
    llm.shutdown()
    return {"prompt tokens": prompts, "ran": prompts - cached, "seconds of a session": seconds / SESSIONS}, last


def after_restart(settings: dict[str, Any], prompts: list[list[int]]) -> dict[str, float]:
    """Return figures of a new engine that gets these prompts, one after the other."""
    with LLM(**settings) as llm:
        start, cached = time.perf_counter(), 0
        for prompt in prompts:
            params = SamplingParams(temperature=0, max_tokens=1)
            [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            cached += output.num_cached_tokens or 0
        seconds = time.perf_counter() - start
    tokens = sum(map(len, prompts))
    return {"prompt tokens": tokens, "ran": tokens - cached, "milliseconds of a prompt": 1e3 * seconds / len(prompts)}


def main() -> None:
    """Print the figures of both, one line of JSON each."""
    with LLM(device="cpu", max_num_seqs=2, max_model_len=CONTEXT, kv_cache_memory=1 << 26) as llm:
        layout = llm.engine.layout  # type: ignore[attr-defined]
    pages = 1 + SESSIONS * layout.pages_needed(CONTEXT, CONTEXT) // OVER
    plain = {"device": "cpu", "max_num_seqs": 2, "max_model_len": CONTEXT, "kv_cache_memory": pages * layout.page_bytes}
    for size in (0.0, min(1.0, host_memory() / (1 << 31))):
        found, last = conversations(plain | {"kv_offloading_size": size})
        print(json.dumps({"GiB": size, **found}))
    with tempfile.TemporaryDirectory() as folder:
        for disk in (None, f"{folder}/kv"):
            settings = (
                plain | {"kv_offloading_size": size} | ({} if disk is None else {"kv_disk": disk, "kv_disk_size": 1})
            )
            conversations(settings)
            print(json.dumps({"restarted": True, "disk": disk is not None, **after_restart(settings, last)}))


if __name__ == "__main__":
    main()

"""The gain of a cache tier in the host's memory: conversations that return when others have pushed them out.

    python -m ridgeline_bench.scripts.host_tier

Sessions take turns, one turn of each after the other, as agents do whose tools run for a while. All sessions together
need so many times the blocks that the device's cache has (`OVER`). The embedded model runs on the CPU, once without the
tier and once with it. Prompt tokens that ran are the same in every run; seconds are those of this machine.
"""

from __future__ import annotations

import json
import random
import time

from ridgeline import LLM, SamplingParams
from ridgeline.worker.memory import host_memory

SESSIONS, TURNS = 12, 4
FIRST, MORE, ANSWER = 160, 48, 8  # tokens of a first prompt, of each later question, of an answer
OVER = 3
CONTEXT = FIRST + TURNS * (MORE + ANSWER) + 16


def conversations(size: float, pages: int, page_bytes: int) -> dict[str, float]:
    """Return figures of all sessions, with so many GiB of the host's memory."""
    draw, params = random.Random(7), SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    settings = {"device": "cpu", "max_num_seqs": 2, "max_model_len": CONTEXT, "kv_cache_memory": pages * page_bytes}
    llm = LLM(**settings, kv_offloading_size=size)  # type: ignore[arg-type]
    history = [[draw.randrange(1000) for _ in range(FIRST)] for _ in range(SESSIONS)]
    prompts, cached, start = 0, 0, time.perf_counter()
    for _ in range(TURNS):
        for session in history:
            [output] = llm.generate({"prompt_token_ids": list(session)}, params, use_tqdm=False)
            prompts, cached = prompts + len(session), cached + (output.num_cached_tokens or 0)
            session += [*output.outputs[0].token_ids, *(draw.randrange(1000) for _ in range(MORE))]
    seconds = time.perf_counter() - start
    llm.shutdown()
    return {"prompt tokens": prompts, "ran": prompts - cached, "seconds of a session": seconds / SESSIONS}


def main() -> None:
    """Print the figures of both, one line of JSON each."""
    with LLM(device="cpu", max_num_seqs=2, max_model_len=CONTEXT, kv_cache_memory=1 << 26) as llm:
        layout = llm.engine.layout  # type: ignore[attr-defined]
    pages = 1 + SESSIONS * layout.pages_needed(CONTEXT, CONTEXT) // OVER
    for size in (0.0, min(1.0, host_memory() / (1 << 31))):
        print(json.dumps({"GiB": size, **conversations(size, pages, layout.page_bytes)}))


if __name__ == "__main__":
    main()

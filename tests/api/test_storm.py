"""After any storm of requests and aborts the pool is whole, and the engine gives the tokens it always gave."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ridgeline import LLM, SamplingParams


@pytest.mark.dealt
def test_the_pool_is_whole_after_a_storm_of_aborts(text_model: Path) -> None:
    rng = random.Random(0)
    params = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True)
    shared = [rng.randrange(3, 300) for _ in range(24)]
    with LLM(
        text_model, device="cpu", block_size=4, max_num_seqs=8, max_num_batched_tokens=48, kv_cache_memory=200_000
    ) as llm:
        pool = llm.engine.scheduler.cache.pool
        (before,) = llm.generate({"prompt_token_ids": shared}, params.replace(seed=5))
        streams = []
        for _ in range(120):
            prompt = shared[: rng.randrange(25)] + [rng.randrange(3, 300) for _ in range(rng.randrange(1, 60))]
            streams.append(llm.stream({"prompt_token_ids": prompt}, params.replace(max_tokens=rng.randrange(1, 40))))
            for stream in rng.sample(streams, min(3, len(streams))):
                next(stream, None)
            if rng.random() < 0.4:
                streams.pop(rng.randrange(len(streams))).close()
        for stream in streams[::2]:
            stream.close()
        for stream in streams[1::2]:
            for _ in stream:
                pass
        while llm.engine.has_work:
            llm.engine.step()
        assert pool.free_pages == pool.num_pages
        assert llm.engine.scheduler.num_running == 0
        (after,) = llm.generate({"prompt_token_ids": shared}, params.replace(seed=5))
        assert after.outputs[0].token_ids == before.outputs[0].token_ids

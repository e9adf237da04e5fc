"""The effect of a batch on clients beside it: times to first tokens and between tokens, with and without the batch.

    python -m ridgeline_bench.scripts.batch_beside_clients MODEL [--rate 4] [--seconds 30] [--lines 2000]
        [OPTIONS OF serve]

The same stream of requests is sent twice, at moments drawn beforehand: first to an idle server, then while a batch
keeps its places full. It prints median and 99th percentile of both, in ms, and how many lines of the batch were
answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from itertools import pairwise

import openai

from ridgeline_bench.child import percentile
from ridgeline_bench.scripts.served import Served

PROMPT_WORDS, ANSWER_TOKENS = 256, 64
LINE_WORDS, LINE_TOKENS = 512, 128


def words(count: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(("alpha", "beta", "gamma", "delta", "epsilon")) for _ in range(count))


async def one(client: openai.AsyncOpenAI, model: str, seed: int, wait: float) -> list[float]:
    """Return the moments of a request's pieces after it was sent."""
    await asyncio.sleep(wait)
    began, moments = time.perf_counter(), list[float]()
    stream = await client.completions.create(
        model=model,
        prompt=words(PROMPT_WORDS, seed),
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices:
            moments.append(time.perf_counter() - began)
    return moments


async def felt(url: str, model: str, rate: float, seconds: float, name: str, seed: int) -> None:
    """Send the stream of requests, and print what they felt."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    draw, at, moments = random.Random(1), 0.0, list[float]()
    while (at := at + draw.expovariate(rate)) < seconds:
        moments.append(at)
    found = await asyncio.gather(*(one(client, model, seed + k, wait) for k, wait in enumerate(moments)))
    first = [1e3 * each[0] for each in found]
    between = [1e3 * (b - a) for each in found for a, b in pairwise(each)]
    for told, values in (("first token", first), ("between tokens", between)):
        print(f"{name:15} {told:15} {statistics.median(values):9.2f} {percentile(values, 99):9.2f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--lines", type=int, default=2000)
    given, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder, Served(given.model, "--batch-dir", folder, *options) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
        model = client.models.list().data[0].id
        asyncio.run(felt(served.url, model, given.rate, min(given.seconds, 5.0), "warm-up", 10**6))
        asyncio.run(felt(served.url, model, given.rate, given.seconds, "alone", 0))
        body = {"model": model, "max_tokens": LINE_TOKENS, "temperature": 0, "ignore_eos": True}
        lines = [
            json.dumps(
                {
                    "custom_id": str(k),
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": {**body, "prompt": words(LINE_WORDS, 2 * 10**6 + k)},
                }
            )
            for k in range(given.lines)
        ]
        file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        while client.batches.retrieve(batch.id).request_counts.completed == 0:  # type: ignore[union-attr]
            time.sleep(0.1)
        before, began = client.batches.retrieve(batch.id).request_counts, time.monotonic()
        asyncio.run(felt(served.url, model, given.rate, given.seconds, "beside a batch", 10**5))
        after, took = client.batches.retrieve(batch.id), time.monotonic() - began
        assert before is not None
        assert after.request_counts is not None
        done = after.request_counts.completed - before.completed
        print(f"{done} lines in {took:.0f} s, {done * LINE_TOKENS / took:.0f} tokens/s; the batch is {after.status}")


if __name__ == "__main__":
    main()

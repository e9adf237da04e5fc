"""Users who ask different questions about one picture: the cache's bytes and the time, beside the arithmetic.

    python -m ridgeline_bench.scripts.one_picture --model FOLDER [--users 16] [--words 64] [--tokens 16] [--side 336]
        [--options JSON] [--output FILE.jsonl]

FOLDER has a config.json of a vision-language model, such as benchmarks/models/llava-1.5-7b; weights are random. Each
user's prompt is three words that all share, the picture, and --words words of its own; all come at once. Ways:

    alone     every user sends a picture of its own
    one       all send the same picture; the first request that runs leaves its keys and values to the others
    again     the same picture, whose keys and values are there from the beginning
    apart     the same picture behind words that differ, so that only the tower's vectors are shared

"computed" is bytes of keys and values for all tokens of the prompts and outputs, each shared prefix counted once, in
whole blocks. "held" is the most that requests hold at once. "idle" bytes of evicted prefixes are not in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ridgeline.core.plan.request import Request
from ridgeline_bench.scripts.asked import asked, check_counts, keep, told
from ridgeline_bench.scripts.pictures import PictureBench

WAYS = ("alone", "one", "again", "apart")
SHARED = 3  # words before the picture


class SharedPicture:
    """Requests of users, made and run. words: of each user's question."""

    def __init__(self, bench: PictureBench, side: int, words: int, tokens: int) -> None:
        self.bench, self.side, self.words, self.tokens = bench, side, words, tokens
        self.pool = bench.engine.scheduler.cache.pool
        self._asked = 0

    def request(self, way: str, user: int, seed: int) -> Request:
        """Return a user's request."""
        own = seed + (user if way == "alone" else 0)
        found = self.bench.request(self.side, own, self.tokens)
        self._asked += 1
        vectors = found.inserted[0].count
        before = (5, 6, 7) if way != "apart" else (5 + user, 6, 7)
        question = [10 + (self._asked // 80**n) % 80 for n in range(self.words)]
        prompt = (*before, *found.prompt_token_ids[SHARED : SHARED + vectors], *question)
        return replace(found, prompt_token_ids=prompt, max_total_tokens=len(prompt) + self.tokens)

    def run(self, requests: list[Request]) -> tuple[float, float, int]:
        """Return (seconds to the last first token, seconds to the end, most blocks that are held at once)."""
        engine, most, first, began = self.bench.engine, 0, dict[str, float](), time.perf_counter()
        for each in requests:
            engine.add(each)
        while engine.has_work:
            for event in engine.step():
                if event.error:
                    raise RuntimeError(event.error)
                first.setdefault(event.request_id, time.perf_counter() - began)
            most = max(most, self.pool.count(0)[0])
        return max(first.values()), time.perf_counter() - began, most


def measured(bench: PictureBench, a: Any) -> Iterator[dict[str, Any]]:
    """Yield a line for each way."""
    grid, runs = bench.tower.grid, 0
    side = a.side if grid is None or grid.any_shape else grid.side * bench.patching.rows
    shared = SharedPicture(bench, side, a.words, a.tokens)
    engine = bench.engine
    page = engine.scheduler.cache.block_size
    token_bytes = sum(
        len(group.layers) * group.spec.token_bytes(str(bench.dtype).removeprefix("torch."))
        for group in engine.scheduler.cache.layout.groups
    )
    for seed, way in enumerate(("alone", *WAYS)):  # the first compiles kernels, and is not told
        if way != "again":
            runs = 1000 * (seed + 1)
        requests = [shared.request(way, user, runs) for user in range(a.users)]
        encoded = engine.scheduler.pictures.misses
        first, whole, blocks = shared.run(requests)
        if seed == 0:
            continue
        length = len(requests[0].prompt_token_ids) + a.tokens
        prefix = (SHARED + requests[0].inserted[0].count) // page * page if way in ("one", "again") else 0
        least = -(-(length - prefix) // page) * a.users + prefix // page
        yield {
            "kind": "one picture", "model": a.model.rstrip("/").rpartition("/")[2], "way": way, "users": a.users,
            "prompt": len(requests[0].prompt_token_ids), "vectors": requests[0].inserted[0].count,
            "output": a.tokens, "token_bytes": token_bytes, "computed_bytes": least * page * token_bytes,
            "held_bytes": blocks * page * token_bytes, "encoded": engine.scheduler.pictures.misses - encoded,
            "first_ms": 1e3 * first, "whole_ms": 1e3 * whole,
        }  # fmt: skip


def main() -> None:
    a = asked(__doc__, model=str, users=16, words=64, tokens=16, side=336, options="{}", output="")
    with told():
        check_counts(a, "users", "words", "tokens", "side")
        bench = PictureBench(a.model, **json.loads(a.options))
    print(f"{'way':>6} {'computed, MB':>13} {'held, MB':>9} {'encoded':>8} {'last first token, ms':>21} {'all, ms':>8}")
    for line in measured(bench, a):
        print(
            f"{line['way']:>6} {line['computed_bytes'] / 1e6:>13,.1f} {line['held_bytes'] / 1e6:>9,.1f} "
            f"{line['encoded']:>8} {line['first_ms']:>21,.1f} {line['whole_ms']:>8,.1f}",
            flush=True,
        )
        keep(Path(a.output) if a.output else None, line)


if __name__ == "__main__":
    main()

"""The allocator under an engine that serves: what it asks of the driver when it starts, and nothing afterwards.

    python -m ridgeline_bench.scripts.allocator.server [--model benchmarks/models/llama-1b] [--requests 200]
        [--rows 64] [--kv 8] [--output FILE.jsonl] [--commit HASH]                                       # one GPU

Weights are random. An engine starts, runs a quarter of the requests, and then all, with prompts of 16 to 1,024 tokens
and answers of 16 to 256. torch records every event of the allocator (`ridgeline_bench.profile.allocations`).

A line has the curves and the events of the start and of serving, how segments are used at the end, what was in use at
the peak by the line of Python that took it, and calls of cudaMalloc and cudaFree.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ridgeline import LLM, SamplingParams
from ridgeline_bench.profile.allocations import Fragments, Timeline, fragments, timeline
from ridgeline_bench.results import host_with
from ridgeline_bench.scripts.asked import asked, check_counts, keep, told

EVENTS = 1_000_000  # that torch keeps
TOKENS = 200, 32_000  # that prompts are made of


class Watched:
    """The events of the allocator of the current GPU from now on, in stretches."""

    def __init__(self) -> None:
        torch.cuda.init()
        torch.cuda.empty_cache()
        stats = torch.cuda.memory_stats()
        self._held = stats.get("allocated_bytes.all.current", 0), stats.get("reserved_bytes.all.current", 0)
        self._calls = self._counted()
        torch.cuda.memory._record_memory_history(max_entries=EVENTS, context="alloc", stacks="python")
        self._from = len(_events(torch.cuda.memory._snapshot()))  # of an earlier stretch

    def stretch(self) -> tuple[Timeline, Fragments, dict[str, int]]:
        """Return what happened since the last call, how segments are used now, and calls that reached the driver."""
        torch.cuda.synchronize()
        seen = torch.cuda.memory._snapshot()
        events = _events(seen)
        if len(events) >= EVENTS:
            raise RuntimeError(f"torch keeps {EVENTS} events, and there were more; make the run shorter.")
        found = timeline(events[self._from :], *self._held)
        stats, calls = torch.cuda.memory_stats(), self._counted()
        self._held = stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]
        self._from, before, self._calls = len(events), self._calls, calls
        return found, fragments(seen["segments"]), {name: calls[name] - before[name] for name in calls}

    def close(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)

    def _counted(self) -> dict[str, int]:
        stats = torch.cuda.memory_stats()
        return {name: stats.get(name, 0) for name in ("num_device_alloc", "num_device_free", "num_alloc_retries")}


def _events(seen: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of the current GPU in torch's snapshot."""
    return [each for each in seen["device_traces"][torch.cuda.current_device()] if each["action"] != "snapshot"]


def stored(stretch: tuple[Timeline, Fragments, dict[str, int]], lines: int = 12) -> dict[str, Any]:
    """Return a stretch as a line of results has it."""
    found, used, calls = stretch
    top = dict(list(found.at_peak.items())[:lines])
    rest = sum(found.at_peak.values()) - sum(top.values())
    return {
        "moments": [list(each) for each in found.moments],
        "peak": found.peak._asdict(),
        "at_peak": {**top, **({"others": rest} if rest else {})},
        "events": found.calls,
        "churn": found.churn,
        "fragments": {**used._asdict(), "fragmentation": used.fragmentation},
        "driver": calls,
    }


def prompts_of(count: int, draw: random.Random) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    """Return random prompts and how many tokens each wants."""
    lengths = [draw.randrange(16, 1025) for _ in range(count)]
    prompts = [{"prompt_token_ids": [draw.randrange(*TOKENS) for _ in range(length)]} for length in lengths]
    return prompts, [
        SamplingParams(temperature=0, max_tokens=draw.randrange(16, 257), ignore_eos=True) for _ in prompts
    ]


def main() -> None:
    a = asked(
        __doc__, model="benchmarks/models/llama-1b", requests=200, rows=64, kv=(8, "GiB of cache"), device="cuda",
        output=Path, commit="",
    )  # fmt: skip
    with told():
        check_counts(a, "requests", "rows", "kv")
        if a.device != "cuda" or not torch.cuda.is_available():
            raise SystemExit("the allocator that is watched is that of a GPU, and there is none here.")
    draw, watched = random.Random(0), Watched()
    with LLM(
        a.model, load_format="dummy", skip_tokenizer_init=True, device=a.device, max_model_len=2048,
        max_num_seqs=a.rows, kv_cache_memory=a.kv << 30,
    ) as llm:  # fmt: skip
        while llm.engine.rest():
            pass
        prompts, params = prompts_of(a.requests // 4 or 1, draw)
        llm.generate(prompts, params, use_tqdm=False)
        started = stored(watched.stretch())
        prompts, params = prompts_of(a.requests, draw)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        served = stored(watched.stretch())
    watched.close()
    tokens = sum(len(each.outputs[0].token_ids) for each in outputs)
    here = asdict(host_with(torch.device("cuda"), a.commit))
    for what, found in (("start", started), ("serving", served)):
        keep(a.output, {
            "machine": here, "workload": "allocator of a server", "what": what, "model": Path(a.model).name,
            "requests": a.requests, "rows": a.rows, "tokens": tokens, **found,
        })  # fmt: skip
        used = found["fragments"]
        print(
            f"{what}: peak {found['peak']['allocated'] / 1e9:.2f} GB of {used['reserved'] / 1e9:.2f} GB held in "
            f"{used['segments']} segments; {found['driver']['num_device_alloc']} times from the driver, "
            f"{found['driver']['num_device_free']} times back; {found['events'].get('alloc', 0):,} blocks with "
            f"{found['churn'] / 1e9:.2f} GB; unused {used['unused'] / 1e6:.1f} MB, cached {used['cached'] / 1e6:.1f} MB"
        )
        for by, size in list(found["at_peak"].items())[:6]:
            print(f"    {size / 1e6:10.1f} MB {by}")


if __name__ == "__main__":
    main()

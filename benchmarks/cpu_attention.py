"""A CPU's decode attention over rows of unequal lengths, beside the same rows with each length run by itself.

    python benchmarks/cpu_attention.py [--rounds 7] [--threads 1] [--dtype bfloat16] [--only mixed]

Times are the process's CPU time per step of Qwen3 0.6B's 28 layers (with one cache, and the work list made once). They
are the least of the rounds, in which both ways take turns. `ratio` is the time of all rows together over the time of
the parts, which are run layer by layer one after another.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ridgeline.kernels.attention.paged.op import RaggedBatch
from ridgeline.kernels.attention.paged.torch_ops import paged_attention

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 28, 16, 8, 128, 16
CASES: dict[str, tuple[list[list[int]], int | None]] = {  # parts (lengths that are alike), window
    "mixed: 31 of 128, 1 of 2048": ([[128] * 31, [2048]], None),
    "mixed: 8 each of 64, 256, 1024": ([[64] * 8, [256] * 8, [1024] * 8], None),
    "mixed: 15 of 128, 1 of 4096, window 512": ([[128] * 15, [4096]], 512),
    "uniform: 1 of 500": ([[500]], None),
    "uniform: 8 of about 500": ([[500 - 3 * i for i in range(8)]], None),
    "uniform: 16 of about 130": ([[130 - i for i in range(16)]], None),
    "uniform: 16 of about 500": ([[500 - 3 * i for i in range(16)]], None),
    "uniform: 64 of about 500": ([[500 - i for i in range(64)]], None),
}


def steps(parts: list[list[int]], window: int | None, dtype: torch.dtype) -> list[Callable[[], None]]:
    """Return two functions that run all layers of one step: with all rows together, and part by part. The cache is laid
    out as the engine's on a CPU, with blocks scattered over it."""
    generator = torch.Generator().manual_seed(0)
    lengths = [length for part in parts for length in part]
    columns = [-(-length // BLOCK_SIZE) for length in lengths]
    ids = iter((1 + torch.randperm(sum(columns), generator=generator)).tolist())
    table_SC = torch.zeros(len(lengths), max(columns), dtype=torch.int32)
    for row, count in enumerate(columns):
        table_SC[row, :count] = torch.tensor([next(ids) for _ in range(count)], dtype=torch.int32)
    memory = torch.randn(1 + sum(columns), 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
    caches = [memory[:, which].transpose(1, 2) for which in range(2)]
    q_THD = torch.randn(len(lengths), HEADS, HEAD_DIM, generator=generator).to(dtype)

    def batch(rows: slice) -> RaggedBatch:
        count = len(lengths[rows])
        return RaggedBatch(
            slots_R=torch.arange(len(lengths))[rows],
            block_table_SC=table_SC,
            start_R1=torch.arange(count + 1),
            kv_len_R=torch.tensor(lengths[rows]),
            tokens_each=1,
            num_tokens_R=np.ones(count, np.int32),
            kv_bound_R=np.array(lengths[rows], np.int32),
        )

    @torch.inference_mode()
    def run(groups: list[slice]) -> None:
        batches = [(q_THD[rows], batch(rows)) for rows in groups]
        for _ in range(LAYERS):
            for q_RHD, of_rows in batches:
                paged_attention(q_RHD, *caches, of_rows, scale=HEAD_DIM**-0.5, window=window)

    ends = np.cumsum([len(part) for part in parts]).tolist()
    return [partial(run, [slice(0, len(lengths))]), partial(run, list(map(slice, [0, *ends], ends)))]


def least(runs: list[Callable[[], None]], rounds: int) -> list[float]:
    """Return the CPU milliseconds of each run, the least of the rounds."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 1):  # the first warms up
        for taken, run in zip(times, runs, strict=True):
            started = time.process_time()
            run()
            taken.append(1e3 * (time.process_time() - started))
    return [min(taken[1:]) for taken in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    print(f"{'rows':42}{'ms':>8}{'parts':>8}{'ratio':>7}")
    for name, (parts, window) in CASES.items():
        if not name.startswith(asked.only):
            continue
        together, alone = least(steps(parts, window, getattr(torch, asked.dtype)), asked.rounds)
        print(f"{name:42}{together:8.1f}{alone:8.1f}{together / alone:7.2f}", flush=True)


if __name__ == "__main__":
    main()

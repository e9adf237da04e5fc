"""Draws with filters from scores that GPUs divide: the search for cuts beside gathered rows, compared, then timed.

    python -m ridgeline_bench.scripts.divided_filters [--ranks 2] [--vocab 128256] [--rows 1 8 64 256] [--nccl]

One line for each number of rows and each setting: microseconds inside a graph of the whole draw by either way. A graph
is captured with other scores than it is replayed with, and its tokens are compared with those that one device draws
from the whole rows. Where some differ, the line says how many, and the exit code is 1.

--nccl: without peer memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.core.plan.step import Feature
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.sampling.op import SamplingTables
from ridgeline.parallel.processes import ProcessAxis, join
from ridgeline.worker import vocabulary as module
from ridgeline.worker.vocabulary import Vocabulary

SETTINGS: dict[str, dict[str, float]] = {
    "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95},
    "top-p 0.9": {"top_p": 0.9},
    "top-p 0.9, flat": {"top_p": 0.9, "temperature": 3.0},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 1000": {"top_k": 1000},
}
FEATURES = Feature.RANDOM | Feature.FILTER
CALLS, REPLAYS = 10, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("vocab", 128_256), ("rank", -1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rows", type=int, nargs="*", default=(1, 8, 64, 256))
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--meeting", default="")
    args = parser.parse_args()
    if args.rank >= 0:
        sys.exit(rank(args))
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "ridgeline_bench.scripts.divided_filters",
            *sys.argv[1:],
            "--meeting",
            f"{folder}/meeting",
        ]
        ranks = [subprocess.Popen([*command, "--rank", str(number)]) for number in range(args.ranks)]
        sys.exit(max(each.wait() for each in ranks))


def rank(args: argparse.Namespace) -> int:
    """Be one rank: all run the same, and the first one prints."""
    device = torch.device("cuda", args.rank)
    torch.cuda.set_device(device)
    axis = join(args.rank, args.ranks, Path(args.meeting), device, 60.0)
    if args.nccl:
        axis._sums = None
    wrong = 0
    for rows in args.rows:
        for name, setting in SETTINGS.items():
            wrong += compare(axis, rows, args.vocab, name, setting, device)
    return int(wrong > 0)


def compare(
    axis: ProcessAxis, rows: int, vocab: int, name: str, setting: dict[str, float], device: torch.device
) -> int:
    """Print the times of both ways, and return how many tokens differ from those of one device."""
    ops = Ops(Platform.of(device))
    vocabulary = Vocabulary(vocab, axis, ops)
    tables = tables_of(rows, vocab, setting, device)
    slots_R = torch.arange(rows, device=device)
    position_R = 7 + slots_R
    scores_RV = scores(rows, vocabulary.each * axis.size, 1, device)
    own_RU = scores_RV.split(vocabulary.each, 1)[axis.rank].contiguous()
    asked = tables, slots_R, position_R, FEATURES
    times, found = [], []
    for gathered in (1 << 40, -1):
        module.GATHERED = gathered
        graph, token_R = captured(lambda: vocabulary.sample(own_RU, *asked))
        others_RV = scores(rows, vocabulary.each * axis.size, 2, device)
        own_RU.copy_(others_RV.split(vocabulary.each, 1)[axis.rank])
        graph.replay()
        found.append(token_R.clone())
        times.append(timed(graph))
    whole_R = ops.sample(others_RV[:, :vocab].contiguous(), *asked)
    differ = [int((token_R != whole_R).sum()) for token_R in found]
    if axis.rank == 0:
        told = (
            f"; tokens that differ from one device's: gathered {differ[0]}, searched {differ[1]}" if any(differ) else ""
        )
        print(f"{rows:4} rows, {name:22} gathered {times[0]:7.1f} searched {times[1]:7.1f} µs{told}", flush=True)
    return sum(differ)


def scores(rows: int, vocab: int, seed: int, device: torch.device) -> Tensor:
    """Return scores like those of a language model: a bell, and some tokens that are far likelier than others."""
    generator = torch.Generator(device).manual_seed(seed)
    scores_RV = 2.5 * torch.randn(rows, vocab, generator=generator, device=device)
    likely_RL = torch.randint(vocab, (rows, 40), generator=generator, device=device)
    return scores_RV.scatter_add(1, likely_RL, 9 * torch.rand(rows, 40, generator=generator, device=device)).bfloat16()


def tables_of(rows: int, vocab: int, setting: dict[str, float], device: torch.device) -> SamplingTables:
    # Columns of one type are parts of one array, as the worker's slots have them
    tables = SamplingTables.empty(rows, vocab, device)
    tables.temperature_S.fill_(setting.get("temperature", 1.0))
    for column in ("top_k", "top_p", "min_p"):
        if column in setting:
            getattr(tables, f"{column}_S").fill_(setting[column])
    tables.seed_S.copy_(torch.arange(rows, device=device))
    return tables


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return a graph of some draws, and the tokens of the last one."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            token_R = call()
    return graph, token_R


def timed(graph: torch.cuda.CUDAGraph) -> float:
    """Return the microseconds of a draw."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / REPLAYS / CALLS


if __name__ == "__main__":
    main()

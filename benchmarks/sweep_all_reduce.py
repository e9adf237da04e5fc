"""Sums over the GPUs of this machine: ours, NCCL's and torch's symmetric memory, in captured graphs.

    python -m benchmarks.sweep_all_reduce [--json results.jsonl]

Every sum is checked against NCCL's before it is timed. A graph holds 40 sums that follow one another, so the launch of
the graph does not count. Microseconds are medians of 30 replays; GB/s is the bus rate 2 (n - 1) / n * bytes / time, as
nccl-tests count it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.kernels.norm.op import rms_norm

SIZES = (8, 16, 32, 64, 128, 256, 1024, 8192, 65536)  # KiB
WIDTH = 4096
INSIDE, REPLAYS = 40, 30

Sum = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--meeting", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.rank is not None:
        run(options.rank, torch.cuda.device_count(), options.meeting, options.json)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.sweep_all_reduce", "--meeting", f"{folder}/meeting"]
        command += ["--json", str(options.json)] if options.json else []
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(torch.cuda.device_count())]
        sys.exit(max(process.wait() for process in ranks))


def run(rank: int, size: int, meeting: Path, results: Path | None) -> None:
    """Be one rank. The first one prints."""
    from ridgeline.kernels.all_reduce.triton import all_reduce_norm, fits, fits_rows
    from ridgeline.parallel.peer_memory import PeerSums

    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(meeting), size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    ours = PeerSums(rank, size, device)
    group = dist.group.WORLD.group_name
    import torch.distributed._symmetric_memory as symmetric

    weight_M = torch.linspace(0.5, 1.5, WIDTH, device=device).bfloat16()
    if rank == 0:
        print(f"{size} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
        print(f"{'KiB':>6} {'NCCL':>8} {'symmetric':>10} {'ours':>8} {'ours+norm':>10} {'NCCL+norm':>10}  bus GB/s")
    for kib in SIZES:
        x_TM = torch.randn(
            kib * 1024 // 2 // WIDTH or 1, WIDTH, generator=torch.Generator(device).manual_seed(rank), device=device
        ).bfloat16()
        shared = symmetric.empty(x_TM.shape, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(shared, group)
        want = nccl(x_TM.clone())
        ways: dict[str, Sum] = {"NCCL": nccl}

        def torchs(x: Tensor, shared: Tensor = shared) -> Tensor:
            shared.copy_(x)
            one = (
                torch.ops.symm_mem.one_shot_all_reduce
                if x.nbytes <= 1 << 18
                else torch.ops.symm_mem.two_shot_all_reduce_
            )
            y = one(shared, "sum", group)
            return y

        ways["symmetric"] = torchs
        if fits(x_TM):
            ways["ours"] = ours.all_reduce
        if fits_rows(x_TM):
            ways["ours+norm"] = lambda x: all_reduce_norm(x, x, weight_M, 1e-5, ours.peers)[0]
        ways["NCCL+norm"] = lambda x: rms_norm(nccl(x), x, weight_M, 1e-5)[0]
        found: dict[str, float | str] = {}
        for name, way in ways.items():
            expected = want if "norm" not in name else rms_norm(want, x_TM, weight_M, 1e-5)[0]
            if name != "NCCL+norm":
                error = float((way(x_TM.clone()).float() - expected.float()).abs().max() / expected.float().abs().max())
                if not error < 0.02:
                    found[name] = f"wrong {error:.2g}"
                    continue
            found[name] = timed(way, x_TM)
        if rank == 0:
            report(kib, size, x_TM.nbytes, found, results)
    dist.barrier()
    dist.destroy_process_group()


def nccl(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def timed(way: Sum, x: Tensor) -> float:
    """Return the microseconds of a sum inside a graph."""
    side = torch.cuda.Stream()
    held = torch.zeros_like(x)  # sums of zeros do not grow
    with torch.cuda.stream(side):
        for _ in range(3):
            way(held)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(INSIDE):
            way(held)
    times = []
    for _ in range(REPLAYS):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / INSIDE)
    return statistics.median(times)


def report(kib: int, size: int, nbytes: int, found: dict[str, float | str], results: Path | None) -> None:
    def cell(name: str) -> str:
        value = found.get(name, "")
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    best = min((value for name, value in found.items() if isinstance(value, float) and "norm" not in name), default=0.0)
    rate = 2 * (size - 1) / size * nbytes / best / 1000 if best else 0.0
    print(
        f"{kib:6} {cell('NCCL'):>8} {cell('symmetric'):>10} {cell('ours'):>8} {cell('ours+norm'):>10} "
        f"{cell('NCCL+norm'):>10}  {rate:.0f}",
        flush=True,
    )
    if results is not None:
        line = {"what": "all-reduce", "gpus": size, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        with results.open("a") as file:
            file.write(json.dumps({**line, "bytes": nbytes, "us": found}) + "\n")


if __name__ == "__main__":
    main()

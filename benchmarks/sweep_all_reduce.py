"""Sums over the GPUs of this machine by all ways there are, checked, then timed in captured graphs.

    python -m benchmarks.sweep_all_reduce [--json results.jsonl] [--kib 8 64 1024]

    NCCL        torch.distributed
    symmetric   torch's symmetric memory: one shot up to 256 KiB, two from there on
    words       kernels/ranks/all_reduce/triton.py; 512: with at least so many words a program, +norm 32: so many warps
    direct      kernels/ranks/all_reduce/direct.py in one shot (two GPUs) or two
    parts       reduce-scatter, norm of a part of the rows, all-gather: parallel/token_parts.py
    gather      all ranks' tensors beside each other, as words and by NCCL

Names that end in +norm add the residual and normalize too; for NCCL that is a launch of its own. A way is checked with
other numbers for each of 40 sums that follow one another, and again after it ran in a graph. A graph holds 40 sums (10
from 2 MiB on), so its launch does not count. Microseconds are medians of 30 replays; GB/s is the bus rate
2 (n - 1) / n * bytes / time, as nccl-tests count it. A way that was wrong is not timed, and the exit code is then 1.
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
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.kernels.ops import Ops
from ridgeline.kernels.small.norm.op import rms_norm
from ridgeline.parallel.token_parts import PIECES, TokenParts

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)  # KiB
WIDTH = 4096
CHECKS, REPLAYS = 40, 30
EPS = 1e-5
TOLERANCE = 0.02  # of the largest number: bfloat16 rounds a sum and a norm, NCCL also sums between

Sum = Callable[[Tensor], Tensor]


class Way(NamedTuple):
    """A way, and its answer in torch's words. in_place: it overwrites its argument, so a graph sums zeros."""

    call: Sum
    answer: Sum
    in_place: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--meeting", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kib", type=int, nargs="*", default=SIZES)
    options = parser.parse_args()
    if options.rank is not None:
        sys.exit(run(options.rank, torch.cuda.device_count(), options))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.sweep_all_reduce", "--meeting", f"{folder}/meeting", "--kib"]
        command += [*map(str, options.kib), *(["--json", str(options.json)] if options.json else [])]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(torch.cuda.device_count())]
        sys.exit(max(process.wait() for process in ranks))


def run(rank: int, size: int, options: argparse.Namespace) -> int:
    """Be one rank. The first one prints."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(options.meeting), size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    bench = Bench(rank, size, device)
    if rank == 0:
        print(
            f"{size} x {torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds, GB/s of the fastest sum"
        )
    wrong = 0
    for kib in options.kib:
        found = bench.size(kib)
        wrong += sum(isinstance(value, str) for value in found.values())
        if rank == 0:
            report(kib, size, found, options.json)
    dist.barrier()
    dist.destroy_process_group()
    return int(wrong > 0)


class Bench:
    """The ways of one rank."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        from ridgeline.kernels.base.op import Platform
        from ridgeline.parallel.peer_memory import PeerSums
        from ridgeline.parallel.processes import ProcessAxis

        self.rank, self.world, self.device, self.symmetric = rank, size, device, symmetric
        self.sums = PeerSums(rank, size, device, with_direct=True)
        self.weight_M = torch.linspace(0.5, 1.5, WIDTH, device=device).bfloat16()
        self.ops = Ops(Platform.of(device))
        self.parts = TokenParts(ProcessAxis(rank, size, device, None), 0)
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD.group_name

    def size(self, kib: int) -> dict[str, float | str]:
        """Return each way's microseconds, or what was wrong with it."""
        rows = max(1, kib * 1024 // 2 // WIDTH)
        generator = torch.Generator(self.device).manual_seed(self.rank)
        x_TM = torch.randn(rows, WIDTH, generator=generator, device=self.device).bfloat16()
        found: dict[str, float | str] = {}
        for name, way in self.ways(x_TM).items():
            try:
                error = self.error(way, x_TM)
                found[name] = self.timed(way, x_TM) if error < TOLERANCE else f"wrong {error:.2g}"
            except Exception as mistake:  # the other rank meets it too; the next way may work
                found[name] = f"{type(mistake).__name__}: {str(mistake)[:60]}"
        return found

    def ways(self, x_TM: Tensor) -> dict[str, Way]:
        from ridgeline.kernels.ranks.all_reduce import direct, triton

        sums, memory, weight_M = self.sums, self.sums.memory, self.weight_M
        assert memory is not None
        generator = torch.Generator(self.device).manual_seed(99)
        residual_TM = torch.randn(x_TM.shape, generator=generator, device=self.device).bfloat16()  # the same on all
        own_TM = None
        if len(x_TM) % (PIECES * self.world) == 0:
            own_TM = residual_TM.view(PIECES, self.world, -1, WIDTH)[:, self.rank].flatten(0, 1)
        held = self.symmetric.empty(x_TM.shape, dtype=torch.bfloat16, device=self.device)
        self.symmetric.rendezvous(held, self.group)

        def with_norm(add: Callable[..., tuple[Tensor, Tensor]], *more: object) -> Sum:
            return lambda x: add(x, residual_TM, weight_M, EPS, *more)[0]

        def normed(x: Tensor) -> Tensor:
            return rms_norm(total(x), residual_TM, weight_M, EPS)[0]

        ways = {"NCCL": Way(nccl, total, True), "symmetric": Way(partial(self.torchs, held), total)}
        if triton.fits(x_TM):
            ways["words"] = Way(sums_of(triton.all_reduce, sums.peers), total)
            ways["words 512"] = Way(sums_of(triton.all_reduce, sums.peers, 512), total)
        for shots in (1, 2):
            if direct.fits(x_TM, self.world, shots):
                ways[f"direct {shots}"] = Way(sums_of(direct.all_reduce, memory, shots), total)
        ways["NCCL+norm"] = Way(lambda x: self.ops.rms_norm(nccl(x), residual_TM, weight_M, EPS)[0], normed, True)
        if triton.fits_rows(x_TM):
            ways["words+norm"] = Way(with_norm(triton.all_reduce_norm, sums.peers), normed)
            ways["words+norm 32"] = Way(with_norm(triton.all_reduce_norm, sums.peers, 32), normed)
        for shots in (1, 2):
            if direct.fits_rows(x_TM, self.world, shots):
                ways[f"direct {shots}+norm"] = Way(with_norm(direct.all_reduce_norm, memory, shots), normed)
        if own_TM is not None:
            ways["parts+norm"] = Way(
                lambda x: self.parts.all_reduce_norm(x, own_TM, weight_M, EPS, self.ops)[0], normed
            )
        if triton.fits_gather(x_TM):
            ways["gather"] = Way(sums_of(triton.all_gather, sums.peers), beside)
            ways["gather NCCL"] = Way(beside, beside)
        return ways

    def torchs(self, held: Tensor, x: Tensor) -> Tensor:
        held.copy_(x)
        if x.nbytes <= 1 << 18:
            return torch.ops.symm_mem.one_shot_all_reduce(held, "sum", self.group)
        return torch.ops.symm_mem.two_shot_all_reduce_(held, "sum", self.group)

    def error(self, way: Way, x: Tensor) -> float:
        """Return the largest error of sums that follow one another, on any rank, as a part of the largest number."""
        worst = torch.zeros((), device=self.device)
        many = [x.roll(number, -1) if number else x for number in range(CHECKS)]
        got = [way.call(each.clone()).clone() for each in many]
        for each, y in zip(many, got, strict=True):
            want = way.answer(each.clone()).float()
            worst = torch.maximum(worst, ((y.float() - want).abs().max() / want.abs().max()).nan_to_num(9.0))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def timed(self, way: Way, x: Tensor) -> float | str:
        """Return the microseconds of a sum inside a graph, or that the graph's sum was wrong."""
        side, held = torch.cuda.Stream(), torch.zeros_like(x) if way.in_place else x.clone()
        inside = 40 if x.nbytes <= 1 << 20 else 10
        with torch.cuda.stream(side):
            for _ in range(3):
                way.call(held)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(inside):
                y = way.call(held)
        times = []
        for _ in range(REPLAYS):
            dist.barrier()
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1000 / inside)
        want = way.answer(held.clone()).float()
        error = (y.float() - want).abs().max() / want.abs().max().clamp(min=1e-9)
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        return statistics.median(times) if error < TOLERANCE else f"wrong in a graph {float(error):.2g}"


def sums_of(add: Callable[..., Tensor], *more: object) -> Sum:
    return lambda x: add(x, *more)


def nccl(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def total(x: Tensor) -> Tensor:
    """Return the sum of all ranks' x, added up in float32."""
    wide = x.float()
    dist.all_reduce(wide)
    return wide.to(x.dtype)


def beside(x: Tensor) -> Tensor:
    """Return all ranks' x beside each other."""
    parts = x.new_empty(dist.get_world_size(), *x.shape)
    dist.all_gather_into_tensor(parts, x)
    return parts.movedim(0, -2).flatten(-2)


def report(kib: int, size: int, found: dict[str, float | str], results: Path | None) -> None:
    cells = [f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()]
    plain = {name: value for name, value in found.items() if "norm" not in name and "gather" not in name}
    sums = [value for value in plain.values() if isinstance(value, float)]
    rate = 2 * (size - 1) / size * kib * 1024 / min(sums) / 1000 if sums else 0.0
    print(f"{kib:6} KiB  {' | '.join(cells)} | {rate:.0f} GB/s", flush=True)
    if results is not None:
        line = {"what": "all-reduce", "gpus": size, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        with results.open("a") as file:
            file.write(json.dumps({**line, "bytes": kib * 1024, "us": found}) + "\n")


if __name__ == "__main__":
    main()

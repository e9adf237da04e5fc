"""The exchange of tokens between two GPUs: peer memory beside NCCL, results compared and then timed.

    python -m benchmarks.exchange [--ranks 2] [--width 2048] [--used 8] [--experts 128]

One line for each capacity: microseconds of dispatch and combine together, one by one and inside a graph, and what the
peer form sends a rank, in GB/s. A form whose results differ is named, and not timed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.kernels.ranks.exchange import words
from ridgeline.kernels.ranks.exchange.cost import rows_bytes, words_bytes
from ridgeline.parallel.exchange import Exchange, SwapExchange
from ridgeline.parallel.peer_exchange import PeerExchange
from ridgeline.parallel.processes import join
from ridgeline.perf.experts import devices_of_token

CAPACITIES = (1, 8, 64, 128, 512, 2048, 8192)
ROUNDS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("width", 2048), ("used", 8), ("experts", 128), ("rank", -1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--meeting", default="")
    args = parser.parse_args()
    if args.rank >= 0:
        rank(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.exchange", *sys.argv[1:], "--meeting", f"{folder}/meeting"]
        ranks = [subprocess.Popen([*command, "--rank", str(number)]) for number in range(args.ranks)]
        raise SystemExit(max(each.wait() for each in ranks))


def rank(args: argparse.Namespace) -> None:
    """Be one rank: all run the same, and the first one prints."""
    device = torch.device("cuda", args.rank)
    torch.cuda.set_device(device)
    axis = join(args.rank, args.ranks, Path(args.meeting), device, 30.0)
    most, held = max(CAPACITIES), args.experts // args.ranks
    swap = SwapExchange(axis)
    peer = PeerExchange(axis, device, most=most, width=args.width, used=args.used, itemsize=2)
    for capacity in CAPACITIES:
        generator = torch.Generator(device).manual_seed(args.rank)
        x_TM = torch.randn(capacity, args.width, generator=generator, device=device).bfloat16()
        expert_TK = torch.rand(capacity, args.experts, generator=generator, device=device).topk(args.used).indices.int()
        weight_TK = torch.rand(capacity, args.used, generator=generator, device=device)
        given = (x_TM, expert_TK, weight_TK, held)
        swap.capacity = peer.capacity = capacity
        results = [there_and_back(each, *given) for each in (swap, peer)]
        again = there_and_back(peer, *given)
        form = "words" if words.fits(x_TM, args.used, capacity) else "rows"
        right = torch.equal(results[0], results[1]) and torch.equal(again, results[1])
        if not axis.smallest(int(right)):
            print(f"rank {args.rank}: {capacity} tokens as {form}: {'right' if right else 'WRONG'}", flush=True)
            continue
        times = [timed(each, given, graph=graph) for graph in (False, True) for each in (swap, peer)]
        count = words_bytes if form == "words" else rows_bytes
        reached = devices_of_token(args.experts, args.used, args.ranks)
        shape = {"used": args.used, "ranks": args.ranks, "reached": reached, "itemsize": 2}
        sent = sum(count(capacity, capacity, args.width, **shape))
        if args.rank == 0:
            one, two, graph, own = times
            print(
                f"{capacity:5} tokens as {form}: one by one nccl {one:7.1f} peer {two:7.1f} µs; in a graph nccl "
                f"{graph:7.1f} peer {own:7.1f} µs, {sent / own / 1e3:.0f} GB/s",
                flush=True,
            )


def there_and_back(exchange: Exchange, x_TM: Tensor, expert_TK: Tensor, weight_TK: Tensor, held: int) -> Tensor:
    """Dispatch, multiply each token by a number for each of this rank's experts, and combine."""
    arrived = exchange.dispatch(x_TM, expert_TK, weight_TK, held)
    there_NK = arrived.expert_NK < held
    factor_NK = torch.where(there_NK, arrived.weight_NK * (arrived.expert_NK + exchange.rank), 0)
    y_NM = torch.where(there_NK.any(1, keepdim=True), arrived.x_NM * factor_NK.sum(1, keepdim=True), torch.nan)
    return exchange.combine(y_NM.to(x_TM.dtype), arrived, x_TM)


def timed(exchange: Exchange, given: tuple[Tensor, Tensor, Tensor, int], *, graph: bool) -> float:
    """Return the microseconds of a dispatch and a combine."""

    def once() -> None:
        arrived = exchange.dispatch(*given)
        exchange.combine(arrived.x_NM, arrived)

    for _ in range(3):
        once()
    run, rounds = once, ROUNDS
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(10):
                once()
        run, rounds = captured.replay, ROUNDS // 10
        run()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        run()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / ROUNDS


if __name__ == "__main__":
    main()

"""Static shapes, symbolic ones and buckets: how often torch.compile compiles for texts of many lengths, and the cost.

    python -m ridgeline_bench.scripts.stack.recompiles [--lengths 3 5 7 9 12 17 30 33] [--output results.jsonl]

A softmax over products and a gated chain run for each length in turn, then again. Ways: `static` (dynamic=False: a
graph for each length, eight at most by default), `automatic` (None: the second length makes a graph with symbols),
`symbolic` (True: from the start), and `buckets` (static, and texts are filled up to a power of two, with a mask).
Results must be those of torch. Lines have the graphs of the first round, its seconds by the clock and of processors,
and the milliseconds of a call behind it. Behind its limit of graphs Dynamo runs other lengths as torch does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ridgeline_bench.scripts.asked import OneOf, asked, check_counts, keep, told

DYNAMIC = {"static": False, "automatic": None, "symbolic": True, "buckets": False}
WIDTH = 64


def mixed(x: Tensor, seen: Tensor) -> Tensor:
    """Attention of x [S, W] to itself where `seen` [S] is True, and a gated chain behind it."""
    scores = (x @ x.T) * WIDTH**-0.5
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    y = weights @ x
    return torch.nn.functional.silu(y) * torch.nn.functional.rms_norm(y + x, (WIDTH,))


def bucket(length: int) -> int:
    """Return the power of two that a text is filled up to, 8 at least."""
    return max(8, 1 << (length - 1).bit_length())


def called(function: Callable[..., Tensor], way: str, x: Tensor) -> Tensor:
    length, room = len(x), bucket(len(x)) if way == "buckets" else len(x)
    padded = torch.nn.functional.pad(x, (0, 0, 0, room - length))
    return function(padded, torch.arange(room) < length)[:length]


@torch.no_grad()
def measured(way: str, backend: str, lengths: list[int]) -> dict[str, Any]:
    """Return the line of a way. Raise AssertionError if a result differs from torch's."""
    torch._dynamo.reset()
    counters.clear()
    function = torch.compile(mixed, backend=backend, dynamic=DYNAMIC[way])
    texts = [torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(length)) for length in lengths]
    began, spent = time.perf_counter(), time.process_time()
    for x in texts:
        got = called(function, way, x)
        torch.testing.assert_close(got, called(mixed, "static", x), rtol=1e-4, atol=1e-5)
    first, spent, times = time.perf_counter() - began, time.process_time() - spent, list[float]()
    graphs = counters["stats"]["unique_graphs"]
    for x in texts * 3:
        began = time.perf_counter()
        called(function, way, x)
        times.append(time.perf_counter() - began)
    return {
        "workload": "recompiles", "way": way, "backend": backend, "lengths": lengths, "graphs": graphs,
        "later_graphs": counters["stats"]["unique_graphs"] - graphs, "first_s": first, "first_cpu_s": spent,
        "ms": 1e3 * statistics.median(times),
    }  # fmt: skip


def main() -> None:
    a = asked(
        __doc__, ways=([OneOf(tuple(DYNAMIC))], "of treating shapes"),
        backends=([OneOf(("ridgeline", "inductor"))], "of torch.compile"), lengths=[3, 5, 7, 9, 12, 17, 30, 33, 40, 50],
        output=(Path, "the file of results"),
    )  # fmt: skip
    with told():
        check_counts(a, "lengths")
        for backend in a.backends:
            for way in a.ways:
                line = measured(way, backend, a.lengths)
                keep(a.output, line)
                print(
                    f"{backend:10} {way:10} {line['graphs']:3} graphs {line['first_s']:7.2f} s "
                    f"{line['first_cpu_s']:7.2f} s of processors {line['ms']:8.3f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()

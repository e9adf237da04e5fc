"""Products in float32 on this processor: a schedule found by a search, beside oneDNN's and a loop nest without one, and
products with epilogues beside torch's product with a kernel behind it.

    python -m ridgeline_bench.scripts.compiled_cpu_products [--sizes 1024] [--seconds 60] [--output results.jsonl]

Calls of one round follow each other. Beside the time by the clock stands the processor's own time, which other work on
the machine changes less; threads of OpenMP that wait take it as well, so give one thread where there is other work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.compiler.backend import compile_graph, decompositions
from ridgeline.compiler.products.cpu_product import CpuProduct
from ridgeline.compiler.products.cpu_schedule import CpuSchedule, cpu_space, predicted_cycles
from ridgeline.compiler.products.text import ProductSpec, plain
from ridgeline.compiler.targets import CpuTarget
from ridgeline.core.errors import RidgelineError
from ridgeline.perf.search import Found, Search, SearchSettings, Unfit
from ridgeline_bench.results import host
from ridgeline_bench.scripts.asked import asked, check_counts, keep, told


class AlwaysJoined(CpuTarget):
    """Takes each product that has an epilogue."""

    def multiplies(self, product: ProductSpec) -> bool:
        return True


class NeverJoined(CpuTarget):
    """Leaves products to torch."""

    def multiplies(self, product: ProductSpec) -> bool:
        return False


def linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.gelu(functional.linear(x, w, b), approximate="tanh")


def near(schedule: CpuSchedule, random: Random) -> Iterable[CpuSchedule]:
    """Return schedules that differ from one in a choice."""
    mine = asdict(schedule)
    differing = [
        each for each in cpu_space() if sum(mine[name] != value for name, value in asdict(each).items()) in (1, 2)
    ]
    return random.sample(differing, min(12, len(differing)))


def searched(size: int, seconds: float) -> tuple[Found[CpuSchedule], dict[CpuSchedule, CpuProduct]]:
    """Return the record of a search for a square product, and what it compiled."""
    spec = ProductSpec(size, size, size, plain(size, size, torch.float32), torch.float32, right_by_k=False)
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    exact, made = a @ b, dict[CpuSchedule, CpuProduct]()

    def prepare(schedule: CpuSchedule) -> Callable[[], float]:
        try:
            product = made[schedule] = CpuProduct(spec, schedule)
        except RidgelineError as error:
            raise Unfit(str(error)) from error
        out.fill_(torch.nan)
        product(a, b, [], out)
        if not torch.allclose(out, exact, rtol=1e-3, atol=1e-3):
            raise Unfit("its result is wrong")

        def timer() -> float:
            began = time.process_time()
            product(a, b, [], out)
            return (time.process_time() - began) / torch.get_num_threads()

        return timer

    settings = SearchSettings(
        measured=12, first=2, repeats=8, behind=1.2, seconds=seconds, generations=3, children=4, parents=2
    )
    cost = partial(predicted_cycles, sizes=(size, size, size))
    first = sorted(cpu_space(), key=cost)[: settings.measured]
    return Search(cost=cost, prepare=prepare, neighbours=near, settings=settings).run(first), made


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of each call by the clock and by the processor."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            began, used = time.perf_counter(), time.process_time()
            calls[name]()
            times[name].append((time.perf_counter() - began, time.process_time() - used))
    return {
        name: {
            "ms": 1e3 * statistics.median(each[0] for each in found[2:]),
            "fastest ms": 1e3 * min(each[0] for each in found),
            "processor ms": 1e3 * statistics.median(each[1] for each in found[2:]),
        }
        for name, found in times.items()
    }


def square(size: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Search a schedule for a size and time it beside others."""
    found, made = searched(size, seconds)
    assert found.best is not None, "no schedule was fit"
    best = found.best.candidate
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    calls: dict[str, Callable[[], Any]] = {
        "oneDNN": lambda: torch.mm(a, b, out=out),
        "ours": lambda: made[best](a, b, [], out),
    }
    times = in_turns(calls, rounds)
    slow = CpuProduct(made[best].spec, replace(best, near=1, panel=16, rows=16, depth=16, unrolled=1, ahead=False))
    times |= in_turns({"near 1, panel 16": lambda: slow(a, b, [], out)}, 2)
    timed = [trial for trial in found.trials if trial.times]
    print(f"{size}³: {len(timed)} schedules timed in {found.took:.0f} s, the best {best}")
    for name, each in times.items():
        rates = {key: round(2e-6 * size**3 / ms, 1) for key, ms in each.items()}
        print(f"  {name:18} GFLOP/s {rates}")
    return {"size": size, "took": found.took, "best": best.record(), "times": times,
            "trials": found.record(lambda each: each.record())}  # fmt: skip


def joined(rows: int, columns: int, depth: int, rounds: int) -> dict[str, Any]:
    """Time a linear layer with a GELU as one kernel, as a product of torch and a kernel behind it, and in torch."""
    from functorch.compile import aot_function, make_boxed_func

    x, w, b = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns)
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    aot_function(linear_gelu, fw_compiler=kept, decompositions=decompositions())(x, w, b)
    programs = {"one kernel": AlwaysJoined(), "a kernel behind": NeverJoined()}
    made = {name: compile_graph(graphs[0], target=target) for name, target in programs.items()}
    for program in made.values():
        torch.testing.assert_close(program(x, w, b)[0], linear_gelu(x, w, b), rtol=1e-4, atol=1e-4)
    calls = {name: (lambda program=program: program(x, w, b)) for name, program in made.items()}
    times = in_turns({**calls, "torch": lambda: linear_gelu(x, w, b)}, rounds)
    shown = ", ".join(f"{name} {each['processor ms']:.2f}" for name, each in times.items())
    print(f"linear and gelu, {rows} x {depth} x {columns}, ms of the processor: {shown}")
    return {"rows": rows, "columns": columns, "depth": depth, "times": times}


def main() -> None:
    a = asked(
        __doc__,
        sizes=([1024], "of square products"),
        seconds=(60.0, "of a search"),
        rounds=(15, "calls of each way"),
        threads=(torch.get_num_threads(), "that multiply"),
        depths=([128, 256, 512, 1024], "of the linear layers"),
        output=(Path, "the file of results"),
    )
    with told():
        check_counts(a, "sizes", "rounds", "depths", "threads")
        torch.set_num_threads(a.threads)
        line = {"machine": asdict(host()), "threads": a.threads}
        for size in a.sizes:
            keep(a.output, {**line, "workload": "compiled product of a CPU", **square(size, a.seconds, a.rounds)})
        for depth in a.depths:
            keep(a.output, {**line, "workload": "linear with gelu", **joined(2048, 1024, depth, a.rounds)})


if __name__ == "__main__":
    main()

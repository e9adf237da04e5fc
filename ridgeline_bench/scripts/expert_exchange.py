"""Experts that two GPUs of one host divide, a layer alone: dispatch, products and combine as launches of their own, a
shared expert before them or between sending and receiving, and all of it in one launch.

Each rank has tokens of its own. Results are compared first, between the ways and with one device's. Times are of graphs
of several calls, the median of the slower rank.

The command starts its ranks itself: two GPUs, or two processes on a CPU, which check and take no times.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.gemm.experts.op import grouped_down, grouped_gate_up
from ridgeline.kernels.gemm.plain.op import Epilogue, Operand
from ridgeline.kernels.gemm.route.op import Routes, in_order
from ridgeline.kernels.ops import Ops
from ridgeline.parallel.exchange import Exchange, SwapExchange
from ridgeline.parallel.processes import ProcessAxis, join
from ridgeline_bench.communication.runs import SAFE
from ridgeline_bench.machine import timing
from ridgeline_bench.scripts.asked import OneOf, asked, keep

RANKS = 2


class Shape(NamedTuple):
    """A mixture's layer. shared: the inner width of its shared expert, 0 if it has none."""

    name: str
    width: int
    inner: int
    experts: int
    used: int
    shared: int = 0


SHAPES = (Shape("qwen3-30b-a3b", 2048, 768, 128, 8), Shape("deepseek-v2-lite", 2048, 1408, 64, 6, 2816))
TINY = (Shape("tiny", 64, 48, 8, 2), Shape("tiny-shared", 64, 48, 8, 2, 64))


class Layer:
    """One rank's part of a layer, and its ways."""

    def __init__(self, shape: Shape, exchange: Exchange, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.exchange, self.device, self.dtype = shape, exchange, device, dtype
        self.ops, self.held = Ops(Platform.of(device)), shape.experts // exchange.size
        self.up = self._matrix(1 + exchange.rank, self.held, 2 * shape.inner, shape.width)
        self.down = self._matrix(11 + exchange.rank, self.held, shape.width, shape.inner)
        if shape.shared:
            self.shared_up = self._matrix(21, 2 * shape.shared, shape.width)
            self.shared_down = self._matrix(22, shape.width, shape.shared)

    def _matrix(self, seed: int, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        made = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
        return (made * shape[-1] ** -0.5).to(self.dtype)

    def tokens(self, count: int) -> tuple[Tensor, Routes]:
        generator = torch.Generator(self.device).manual_seed(100 + self.exchange.rank)
        x_TM = torch.randn(count, self.shape.width, generator=generator, device=self.device).to(self.dtype)
        score_TE = torch.rand(count, self.shape.experts, generator=generator, device=self.device)
        weight_TK, expert_TK = score_TE.topk(self.shape.used, dim=1)
        return x_TM, in_order(expert_TK.int(), weight_TK / weight_TK.sum(1, keepdim=True), self.shape.experts)

    def shared(self, x_TM: Tensor) -> Tensor | None:
        if not self.shape.shared:
            return None
        gated_TF = self.ops.norm_linear(Operand(x_TM), self.shared_up, Epilogue(gate="silu"))[0]
        return self.ops.linear(gated_TF, self.shared_down, None)

    def apart(self, x_TM: Tensor, routes: Routes) -> Tensor:
        """Dispatch, sort, products and combine, each in launches of its own, behind the shared expert."""
        add_TM = self.shared(x_TM)
        arrived = self.exchange.dispatch(x_TM, routes.expert_TK, routes.weight_TK, self.held)
        return self.exchange.combine(self._products(arrived), arrived, add_TM)

    def between_combine(self, x_TM: Tensor, routes: Routes) -> Tensor:
        """The shared expert between the parts of combine."""
        arrived = self.exchange.dispatch(x_TM, routes.expert_TK, routes.weight_TK, self.held)
        added = self.exchange.begin_combine(self._products(arrived), arrived)
        return added(self.shared(x_TM))

    def between_dispatch(self, x_TM: Tensor, routes: Routes) -> Tensor:
        """The shared expert between the parts of dispatch."""
        came = self.exchange.begin_dispatch(x_TM, routes.expert_TK, routes.weight_TK, self.held)
        add_TM = self.shared(x_TM)
        arrived = came()
        return self.exchange.combine(self._products(arrived), arrived, add_TM)

    def whole(self, x_TM: Tensor, routes: Routes) -> Tensor:
        """One launch, behind the shared expert."""
        found = self.exchange.in_one_launch(x_TM, routes, (self.up, self.down), "silu")
        if found is None:
            raise LookupError("no launch runs all of it")
        return found(self.shared(x_TM))

    def alone(self, x_TM: Tensor, routes: Routes) -> Tensor:
        """The products of as many pairs, of this rank's own tokens and experts, and no exchange: a floor.

        routes: to this rank's experts.
        """
        return self.ops.grouped_down(
            self.ops.grouped_gate_up(x_TM, self.up, None, routes, "silu"), self.down, None, routes, None
        )

    def order(self, arrived: Any) -> Routes:
        """The order of the pairs that came, a part of the ways with launches of their own."""
        return self.ops.order_pairs(arrived.expert_NK, arrived.weight_NK, self.held)

    def _products(self, arrived: Any) -> Tensor:
        own = self.order(arrived)
        h_PF = self.ops.grouped_gate_up(arrived.x_NM, self.up, None, own, "silu")
        return self.ops.grouped_down(h_PF, self.down, None, own, None)


def wanted(layer: Layer, x_TM: Tensor, routes: Routes, ranks: ProcessAxis) -> Tensor:
    """Return the results of one device that has all experts, in float32."""
    up, down = (ranks.gather_rows(each.flatten(1)).unflatten(1, each.shape[1:]) for each in (layer.up, layer.down))
    few = min(len(x_TM), 16)  # the reference reads a matrix for every pair
    some = in_order(routes.expert_TK[:few], routes.weight_TK[:few], layer.shape.experts)
    h_PF = grouped_gate_up(x_TM[:few].float(), up.float(), None, some, "silu")
    y_TM = grouped_down(h_PF, down.float(), None, some, None)
    shared_TM = layer.shared(x_TM[:few])
    return y_TM if shared_TM is None else y_TM + shared_TM.float()


def device_seconds(call: Callable[[], object], device: torch.device, calls: int) -> tuple[list[float], object]:
    """Return the seconds of a call, in graphs of several, behind another graph in which ranks meet; and what the last
    call of the last replay returned."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            result = call()
    times = []
    for _ in range(9):
        graph.replay()
        times.append(timing.device_seconds(graph.replay) / calls)
    return times, result


def rank(number: int, meeting: str, out: str, shapes: Sequence[Shape], counts: list[int], times: bool) -> None:
    """One rank: it checks and times every shape. The first one prints and keeps."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    ranks = join(number, RANKS, Path(meeting), device, 60.0)
    dtype, failed = torch.bfloat16 if on_gpu else torch.float32, False
    for shape in shapes:
        layer = Layer(shape, exchange_of(ranks, shape, device, max(counts)), device, dtype)
        for count in counts:
            for line in measured(layer, ranks, count, times and on_gpu):
                failed = failed or not line["right"]
                if number == 0:
                    print(told(line), flush=True)
                    if out and "median" in line:
                        keep(Path(out), line)
        dist.barrier()
        del layer
    sys.stdout.flush()
    os._exit(int(failed))


def told(line: dict[str, Any]) -> str:
    """Return a line of the table."""
    state = "right" if line["right"] else "WRONG"
    state += ", same bits" if line["same bits"] else f", differs by up to {line['largest difference']:.3g}"
    time_us = f"{1e6 * line['median']:9.1f} us" if "median" in line else ""
    return f"{line['name']:17} {line['tokens']:5} tokens  {line['way']:18} {time_us:12}  {state}"


def exchange_of(ranks: ProcessAxis, shape: Shape, device: torch.device, most: int) -> Exchange:
    if device.type != "cuda":
        return SwapExchange(ranks)
    from ridgeline.parallel import peer_exchange  # it needs Triton and a build for GPUs

    peer_exchange.ONE_LAUNCH_TOKENS = most
    return peer_exchange.PeerExchange(
        ranks, device, most=most, width=shape.width, used=shape.used, itemsize=2, held=shape.experts // RANKS
    )


def measured(layer: Layer, ranks: ProcessAxis, count: int, times: bool) -> list[dict[str, Any]]:
    """Return a record of each way with so many tokens a rank."""
    layer.exchange.capacity = count
    x_TM, routes = layer.tokens(count)
    want_TM, apart_TM = wanted(layer, x_TM, routes, ranks), layer.apart(x_TM, routes).clone()
    ways: dict[str, Callable[..., Tensor]] = {"apart": layer.apart, "one launch": layer.whole}
    if layer.shape.shared:
        ways |= {"shared in dispatch": layer.between_dispatch, "shared in combine": layer.between_combine}
    own = in_order(routes.expert_TK % layer.held, routes.weight_TK, layer.held)
    ways["alone"] = lambda x_TM, _: layer.alone(x_TM, own)
    found = []
    for name, way in ways.items():
        line = {"kind": "expert-exchange", "way": name, **layer.shape._asdict(), "tokens": count, "ranks": RANKS}
        try:
            got_TM = way(x_TM, routes)
        except LookupError:
            continue
        near = torch.allclose(got_TM[: len(want_TM)].float(), want_TM, rtol=2e-2, atol=2e-2)
        again = all(torch.equal(way(x_TM, routes), got_TM) for _ in range(3))
        same = torch.equal(got_TM, apart_TM)
        line |= {"right": name == "alone" or (near and again and (same or name == "one launch")), "same bits": same}
        line["largest difference"] = float((got_TM.float() - apart_TM.float()).abs().max()) if count else 0.0
        if times and ranks.smallest(int(bool(line["right"]))):
            line |= timed(partial(way, x_TM, routes), layer, ranks, count, got_TM)
        found.append(line)
    if times:
        arrived = layer.exchange.dispatch(x_TM, routes.expert_TK, routes.weight_TK, layer.held)
        layer.exchange.combine(arrived.x_NM, arrived)
        line = {**found[0], "way": "order"}
        found.append(line | timed(partial(layer.order, arrived), layer, ranks, count))
    return found


def timed(
    call: Callable[[], object], layer: Layer, ranks: ProcessAxis, count: int, want: Tensor | None = None
) -> dict[str, Any]:
    """Return the fields of a record that say how long a call takes, and whether it still returns `want` then."""
    times, result = device_seconds(call, layer.device, 20 if count <= 512 else 5)
    if want is not None and not ranks.smallest(int(isinstance(result, Tensor) and torch.equal(result, want))):
        return {"right": False}
    slower = ranks.gather_rows(torch.tensor([statistics.median(times)], device=layer.device)).max()
    return {"median": float(slower), "unit": "s", "samples": times}


def main() -> None:
    names = [shape.name for shape in (*SHAPES, *TINY)]
    options = asked(
        __doc__, out="", shapes=[OneOf(names)], counts=[1, 8, 64, 256, 2048], check=(False, "take no times"),
        rank=(-1, "of a process that this command starts"), meeting="",
    )  # fmt: skip
    if options.rank >= 0:
        shapes = [shape for shape in (*SHAPES, *TINY) if shape.name in options.shapes]
        rank(options.rank, options.meeting, options.out, shapes, options.counts, not options.check)
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        command = [sys.executable, "-m", "ridgeline_bench.scripts.expert_exchange", *sys.argv[1:], "--meeting", meeting]
        began = time.monotonic()
        running = [
            subprocess.Popen([*command, "--rank", str(each)], env={**os.environ, **SAFE}) for each in range(RANKS)
        ]
        codes = [process.wait() for process in running]
        print(f"ranks ended with {codes} after {time.monotonic() - began:.1f} s", flush=True)
        sys.exit(int(any(codes)))


if __name__ == "__main__":
    main()

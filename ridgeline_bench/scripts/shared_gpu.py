"""Several processes and streams that run split products, decode steps and prefill on one GPU at the same time.

    python -m ridgeline_bench.scripts.shared_gpu [--seconds 600] [--processes 2] [--streams 2] [--patience 30]
        [--quick] [--output FILE.jsonl]

No kernel may wait for programs of its own launch unless all of them are sure to run at once: those of another stream or
process may have the places of the ones that it waits for. Here every stream repeats a captured graph of all ops at the
shapes of Llama-3-8B, Llama-3.2-1B and Qwen3-30B-A3B, two streams in opposite orders, and each result is compared with
the first one to the bit, on the device. It ends with exit code 1 where a result differs, and with 3 where a stream has
nothing done for --patience seconds. --quick takes small shapes, on the CPU as well.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ridgeline.kernels.attention.decode.cases import DecodeCase
from ridgeline.kernels.attention.decode.op import DECODE_ATTENTION
from ridgeline.kernels.attention.paged.cases import AttentionCase
from ridgeline.kernels.attention.paged.op import PAGED_ATTENTION
from ridgeline.kernels.base.case import OpCase
from ridgeline.kernels.base.op import Op, Platform
from ridgeline.kernels.gemm.codes.cases import CodedCase
from ridgeline.kernels.gemm.codes.fragments import arranged
from ridgeline.kernels.gemm.codes.op import CODED_LINEAR, W4
from ridgeline.kernels.gemm.experts.cases import DownCase, GateUpCase
from ridgeline.kernels.gemm.experts.op import GROUPED_DOWN, GROUPED_GATE_UP
from ridgeline.kernels.gemm.fp8.cases import Fp8Case
from ridgeline.kernels.gemm.fp8.op import FP8_LINEAR, IN_BLOCKS
from ridgeline.kernels.gemm.plain.cases import LinearCase, NormLinearCase
from ridgeline.kernels.gemm.plain.op import LINEAR, NORM_LINEAR
from ridgeline.kernels.gemm.route.cases import QWEN3, RouteCase
from ridgeline.kernels.gemm.route.op import ROUTE
from ridgeline_bench.results import gpu
from ridgeline_bench.scripts.asked import asked, check_counts, keep, told

QUEUED = 2  # graphs that a stream has ahead of it
STALLED = 3  # the exit code of a process in which a stream does nothing
STARTING = 300.0  # seconds for compilation and the first results
BEAT = 1.0  # seconds between two messages of a process

Unit = tuple[Op[Any], OpCase]


@dataclass(frozen=True)
class LayerWidths:
    """A decoder's widths."""

    width: int
    qkv: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int


LLAMA_8B = LayerWidths(4096, 6144, 14_336, 32, 8, 128)
LLAMA_1B = LayerWidths(2048, 3072, 8192, 32, 8, 64)
SMALL = LayerWidths(256, 512, 768, 4, 2, 64)


@dataclass
class StreamReport:
    """What a stream has done. different: results that are not the first one, to the bit. gap: the most seconds between
    two ends of a graph. ops: how many of each op's results differ, where some do."""

    process: int
    stream: int
    graphs: int = 0
    launches: int = 0
    different: int = 0
    gap: float = 0.0
    ops: dict[str, int] = field(default_factory=dict)


def step(shape: LayerWidths, rows: int, context: int) -> Iterator[Unit]:
    """Yield the ops of a layer in a step of decoding."""
    yield NORM_LINEAR, NormLinearCase(rows, shape.width, shape.qkv)
    yield (
        DECODE_ATTENTION,
        DecodeCase(
            lengths=(context,) * rows, rotary_dim=shape.head_dim,
            num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        ),
    )  # fmt: skip
    yield from rest(shape, rows)


def prefill(shape: LayerWidths, tokens: int, context: int) -> Iterator[Unit]:
    """Yield the ops of a layer in a step with a chunk of a prompt."""
    yield NORM_LINEAR, NormLinearCase(tokens, shape.width, shape.qkv)
    yield (
        PAGED_ATTENTION,
        AttentionCase(
            rows=((tokens, context),), captured=True,
            num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        ),
    )  # fmt: skip
    yield from rest(shape, tokens)


def rest(shape: LayerWidths, tokens: int) -> Iterator[Unit]:
    """Yield a layer's products behind attention."""
    yield LINEAR, LinearCase(tokens, shape.width, shape.width)
    yield NORM_LINEAR, NormLinearCase(tokens, shape.width, shape.inner, gate="silu")
    yield LINEAR, LinearCase(tokens, shape.inner, shape.width)


def units(quick: bool) -> list[Unit]:
    """Return the ops of a graph: steps of decoding and a chunk of a prompt, then products of every kind that shares a
    tile's inputs among programs."""
    if quick:
        shared = LINEAR, LinearCase(8, 4096, 512)  # by eight programs a tile
        return [*step(SMALL, 8, 40), *prefill(SMALL, 48, 64), shared, (ROUTE, RouteCase(8, 64, QWEN3))]
    found = [*step(LLAMA_8B, 1, 2048), *step(LLAMA_8B, 64, 512), *prefill(LLAMA_8B, 1024, 2048)]
    found += [*step(LLAMA_1B, 8, 1024), *step(LLAMA_1B, 100, 256)]
    for each in (Fp8Case(8, 14_336, 4096), Fp8Case(64, 8192, 2048), Fp8Case(64, 4096, 4096, IN_BLOCKS)):
        found.append((FP8_LINEAR, each))
    found += [(CODED_LINEAR, CodedCase(tokens, 4096, 4096, W4)) for tokens in (64, 256)]
    found.append((ROUTE, RouteCase(32, 2048, QWEN3)))
    for tokens in (1, 32):
        found += [(GROUPED_GATE_UP, GateUpCase(tokens, 2048, 768, experts=128, used=8))]
        found += [(GROUPED_DOWN, DownCase(tokens, 2048, 768, experts=128, used=8))]
    return found


class ComparedCall:
    """A call of an op whose result is compared with the first one."""

    def __init__(self, unit: Unit, device: torch.device) -> None:
        op, case = unit
        self.name = f"{op.name} {case.label}"
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._arguments, self._options = case.lasting(dtype, device), case.options(dtype, device)
        if op is CODED_LINEAR and device.type == "cuda":
            x_TI, weight, bias_O = self._arguments
            self._arguments = x_TI, arranged(weight), bias_O
        self._function = op.choose(Platform.of(device))
        self._first = [x.clone() for x in tensors(self._run())]

    def again(self) -> Tensor:
        """ComparedCall the op, and return whether any bit of its result differs: bool []."""
        pairs = zip(tensors(self._run()), self._first, strict=True)
        return torch.stack([(bits(x) != bits(first)).any() for x, first in pairs]).any()

    def _run(self) -> Any:
        return self._function(*self._arguments, **self._options)


def tensors(result: Any) -> list[Tensor]:
    """Return the tensors of a result that hold something."""
    if isinstance(result, Tensor):
        return [result] if result.numel() else []
    return [x for part in result for x in tensors(part)] if isinstance(result, tuple) else []


def bits(x: Tensor) -> Tensor:
    """Return the numbers as integers, so that NaN is the same as itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.itemsize])


class LoadedStream:
    """A stream that repeats a graph of all calls."""

    def __init__(self, process: int, number: int, device: torch.device, quick: bool) -> None:
        self.told = StreamReport(process, number)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ends: list[torch.cuda.Event] = []
        self._last = time.monotonic()
        chosen = units(quick)
        self._different_U = torch.zeros(len(chosen), dtype=torch.int64, device=device)
        with self._here():
            self._calls = [ComparedCall(unit, device) for unit in (chosen if number % 2 == 0 else chosen[::-1])]
            self._all()  # so that what a first launch allocates is there
        self._graph = None if self._stream is None else torch.cuda.CUDAGraph()
        if self._graph is not None:
            torch.cuda.synchronize(device)
            # torch has a workspace of cuBLAS for each stream: graphs captured in one would share it
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._all()
        self._different_U.zero_()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def begin(self) -> None:
        """Start to count the time between two ends."""
        self._last = time.monotonic()

    def go_on(self) -> bool:
        """Note graphs that have ended, launch others, and return True if any had ended."""
        now, ended = time.monotonic(), 0
        while self._ends and self._ends[0].query():
            self._ends.pop(0)
            ended += 1
        if self._graph is None:
            self._all()
            now, ended = time.monotonic(), 1
        else:
            with self._here():
                while len(self._ends) < QUEUED:
                    self._graph.replay()
                    self._ends.append(torch.cuda.Event())
                    self._ends[-1].record(self._stream)
        if ended:
            self.told.gap, self._last = max(self.told.gap, now - self._last), now
            self.told.graphs += ended
            self.told.launches += ended * len(self._calls)
        return ended > 0

    @property
    def waited(self) -> float:
        """The seconds since a graph ended."""
        return time.monotonic() - self._last

    def end(self) -> StreamReport:
        """Wait for what was launched, and return what was done in all."""
        if self._stream is not None:
            self._stream.synchronize()
        self.told.graphs += len(self._ends)
        self.told.launches += len(self._ends) * len(self._calls)
        counts = self._different_U.tolist()
        self.told.different = sum(counts)
        self.told.ops = {call.name: count for call, count in zip(self._calls, counts, strict=True) if count}
        return self.told

    def _all(self) -> None:
        with torch.inference_mode():
            for number, call in enumerate(self._calls):
                self._different_U[number] += call.again()

    def _here(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def run(process: int, streams: int, seconds: float, patience: float, quick: bool, pipe: Connection) -> None:
    """Run the streams of one process, and send what they have done about once a second, and at the end."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        lanes = [LoadedStream(process, number, device, quick) for number in range(streams)]
        pipe.send([lane.told for lane in lanes])
        pipe.recv()  # until the other processes are ready
        begun = beat = time.monotonic()
        for lane in lanes:
            lane.begin()
        while (now := time.monotonic()) - begun < seconds:
            moved = [lane.go_on() for lane in lanes]
            if not any(moved):
                time.sleep(2e-4)
            if max(lane.waited for lane in lanes) > patience:
                pipe.send([lane.told for lane in lanes])
                os._exit(STALLED)  # the driver would wait for the kernels of this process
            if now - beat > BEAT:
                beat = now
                pipe.send([lane.told for lane in lanes])
        pipe.send([lane.end() for lane in lanes])


def load(
    processes: int, streams: int, seconds: float, patience: float = 30.0, quick: bool = False
) -> list[StreamReport]:
    """Run so many processes at once, and return what each of their streams has done.

    Raises TimeoutError, which names the process, where a stream has nothing done for `patience` seconds, and
    RuntimeError where a process ends early.
    """
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for number in range(processes):
        pipe, theirs = context.Pipe()
        child = context.Process(target=run, args=(number, streams, seconds, patience, quick, theirs), daemon=True)
        child.start()
        theirs.close()
        pipes.append(pipe)
        children.append(child)
    try:
        found = [_received(pipe, number, STARTING) for number, pipe in enumerate(pipes)]
        for pipe in pipes:
            pipe.send(None)
        begun, open_ = time.monotonic(), dict(enumerate(pipes))
        heard = dict.fromkeys(open_, begun)
        while open_:
            for ready in wait(list(open_.values()), timeout=BEAT):
                number = next(n for n, pipe in open_.items() if pipe is ready)
                try:
                    found[number], heard[number] = pipes[number].recv(), time.monotonic()
                except EOFError:
                    del open_[number]
                    children[number].join(timeout=patience)
                    if code := children[number].exitcode:
                        raise _failure(number, code, patience) from None
            for number in open_:
                if time.monotonic() - heard[number] > patience + 10 * BEAT:
                    raise _failure(number, STALLED, patience)
        return [told for each in found for told in each]
    finally:
        for child in children:
            child.kill()


def _received(pipe: Connection, number: int, patience: float) -> list[StreamReport]:
    if not pipe.poll(patience):
        raise TimeoutError(f"process {number} was not ready after {patience:.0f} s.")
    try:
        return list(pipe.recv())
    except EOFError:
        raise RuntimeError(f"process {number} ended before it was ready.") from None


def _failure(number: int, code: int, patience: float) -> Exception:
    if code == STALLED:
        return TimeoutError(f"a stream of process {number} has done nothing for {patience:.0f} s.")
    return RuntimeError(f"process {number} ended with {code}.")


def table_of(found: Sequence[StreamReport], seconds: float) -> Table:
    """Return the table of what streams have done."""
    table = Table(
        "process",
        "stream",
        "graphs",
        "launches",
        "different",
        "longest gap ms",
        "of which ops",
        title=f"{seconds:.0f} s",
    )
    for told_ in found:
        cells = told_.process, told_.stream, told_.graphs, told_.launches, told_.different, f"{1e3 * told_.gap:.1f}"
        table.add_row(*map(str, cells), ", ".join(f"{name}: {count}" for name, count in told_.ops.items()))
    return table


def main() -> None:
    a = asked(
        __doc__, seconds=600.0, processes=2, streams=2, patience=30.0, quick=(False, "small shapes"), output=Path
    )  # fmt: skip
    with told():
        check_counts(a, "processes", "streams")
    try:
        found = load(a.processes, a.streams, a.seconds, a.patience, a.quick)
    except TimeoutError as error:
        print(error, file=sys.stderr)
        raise SystemExit(STALLED) from None
    Console().print(table_of(found, a.seconds))
    for each in found:
        keep(a.output, {"kind": "shared_gpu", "gpu": gpu(), "seconds": a.seconds, **asdict(each)})
    raise SystemExit(1 if any(each.different for each in found) else 0)


if __name__ == "__main__":
    main()

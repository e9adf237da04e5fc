"""Micros that the host asks: fragments of matrices, launches, and the driver's view of occupancy."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.kernels.base.occupancy import MULTIPROCESSORS, occupancy
from ridgeline.kernels.cuda.driver import NUM_REGS, SHARED_SIZE_BYTES, Kernel
from ridgeline.kernels.micro.mma_mfma.layouts import MatrixFragment, find
from ridgeline.kernels.micro.questions import Micro, MicroCase
from ridgeline.kernels.micro.run import AskedMicro, WrongAnswer, arch_here, blocks, loaded

LAUNCHES = 200  # in a row
BEHIND = 20_000_000  # cycles for which the stream is busy, so that launches behind are there when it is not
THREADS, SHARED = range(32, 1025, 32), range(0, 220 << 10, 8 << 10)

# ---- Fragments -------------------------------------------------------------------------------------------------------

BFLOAT16, TF32, INT8 = (torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.int8, torch.int32)
ASKED = (  # WHAT → instruction, formats of operands and of sums
    ("mma.m16n8k16", BFLOAT16), ("mma.m16n8k8", TF32), ("mma.m16n8k32", INT8), ("ldmatrix.x4", BFLOAT16),
    ("ldmatrix.x4.trans", BFLOAT16), ("wgmma.m64n8k16", BFLOAT16), ("wgmma.m64n8k16", BFLOAT16),
)  # fmt: skip


def fragments(kernel: Kernel, case: MicroCase) -> list[float]:
    """Return the number of places in which a lane does not have the number that it should."""
    what = int(case.defines["WHAT"])
    name, (numbers, sums) = ASKED[what]
    instruction = next(each for each in find(name) if each.name == name)
    d = instruction["D"]
    if name.startswith("ldmatrix"):
        exact = integers(d.rows, d.columns, numbers)
        found = run_lanes(kernel, d, exact, exact).view(numbers)
        return [wrong(found, lanes_of(d, exact))]
    depth = instruction["A"].columns
    a, b = integers(d.rows, depth, numbers), integers(depth, d.columns, numbers)
    brought_a = a if what == 5 else lanes_of(instruction["A"], a)
    brought_b = b.T.contiguous() if what >= 5 else lanes_of(instruction["B"], b)
    found = run_lanes(kernel, d, brought_a, brought_b).view(sums)
    return [wrong(found, lanes_of(d, (a.double() @ b.double()).to(sums)))]


def integers(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return small numbers, whose sums of products every format holds."""
    return torch.randint(-4, 5, (rows, columns), device="cuda").to(dtype)


def lanes_of(fragment: MatrixFragment, matrix: Tensor) -> Tensor:
    """Return [lanes, places]: the numbers that each lane has."""
    at = [[fragment.at(lane, place) for place in range(fragment.places)] for lane in range(fragment.lanes)]
    rows, columns = torch.tensor(at, device=matrix.device).unbind(2)
    return matrix[rows, columns]


def run_lanes(kernel: Kernel, d: MatrixFragment, a: Tensor, b: Tensor) -> Tensor:
    """Return the words that each lane has after the instruction: [lanes, 4] int32."""
    out = torch.full((d.lanes, 4), -1, device="cuda", dtype=torch.int32)
    held = [x.contiguous() for x in (out, a, b)]
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in held]
    kernel.launch((1, 1, 1), (d.lanes, 1, 1), torch.cuda.current_stream().cuda_stream, pointers)
    torch.cuda.synchronize()
    return out


def wrong(found: Tensor, exact: Tensor) -> float:
    """Return the number of entries that differ."""
    return float((found.view(exact.shape) != exact).sum())


# ---- Launches --------------------------------------------------------------------------------------------------------


def launches(kernel: Kernel, case: MicroCase) -> list[float]:
    """Return µs of a launch, several samples: of the device, or of the host. Raises WrongAnswer if one did not run."""
    way, out = case.launch["way"], torch.zeros(16, device="cuda", dtype=torch.int64)
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    grid = (blocks(case.launch.get("grid", "1"), multiprocessors), 1, 1)
    arguments = [*(ctypes.c_void_p(out.data_ptr()) for _ in range(2)), *(ctypes.c_uint(0) for _ in range(4))]
    options = {"together": "together" in way, "early": "EARLY" in case.defines}
    stream = torch.cuda.Stream()
    done = 0

    def many(count: int) -> None:
        nonlocal done
        done += count
        for _ in range(count):
            kernel.launch(grid, (case.number("block", 32), 1, 1), stream.cuda_stream, arguments, **options)

    with torch.cuda.stream(stream):
        many(3)
        stream.synchronize()
        if way == "graph":
            samples = in_graph(many, stream, LAUNCHES)
            done += len(samples) * LAUNCHES  # there is one replay more than samples, and the capture ran nothing
        elif way == "host_graph":
            graph = captured(many, stream, 1)
            samples = [host_time(graph.replay) for _ in range(5)]
            done += 5 * LAUNCHES - 1
        elif way.startswith("host"):
            samples = [host_time(partial(many, 1)) for _ in range(5)]
        else:
            samples = [in_stream(many, stream, LAUNCHES) for _ in range(5)]
    torch.cuda.synchronize()
    if int(out[0]) != done:
        raise WrongAnswer(f"{int(out[0])} of {done} launches ran.")
    return [1e6 * each for each in samples]


def captured(many: Callable[[int], None], stream: torch.cuda.Stream, count: int) -> torch.cuda.CUDAGraph:
    """Return a graph of so many launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        many(count)
    return graph


def in_graph(many: Callable[[int], None], stream: torch.cuda.Stream, count: int) -> list[float]:
    """Return the device's seconds of a launch in a graph of so many, five times."""
    graph = captured(many, stream, count)
    graph.replay()
    return [device_time(graph.replay, stream) / count for _ in range(5)]


def in_stream(many: Callable[[int], None], stream: torch.cuda.Stream, count: int) -> float:
    """Return the device's seconds of a launch, of so many that wait behind other work."""
    torch.cuda._sleep(BEHIND)
    return device_time(partial(many, count), stream) / count


def device_time(work: Callable[[], object], stream: torch.cuda.Stream) -> float:
    """Return the device's seconds between two events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def host_time(launch: Callable[[], object]) -> float:
    """Return the host's seconds of a launch, of many on an idle device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(LAUNCHES):
        launch()
    return (time.perf_counter() - begin) / LAUNCHES


# ---- Occupancy -------------------------------------------------------------------------------------------------------


def differing(kernel: Kernel, case: MicroCase) -> list[float]:
    """Return the number of sizes of blocks and shared memory of which the driver knows another occupancy than we do."""
    registers, static = kernel.attribute(NUM_REGS), kernel.attribute(SHARED_SIZE_BYTES)
    found = sum(
        kernel.resident(threads, shared) != occupancy(arch_here(), threads, registers, static + shared).blocks
        for threads in THREADS
        for shared in SHARED
    )
    return [float(found)]


ASKS: Mapping[str, Callable[[Kernel, MicroCase], list[float]]] = {
    "fragments": fragments, "launches": launches, "occupancy": differing,
}  # fmt: skip


def samples(micro: Micro, case: MicroCase, folder: Path | None = None) -> list[float]:
    """Return the figures of a case on the current CUDA device, in its unit, several of the same.

    folder: where its cubin lies; without one it is compiled. Raises NoCudaCompiler, CudaError, DriverError and
    WrongAnswer.
    """
    if "host" not in case.launch:
        return AskedMicro(micro, case, folder).samples()
    most = MULTIPROCESSORS[arch_here().rstrip("a")].block_shared if case.launch["host"] == "occupancy" else 0
    return ASKS[case.launch["host"]](loaded(micro, case, folder, most), case)

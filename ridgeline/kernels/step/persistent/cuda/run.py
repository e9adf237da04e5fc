"""The persistent kernel: which models it takes, its definitions and its memory, and a step on a GPU in one launch.

It is on no engine's path: `docs/persistent-step.md` says what was proven of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cuda.compile import cubin
from ridgeline.kernels.cuda.driver import CudaDriver, Kernel
from ridgeline.kernels.step.persistent.records import StepArgument, TaskRecord, records_of, starts_of
from ridgeline.kernels.step.persistent.shape import DenseShape
from ridgeline.kernels.step.persistent.tasks import StepSchedule
from ridgeline.kernels.step.persistent.tensors import MarkedBuffers, RowInputs, StepBuffers, StepWeights
from ridgeline.kernels.step.persistent.validate import validate

SOURCE = Path(__file__).parent / "persistent.cu"
NAME, ARCH = "persistent", "sm_90"
WARPS, TILE = 8, 8
SHARED = 227 << 10  # bytes that a block of Hopper may have
LEAST_STAGES, MOST_STAGES = 3, 24
PAD = 32  # numbers behind each row of a stage
MOST = 4096  # inputs whose activations are in registers together: 64 registers of a thread with 8 warps
SUMS = 64  # rows times tiles whose sums over warps are made together, but at most 16 tiles


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The definitions and the memory with which the kernel is compiled and launched for a network and a number of rows.

    joins: the products of `out` join the parts of attention. depth: inputs of a stage of the ring. panel: bytes of
    shared memory for attention, or for what `out` joins. page: tokens of a block of the cache.
    warps: that compute, 8 or 16. marked: buffers are marked.
    """

    shape: DenseShape
    rows: int
    splits: int
    joins: bool
    page: int
    depth: int
    stages: int
    panel: int
    record_room: int
    warps: int
    marked: bool

    @staticmethod
    def of(
        shape: DenseShape, rows: int, page: int, schedule: StepSchedule, splits: int = 1, depth: int = 1024,
        warps: int = WARPS,
    ) -> LaunchPlan:  # fmt: skip
        """Return the plan whose ring takes the shared memory that is left. Raises ValueError for a network that the
        kernel cannot take.

        depth: made a multiple of 32 times `warps`, no larger than the network needs.
        """
        if reason := refused(shape):
            raise ValueError(f"the persistent step does not take this network: {reason}.")
        joins = any(task.kind == "out" and task.reads[0].buffer.startswith("partial") for task in schedule.tasks)
        depth = -(-min(depth, max(shape.width, shape.attended, shape.inner)) // (32 * warps)) * 32 * warps
        if page * shape.head_dim * 2 > TILE * depth:
            raise ValueError(f"the persistent step's stages of {depth} inputs hold no page of {page} tokens; use more.")
        part = shape.head_dim + 4
        attention = 4 * ((shape.group + 2) * shape.head_dim + warps * shape.group * part)
        plan = LaunchPlan(
            shape=shape, rows=rows, splits=splits, joins=joins, page=page, depth=depth, stages=0,
            panel=-(-max(attention, joins * rows * shape.attended * 2) // 16) * 16,
            record_room=ctypes.sizeof(TaskRecord) * max(map(len, schedule.blocks)), warps=warps,
            marked=bool(schedule.marked),
        )  # fmt: skip
        stages = min((SHARED - plan.shared) // plan.stage, MOST_STAGES)
        if stages < LEAST_STAGES:
            raise ValueError(
                f"the persistent step's shared memory holds {max(stages, 0)} stages of weights beside the records of "
                f"{shape.layers} layers, and {LEAST_STAGES} are the least; use less depth."
            )
        return replace(plan, stages=stages)

    @property
    def threads(self) -> int:
        """Threads of a block: those of the warps that compute, and of one that streams."""
        return 32 * (self.warps + 1)

    @property
    def stage(self) -> int:
        """Bytes of a stage, with its two barriers."""
        return TILE * (self.depth + PAD) * 2 + 16

    @property
    def sum_tiles(self) -> int:
        """The tiles of a product whose sums over warps are made together."""
        return min(16, SUMS // self.rows)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        sums = 4 * self.warps * (16 + 2 * self.sum_tiles * self.rows * TILE)
        return self.stages * self.stage + sums + self.panel + self.record_room

    @property
    def defines(self) -> Mapping[str, str]:
        """The kernel's definitions."""
        shape = self.shape
        found = {
            "ROWS": self.rows, "GROUP": shape.group, "DIM": shape.head_dim, "ROTATED": shape.rotated,
            "WIDTH": shape.width, "ATTENDED": shape.attended, "INNER": shape.inner, "PAGE": self.page,
            "SPLITS": self.splits, "JOINS": int(self.joins), "WARPS": self.warps, "MARKED": int(self.marked),
            "DEPTH": self.depth, "STAGES": self.stages, "SUM_TILES": self.sum_tiles, "MOST": MOST,
            "PAGES": TILE * self.depth // (2 * self.page * shape.head_dim),
        }  # fmt: skip
        return {name: str(value) for name, value in found.items()}


def refused(shape: DenseShape) -> str:
    """Return the reason for which the kernel cannot take a network, or ""."""
    if shape.head_dim not in (32, 64, 128, 256):
        return f"its heads are {shape.head_dim} wide, not 32, 64, 128 or 256"
    if shape.group > 8:
        return f"{shape.group} query heads share a key head, and 8 are the most"
    if shape.width > MOST:
        return f"its width {shape.width} is above {MOST}"
    for name in ("width", "attended", "inner"):
        if getattr(shape, name) % 32:
            return f"{name} {getattr(shape, name)} is no multiple of 32"
    return ""


def step_of(
    plan: LaunchPlan, schedule: StepSchedule, weights: StepWeights, inputs: RowInputs, buffers: StepBuffers
) -> tuple[StepArgument, list[Tensor]]:
    """Return the kernel's argument, and tensors that must live as long as it. Raises ValueError for a cache that lies
    otherwise than the kernel reads it."""
    shape, device = plan.shape, inputs.tokens_R.device
    steps = {keys.stride() for pair in inputs.caches for keys in pair}
    page = plan.page * shape.head_dim
    if len(steps) != 1 or next(iter(steps))[1:] != (page, shape.head_dim, 1):
        raise ValueError(f"caches with heads of {page} numbers, alike in all layers, expected: strides are {steps}.")
    given = inputs.tokens_R, inputs.positions_R, inputs.table_SC, inputs.slots_R, inputs.live_R
    forms = [each.dtype for each in given]
    if forms != [torch.int64, torch.int64, torch.int32, torch.int32, torch.bool]:
        raise ValueError(f"tokens, positions, table, slots and live rows have other types than expected: {forms}.")
    if any(each.stride(-1) != 1 for each in given):
        raise ValueError("tokens, positions, rows of the table, slots and live rows must each lie in one piece.")
    marked = MarkedBuffers(schedule, buffers)
    records = records_of(schedule, shape, weights, inputs, marked.address)
    held = [
        torch.frombuffer(bytearray(records), dtype=torch.uint8).to(device),
        torch.tensor(starts_of(schedule), dtype=torch.int32, device=device),
        torch.zeros(schedule.counters + 2, dtype=torch.int32, device=device),
    ]
    step = StepArgument(
        *(each.data_ptr() for each in (*held, *given, weights.cos_sin_ZY, weights.embedding_VM, marked.memory)),
        None, marked.set_bytes, next(iter(steps))[0], schedule.counters, len(schedule.blocks),
        inputs.table_SC.stride(0), shape.heads, shape.kv_heads, shape.width,
        plan.panel, plan.record_room, shape.eps, shape.head_eps or 0.0, shape.scale,
    )  # fmt: skip
    return step, [marked.memory, *held]


class PersistentStep:
    """A step on the current CUDA device.

    code: its cubin; without one it is compiled. Raises InvalidSchedule before anything is launched, NoCudaCompiler,
    CudaError and DriverError.
    """

    def __init__(
        self, plan: LaunchPlan, schedule: StepSchedule, weights: StepWeights, inputs: RowInputs, buffers: StepBuffers,
        code: bytes | None = None,
    ) -> None:  # fmt: skip
        driver, device = CudaDriver(), torch.cuda.current_device()
        code = code or cubin(SOURCE, ARCH, plan.defines)
        self._kernel = Kernel(driver, code, NAME, device=device, shared=plan.shared)
        each = self._kernel.resident(plan.threads)
        validate(schedule, each * torch.cuda.get_device_properties(device).multi_processor_count)
        self._step, self._held = step_of(plan, schedule, weights, inputs, buffers)
        self._alive, self._threads = (weights, inputs), plan.threads
        self.schedule, self.buffers = schedule, buffers

    def read(self, tokens_R: Tensor, positions_R: Tensor, live_R: Tensor) -> None:
        """Let the next launches read these inputs in place of the first ones. They must live as long."""
        self._step.tokens, self._step.positions = tokens_R.data_ptr(), positions_R.data_ptr()
        self._step.live = live_R.data_ptr()

    def __call__(self) -> Tensor:
        """Run the step on torch's current stream, and return the logits [R, V], the same tensor at every call."""
        arguments: list[Any] = [self._step]
        stream = torch.cuda.current_stream().cuda_stream
        self._kernel.launch((len(self.schedule.blocks), 1, 1), (self._threads, 1, 1), stream, arguments, together=True)
        return self.buffers.logits_RV

    def traced(self) -> Tensor:
        """Run the step once, and return the cycles of every task as the kernel counted them: int64 [tasks, 4], the
        tasks of a block behind each other. A row has the begin of a task, the end of its wait, its end with the signal,
        and the cycles for which it waited for weights. Blocks have clocks of their own."""
        count = sum(map(len, self.schedule.blocks))
        trace = torch.zeros(count, 4, dtype=torch.int64, device=self.buffers.logits_RV.device)
        self._step.trace = trace.data_ptr()
        self()
        torch.cuda.current_stream().synchronize()
        self._step.trace = None
        return trace.cpu()


def spent(schedule: StepSchedule, trace_T4: Tensor, seconds: float) -> dict[str, tuple[float, float, float]]:
    """Return the µs of a step that a block waits for others, works, and in that waits for weights, by kind of task and
    over all layers: means over the blocks.

    trace_T4: from `PersistentStep.traced`. seconds: of the step, by which cycles become time.
    """
    kinds = [schedule.tasks[index].kind for block in schedule.blocks for index in block]
    ends = torch.tensor([len(block) for block in schedule.blocks]).cumsum(0)
    begin_T, ready_T, end_T, weights_T = trace_T4.double().unbind(1)
    whole = max(
        float(end_T[stop - 1] - begin_T[stop - len(block)])
        for stop, block in zip(ends.tolist(), schedule.blocks, strict=True)
        if block
    )
    scale = 1e6 * seconds / whole / len(schedule.blocks)
    found: dict[str, tuple[float, float, float]] = {}
    for kind in dict.fromkeys(kinds):
        own_T = torch.tensor([each == kind for each in kinds])
        parts = (ready_T - begin_T, end_T - ready_T, weights_T)
        wait, work, weights = (scale * float(part[own_T].sum()) for part in parts)
        found[kind] = wait, work, weights
    return found

"""The persistent kernel: which models it takes, its definitions and its memory, and a step on a GPU in one launch.

It is on no engine's path: `docs/persistent-step.md` says what was proven of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.kernels.cuda.compile import cubin
from ridgeline.kernels.cuda.driver import CudaDriver, Kernel
from ridgeline.kernels.step.persistent.records import StepArgument, TaskRecord, records_of, starts_of
from ridgeline.kernels.step.persistent.shape import DenseShape
from ridgeline.kernels.step.persistent.tasks import StepSchedule
from ridgeline.kernels.step.persistent.tensors import RowInputs, StepBuffers, StepWeights
from ridgeline.kernels.step.persistent.validate import validate

SOURCE = Path(__file__).parent / "persistent.cu"
NAME, ARCH = "persistent", "sm_90"
WARPS, TILE, THREADS = 8, 8, 288
SHARED = 227 << 10  # bytes that a block of Hopper may have
LEAST_STAGES, MOST_STAGES = 3, 24
PAD = 8  # numbers behind each row of a stage or panel


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The definitions and the memory with which the kernel is compiled and launched for a network and a number of rows.

    depth: inputs of a stage of the ring. panel: bytes of shared memory for activations.
    page: tokens of a block of the cache.
    """

    shape: DenseShape
    rows: int
    splits: int
    page: int
    depth: int
    stages: int
    panel: int
    record_room: int

    @staticmethod
    def of(
        shape: DenseShape, rows: int, page: int, schedule: StepSchedule, splits: int = 1, depth: int = 1024
    ) -> LaunchPlan:
        """Return the plan whose ring takes the shared memory that is left. Raises ValueError for a network that the
        kernel cannot take."""
        if reason := refused(shape):
            raise ValueError(f"the persistent step does not take this network: {reason}.")
        numbers = max(shape.width, shape.attended, shape.inner)
        attention = 4 * ((shape.group + 1) * shape.head_dim + WARPS * shape.group * (shape.head_dim + 2))
        panel = -(-max(rows * (numbers + PAD) * 2, attention) // 16) * 16
        record_room = ctypes.sizeof(TaskRecord) * max(map(len, schedule.blocks))
        depth = min(depth, max(shape.width, shape.attended, shape.inner))
        left = SHARED - panel - record_room - 2 * WARPS * 8 * TILE * 4
        stages = min(left // (TILE * (depth + PAD) * 2 + 16), MOST_STAGES)
        if stages < LEAST_STAGES:
            raise ValueError(
                f"the persistent step's shared memory holds {max(stages, 0)} stages of weights beside the activations "
                f"of {rows} rows, and {LEAST_STAGES} are the least; use fewer rows."
            )
        return LaunchPlan(
            shape=shape, rows=rows, splits=splits, page=page, depth=depth, stages=stages, panel=panel,
            record_room=record_room,
        )  # fmt: skip

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        ring = self.stages * (TILE * (self.depth + PAD) * 2 + 16)
        return ring + 2 * WARPS * 8 * TILE * 4 + self.panel + self.record_room

    @property
    def defines(self) -> Mapping[str, str]:
        """The kernel's definitions."""
        shape = self.shape
        found = {
            "ROWS": self.rows, "GROUP": shape.group, "DIM": shape.head_dim, "ROTATED": shape.rotated,
            "PAGE": self.page, "SPLITS": self.splits, "DEPTH": self.depth, "STAGES": self.stages,
        }  # fmt: skip
        return {name: str(value) for name, value in found.items()}


def refused(shape: DenseShape) -> str:
    """Return the reason for which the kernel cannot take a network, or ""."""
    if shape.head_dim not in (32, 64, 128, 256):
        return f"its heads are {shape.head_dim} wide, not 32, 64, 128 or 256"
    if shape.group > 8:
        return f"{shape.group} query heads share a key head, and 8 are the most"
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
    given = inputs.tokens_R, inputs.positions_R, inputs.table_RC
    if any(each.dtype != torch.int32 or not each.is_contiguous() for each in given):
        raise ValueError("tokens, positions and block table must be contiguous and int32.")
    records = records_of(schedule, shape, weights, inputs, buffers)
    held = [
        torch.frombuffer(bytearray(records), dtype=torch.uint8).to(device),
        torch.tensor(starts_of(schedule), dtype=torch.int32, device=device),
        torch.zeros(schedule.counters + 1, dtype=torch.int32, device=device),
    ]
    step = StepArgument(
        *(each.data_ptr() for each in (*held, *given, weights.cos_sin_ZY, buffers.partial_RHSD, weights.embedding_VM)),
        None, next(iter(steps))[0], schedule.counters, len(schedule.blocks), inputs.table_RC.shape[1], shape.heads,
        shape.kv_heads, shape.width, plan.panel, plan.record_room, shape.eps, shape.head_eps or 0.0, shape.scale,
    )  # fmt: skip
    return step, held


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
        each = self._kernel.resident(THREADS)
        validate(schedule, each * torch.cuda.get_device_properties(device).multi_processor_count)
        self._step, self._held = step_of(plan, schedule, weights, inputs, buffers)
        self._alive = weights, inputs
        self.schedule, self.buffers = schedule, buffers

    def __call__(self) -> Tensor:
        """Run the step on torch's current stream, and return the logits [R, V], the same tensor at every call."""
        arguments: list[Any] = [self._step]
        stream = torch.cuda.current_stream().cuda_stream
        self._kernel.launch((len(self.schedule.blocks), 1, 1), (THREADS, 1, 1), stream, arguments, together=True)
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

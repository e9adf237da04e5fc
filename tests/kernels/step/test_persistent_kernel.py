"""The persistent kernel's own file, run by the emulator beside its slow twin, and its machine code."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.kernels.base.native import has_compiler
from ridgeline.kernels.cuda.compile import compilers
from ridgeline.kernels.cuda.emulate import EmulationError, LaunchShape, build
from ridgeline.kernels.step.persistent import build as graph
from ridgeline.kernels.step.persistent.cuda.cases import (
    TINY,
    TINY_QWEN,
    PersistentCase,
    distance,
    step_case,
)
from ridgeline.kernels.step.persistent.cuda.run import NAME, SOURCE, LaunchPlan, spent, step_of
from ridgeline.kernels.step.persistent.records import TaskRecord, records_of, starts_of
from ridgeline.kernels.step.persistent.shape import DenseShape
from ridgeline.kernels.step.persistent.tensors import MARK
from tests.kernels.compiled import costly, facts, persistent_steps

MORE = 1.5  # times the twin's own distance from float32: sums are made in another order
ONE = replace(TINY, layers=1)
WIDE = replace(ONE, width=320, inner=544)  # several stages, the last of which are short

emulated = pytest.mark.skipif(not has_compiler(), reason="the emulator needs a C++ compiler (c++, g++ or clang++)")
compiled = pytest.mark.skipif(not compilers(), reason="there is no CUDA compiler")


def problem(case: PersistentCase, folder: Path, order: int, source: Path = SOURCE, launches: int = 1) -> str:
    """Return what is wrong with launches of the kernel, or ""."""
    kernel = build(source, NAME, case.plan.defines, folder)
    own, same, exact = case.fresh(), case.fresh(), case.fresh(torch.float32)
    wanted, twin = exact.reference(seed=1), same.reference(seed=2)
    step, held = step_of(own.plan, own.schedule, own.weights, own.inputs, own.buffers)
    trace_T4 = torch.full((len(own.schedule.tasks), 4), -1)
    step.trace = trace_T4.data_ptr()
    blocks = len(case.schedule.blocks)
    shape = LaunchShape((blocks, 1, 1), (case.plan.threads, 1, 1), cluster=blocks, shared=case.plan.shared, order=order)
    for _ in range(launches):
        for buffer in vars(own.buffers).values():
            buffer.fill_(torch.nan)
        try:
            kernel.launch(shape, [step])
        except EmulationError as error:
            return str(error)
    began_T, ready_T, ended_T, weights_T = trace_T4.unbind(1)
    if not ((began_T >= 0) & (began_T <= ready_T) & (ready_T <= ended_T) & (weights_T <= ended_T - ready_T)).all():
        return "its trace is wrong"
    if held[-1][:-1].any() or held[-1][-1] != launches:
        return "counters were not made ready for the next launch"
    if not (held[0][launches % 2] == MARK).all():
        return "the other set of buffers is not full of marks"
    if not distance(own.buffers.logits_RV, wanted) <= MORE * distance(twin, wanted):
        return "its scores are wrong"
    for ours, theirs in zip(own.inputs.caches, exact.inputs.caches, strict=True):
        for found, right in zip(ours, theirs, strict=True):
            if not torch.equal(found.isnan(), right.isnan()):
                return "it wrote another place of the cache"
            if not distance(found.nan_to_num(), right.nan_to_num()) <= 2**-6:
                return "its cache is wrong"
    return ""


@emulated
def test_the_kernel_equals_its_twin(tmp_path: Path) -> None:
    case = step_case(replace(TINY_QWEN, layers=1), [9, -1, 0], 2, splits=2, joins=True)
    assert problem(case, tmp_path, order=5) == ""


@pytest.mark.dealt
@emulated
def test_the_kernel_with_marks_equals_its_twin(tmp_path: Path) -> None:
    case = step_case(ONE, [5, -1], 2, splits=2, marked=True)
    assert problem(case, tmp_path, order=5, launches=2) == ""


@emulated
@pytest.mark.thorough
@pytest.mark.parametrize("marked", [False, True], ids=["counters", "marks"])
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize(
    ("shape", "positions", "blocks", "splits", "depth"),
    [
        (TINY, [5], 3, 1, 1024),
        (WIDE, [5, 0, -1, 9], 3, 2, 256),
        (TINY_QWEN, [37, 20, 3], 4, 3, 256),
        (replace(ONE, head_dim=64, rotated=64), [11] * 8, 2, 1, 256),
        (replace(ONE, head_dim=128, heads=2, kv_heads=2, rotated=128), [70], 2, 2, 256),
    ],
)
def test_the_kernel_equals_its_twin_again_and_again(
    shape: DenseShape, positions: list[int], blocks: int, splits: int, depth: int, order: int, marked: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    case = step_case(shape, positions, blocks, splits, marked=marked).cut(depth=depth)
    assert problem(case, tmp_path, order, launches=2) == ""


RUNS = "    if (task.kind == ATTEND) {\n      attend"
SIGNALS = "    if (task.signal >= 0 && threadIdx.x == 0) signal_counter(step.counters + task.signal);\n"
FAULTS = {
    "no wait for weights": ("  mbarrier_wait(&shared.full[ring.stage], ring.parity);\n", ""),
    "no wait for a free stage": ("          mbarrier_wait(&shared.empty[ring.stage], ring.parity ^ 1);", ""),
    "no wait for other blocks": ("if (task.wait >= 0 && threadIdx.x == 0) wait_for_counter", "if (0) wait_for_counter"),
    "no signal": ("if (task.signal >= 0 && threadIdx.x == 0)", "if (0)"),
    "signal before the work": (RUNS, f"{SIGNALS}{RUNS}"),
    "counters stay": ("step.counters[i] = 0;", ";"),
    "no sum over warps": ("workers_meet();\n    finish<", "finish<"),
}
FEW = ("no wait for other blocks", "no wait for a free stage")
MARKED_FAULTS = {
    "no wait for inputs": ("  if (MARKED && !JOINED) return await", "  if (0) return await"),
    "no wait for one number": ('if (MARKED) emulator::block_until("a number', 'if (0) emulator::block_until("a number'),
    "no wait for parts": (
        '  if (MARKED)\n    emulator::block_until("parts',
        '  if (0)\n    emulator::block_until("parts',
    ),
    "marks in the set in use": ("(step.marks + other)[i]", "(step.marks + own)[i]"),
    "no marks for the next step": ("[i] = {~0u, ~0u, ~0u, ~0u};", "[i];"),
    "the same set again": ("      ++ended[1];\n", ""),
    "one place for sums": ("turns.sums ^= 1) {", "turns.sums ^= 0) {"),
}


@pytest.mark.dealt
@pytest.mark.few(1)
@emulated
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.thorough) for name in FAULTS]
)
def test_a_fault_in_the_kernel_shows(name: str, tmp_path: Path) -> None:
    old, new = FAULTS[name]
    text = SOURCE.read_text()
    assert text.count(old) == 1
    broken = tmp_path / "broken.cu"
    broken.write_text(text.replace(old, new))
    case = step_case(WIDE, [5], 2).cut(depth=256)
    case = replace(case, plan=replace(case.plan, stages=3))
    assert any(problem(case, tmp_path, order, broken) for order in (1, 0, 2))


@pytest.mark.dealt
@emulated
@pytest.mark.parametrize(
    "name",
    [
        name if name == "no wait for inputs" else pytest.param(name, marks=pytest.mark.thorough)
        for name in MARKED_FAULTS
    ],
)
def test_a_fault_in_the_kernel_with_marks_shows(name: str, tmp_path: Path) -> None:
    old, new = MARKED_FAULTS[name]
    text = SOURCE.read_text()
    assert text.count(old) == 1
    broken = tmp_path / "broken.cu"
    broken.write_text(text.replace(old, new))
    case = step_case(replace(TINY, layers=2), [9], 2, splits=2, marked=True)
    assert any(problem(case, tmp_path, order, broken, launches=3) for order in (1, 0, 2, 3, 4, 5))


@compiled
@pytest.mark.parametrize("step", [
    pytest.param(each, id=each[0], marks=[pytest.mark.thorough] if costly(*each[1:]) else [])
    for each in persistent_steps()
])  # fmt: skip
def test_machine_code_copies_by_bulk_and_multiplies_by_matrix_instructions(
    step: tuple[str, Path, str, Mapping[str, str]],
) -> None:
    code = facts(*step[1:])
    assert code.registers <= 224, "288 threads of a block have so many"
    assert code.stack == 0, "nothing is spilled"
    for mnemonic in ("UBLKCP", "HMMA.16816.F32.BF16", "LDG.E.128.STRONG.GPU", "SYNCS"):
        assert code.has(mnemonic), mnemonic


def test_records_say_what_the_schedule_says() -> None:
    case = step_case(TINY, [3, 4], 3, splits=2)
    records = records_of(case.schedule, case.shape, case.weights, case.inputs, case.buffers.address)
    starts = starts_of(case.schedule)
    assert ctypes.sizeof(TaskRecord) % 16 == 0
    for block, tasks in enumerate(case.schedule.blocks):
        own = records[starts[block] : starts[block + 1]]
        assert [(each.wait, each.least, each.signal) for each in own] == [
            (*(case.schedule.tasks[task].waits or ((-1, 0),))[0], case.schedule.tasks[task].signals[0])
            for task in tasks
        ]


def test_time_is_counted_by_kind() -> None:
    schedule = graph.build(TINY, 1, 2)
    tasks = sum(map(len, schedule.blocks))
    trace_T4 = torch.tensor([[10 * at, 10 * at + 3, 10 * at + 10, 2] for at in range(tasks)])
    longest = 10 * max(map(len, schedule.blocks))
    found = spent(schedule, trace_T4, seconds=longest * 1e-6)  # a cycle is a µs
    for kind, (wait, work, weights) in found.items():
        count = sum(task.kind == kind for task in schedule.tasks)
        assert (wait, work, weights) == pytest.approx((3 * count / 2, 7 * count / 2, 2 * count / 2))


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        (replace(TINY, head_dim=48), "heads are 48 wide"),
        (replace(TINY, width=8192), "width 8192 is above 4096"),
        (replace(TINY, inner=100), "inner 100 is no multiple of 32"),
        (replace(TINY, heads=18), "9 query heads share"),
        (replace(TINY, layers=400), "are the least; use less depth"),
    ],
)
def test_networks_that_the_kernel_cannot_take_are_refused(shape: DenseShape, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LaunchPlan.of(shape, 8, 16, graph.build(shape, 8, 2))

"""The persistent step on a GPU: beside its reference, again and again, in graphs, and with shapes of real models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.kernels.cuda.compile import NoCudaCompiler
from ridgeline.kernels.step.persistent.build import build
from ridgeline.kernels.step.persistent.cuda.cases import (
    LLAMA_1B,
    QWEN3_06B,
    TINY,
    TINY_QWEN,
    PersistentCase,
    distance,
    step_case,
)  # fmt: skip
from ridgeline.kernels.step.persistent.cuda.run import PersistentStep
from ridgeline.kernels.step.persistent.shape import DenseShape
from ridgeline.kernels.step.persistent.validate import InvalidSchedule

MORE = 1.5  # times the reference's own distance from float32: sums are made in another order


def on_gpu(case: PersistentCase) -> PersistentStep:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("it is for Hopper")
    try:
        return PersistentStep(case.plan, case.schedule, case.weights, case.inputs, case.buffers)
    except NoCudaCompiler as none:
        pytest.skip(str(none))


def is_right(case: PersistentCase, times: int = 3) -> None:
    alone = build(case.shape, case.rows, 1, case.splits)
    same, exact = case.fresh(), case.fresh(torch.float32)
    wanted, own = exact.reference(alone), same.reference(alone)
    step = on_gpu(case)
    first = step().clone()
    bound = MORE * distance(own, wanted)
    assert distance(first, wanted) <= bound
    for found, reference in zip(case.inputs.caches, exact.inputs.caches, strict=True):
        for ours, theirs in zip(found, reference, strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan()), "it wrote another place of the cache"
            assert distance(ours.nan_to_num(), theirs.nan_to_num()) <= 2**-5
    for _ in range(times):
        for name, buffer in vars(case.buffers).items():
            if name != "logits_RV":
                buffer.fill_(torch.nan)
        assert torch.equal(step(), first), "two runs differ"


@pytest.mark.gpu
@pytest.mark.parametrize("marked", [False, True], ids=["counters", "marks"])
@pytest.mark.parametrize(("splits", "joins"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("shape", [TINY, TINY_QWEN], ids=["llama", "qwen"])
def test_a_small_step_equals_its_reference(shape: DenseShape, splits: int, joins: bool, marked: bool) -> None:
    case = step_case(shape, [37, -1, 0, 20, 3], 9, splits, joins=joins, marked=marked, device="cuda")
    is_right(case, times=50)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "splits", "marked"), [(1, 4, False), (1, 1, True), (1, 4, True), (8, 2, False), (8, 2, True)]
)
@pytest.mark.parametrize("shape", [LLAMA_1B, QWEN3_06B], ids=["llama-1b", "qwen3-0.6b"])
def test_two_layers_of_real_shapes_equal_their_reference(
    shape: DenseShape, rows: int, splits: int, marked: bool
) -> None:  # fmt: skip
    few = replace(shape, layers=2)
    blocks, positions = (
        torch.cuda.get_device_properties(0).multi_processor_count,
        [700 - 90 * row for row in range(rows)],
    )
    is_right(step_case(few, positions, blocks, splits, page=16, marked=marked, device="cuda"), times=300)


@pytest.mark.gpu
@pytest.mark.parametrize("marked", [False, True], ids=["counters", "marks"])
def test_a_captured_step_runs_again(marked: bool) -> None:
    case = step_case(TINY, [9, 5], 5, marked=marked, device="cuda")
    step = on_gpu(case)
    wanted = step().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            step()
    trace = step.traced()
    assert (trace[:, 0] <= trace[:, 1]).all()
    assert (trace[:, 1] < trace[:, 2]).all()
    case.buffers.logits_RV.fill_(torch.nan)
    graph.replay()
    assert torch.equal(case.buffers.logits_RV, wanted)


@pytest.mark.gpu
def test_more_blocks_than_the_device_runs_are_refused() -> None:
    many = 4 * torch.cuda.get_device_properties(0).multi_processor_count
    with pytest.raises(InvalidSchedule, match="can run at the same time"):
        on_gpu(step_case(TINY, [3], many, device="cuda"))

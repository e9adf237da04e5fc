"""Kernel timings: everything listed passes its check, and what is wrong gets no speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from ridgeline.kernels.base.cost import Cost
from ridgeline.kernels.base.op import Implementation
from ridgeline.kernels.ops import OPS
from ridgeline.perf.hardware import find
from ridgeline_bench.kernels import Subject, difference, kernel_limit, subjects, time_kernels
from ridgeline_bench.machine.probes import Bench
from ridgeline_bench.machine.timing import Effort
from ridgeline_bench.results import Record

CPU = torch.device("cpu")
BENCH = Bench.of(CPU, Effort(seconds=0.0, repeats=1))
SMALL = 1 << 20  # bytes


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small ops on two threads of a busy machine wait for each other for whole time slices."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def doubled(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return 2 * torch.nn.functional.linear(x, *rest)


def raising(*_: object) -> torch.Tensor:
    raise RuntimeError("no such instruction\nat line 3")


def idle(*_: object, scale: float) -> None:
    """Store nothing."""


def small() -> list[Subject]:
    return [s for s in subjects() if s.case.cost(4).bytes < SMALL]


def smallest() -> list[Subject]:
    """Of each op the case that moves least."""
    least = {s.op.name: s for s in sorted(small(), key=lambda s: -s.case.cost(4).bytes)}
    return list(least.values())


THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("some", "dtype"),
    [
        (smallest, torch.bfloat16),
        pytest.param(small, torch.bfloat16, marks=THOROUGH),
        pytest.param(small, torch.float32, marks=THOROUGH),
    ],
)
def test_every_op_is_timed_and_every_implementation_correct(
    some: Callable[[], list[Subject]], dtype: torch.dtype
) -> None:
    timings = list(time_kernels(iter(some()), dtype, BENCH))
    assert [t for t in timings if t.error or t.seconds <= 0] == []
    missing = set(OPS) - {t.subject.op.name for t in timings}
    elsewhere = {
        "merge_attention",  # of the tokens of several ranks; a step of a group is what shows it
        "partial_attention",
        "partial_latent_attention",
        "mask_logits",  # works in place; ridgeline_bench/scripts/masks.py measures it
        "packed_attention",  # of whole prompts without a cache; ridgeline_bench/scripts/embeddings.py measures it
        "w8a8_linear",  # its weight is packed once, with a model; ridgeline_bench/scripts/cpu.py measures it
    }
    assert missing - elsewhere == {
        "activation",
        "step_inputs",
        "step_metadata",
        "step_advance",
        "step_verify",
        "step_keep",
        "step_wait",
        "step_compact",
        "step_post",
        "lookup_drafts",
        "recent_drafts",
        "attention_schedule",
        "by_adapter",
    }, "an op without cases here is never measured"


def test_an_implementation_that_is_wrong_or_fails_has_no_speed() -> None:
    subject = next(s for s in small() if s.op.name == "linear")
    bad = tuple(Implementation(n, f"{__name__}:{n}") for n in ("doubled", "raising"))
    wrong = replace(subject, op=replace(subject.op, implementations=bad))
    timings = list(time_kernels(iter([wrong]), torch.float32, BENCH))
    assert [(t.implementation, t.seconds) for t in timings] == [("doubled", 0.0), ("raising", 0.0)]
    assert "off by" in timings[0].error
    assert timings[1].error == "RuntimeError: no such instruction"
    base = Record(engine="x", version="", workload="", metric="", value=0, unit="", dtype="float32")
    assert timings[0].record(base, 4, None).value == 0


def test_an_op_that_stores_its_result_is_checked_by_what_each_implementation_stores() -> None:
    """Nothing that the reference or another implementation has stored is left for it."""
    subject = next(s for s in small() if s.op.name == "expanded_attention")
    both = (*(i for i in subject.op.implementations if i.name == "torch"), Implementation("idle", f"{__name__}:idle"))
    for order in (both, both[::-1]):
        timings = time_kernels(
            iter([replace(subject, op=replace(subject.op, implementations=order))]), torch.float32, BENCH
        )
        assert {t.implementation: t.seconds > 0 for t in timings} == {"torch": True, "idle": False}


def test_not_a_number_and_other_shapes_are_differences() -> None:
    case, x = small()[0].case, torch.ones(4)
    assert difference(x, x, case) == ""
    assert "off by" in difference(x * float("nan"), x, case)
    assert difference(torch.ones(5), x, case).startswith("is [5]")
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3]), case) == "1 of 2 values differ"


def test_limits_of_kernels() -> None:
    hardware = find("H200").attained()
    cost = Cost(4.42e12, 1500e12)
    assert kernel_limit(OPS["rms_norm"], cost, hardware, "bfloat16") == pytest.approx(1.0)
    assert kernel_limit(OPS["linear"], cost, hardware, "bfloat16") == pytest.approx(2.0)
    assert kernel_limit(OPS["linear"], cost, hardware, "int3") == 0.0
    assert kernel_limit(OPS["linear"], cost, None, "bfloat16") == 0.0

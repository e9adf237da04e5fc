"""Every step carries the time it took and the least it could have taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ridgeline.kernels.base.cost import StepShape
from ridgeline.worker.stopwatch import Stopwatch
from tests.driving import Rig, ask, rig

PROMPT = (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)


class PerToken:
    """One second a token cached and thousandth of a token sampled: sums that tell shapes apart."""

    def step_limit(self, shape: StepShape) -> float:
        return float(sum(shape.kv_len_R)) + shape.num_sampled / 1000


def finish(own: Rig) -> float:
    """Run to the end; seconds it took."""
    started = time.perf_counter()
    own.run(ask("a", PROMPT, max_tokens=4), ask("b", PROMPT[:3], max_tokens=4))
    return time.perf_counter() - started


def test_steps_take_time_and_no_more_than_passes(tiny_model: Callable[[str], Path]) -> None:
    with rig(tiny_model("llama")) as own:
        wall = finish(own)
        assert own.results
        assert all(result.elapsed > 0 for result in own.results)
        assert own.engine.headroom.elapsed == pytest.approx(sum(result.elapsed for result in own.results))
        assert own.engine.headroom.elapsed <= wall


def test_a_failed_step_took_no_time(tiny_model: Callable[[str], Path]) -> None:
    with rig(tiny_model("llama")) as own:
        own.engine._cost_model = PerToken()
        forward, calls = own.runner.forward, []

        def failing_once(plan):
            calls.append(plan)
            if len(calls) == 1:
                raise RuntimeError("the device fell over")
            return forward(plan)

        own.runner.forward = failing_once  # type: ignore[method-assign]
        own.engine.add(ask("a", PROMPT, max_tokens=4))
        own.engine.step()
        assert own.results[0].error
        assert own.engine.headroom == (0.0, 0.0)


def test_the_limit_is_that_of_the_rows_that_ran(tiny_model: Callable[[str], Path]) -> None:
    """A prompt of 10 in one chunk, then three decodes: 10, 11, 12, 13 tokens cached, one sampled each time."""
    with rig(tiny_model("llama")) as own:
        own.engine._cost_model = PerToken()
        own.engine.add(ask("a", PROMPT, max_tokens=4))
        limits, before = [], own.engine.headroom
        while own.engine.has_work:
            own.engine.step()
            limits.append(own.engine.headroom.since(before).limit)
            before = own.engine.headroom
        assert limits == pytest.approx([10.001, 11.001, 12.001, 13.001])


def test_without_a_cost_model_nothing_is_claimed(tiny_model: Callable[[str], Path]) -> None:
    with rig(tiny_model("llama")) as own:
        own.engine._cost_model = None
        finish(own)
        assert own.engine.headroom.elapsed > 0
        assert own.engine.headroom.share is None


def test_the_pause_between_segments_is_not_counted() -> None:
    watch, started, paused = Stopwatch(torch.device("cpu")), time.perf_counter(), 0.0
    for _ in range(2):
        with watch:
            time.sleep(0.01)
        pause = time.perf_counter()
        time.sleep(0.05)
        paused += time.perf_counter() - pause
    assert 0.02 <= watch.seconds() <= time.perf_counter() - started - paused


@pytest.mark.gpu
def test_on_a_gpu_the_device_keeps_the_time() -> None:
    """The launch returns at once; the time is the device's, and near what waiting for it shows."""
    device = torch.device("cuda")
    a = torch.randn(8192, 8192, device=device)
    a @ a
    torch.cuda.synchronize()
    watch, started = Stopwatch(device), time.perf_counter()
    with watch:
        for _ in range(8):
            a @ a
    launched = time.perf_counter() - started
    torch.cuda.synchronize()
    waited = time.perf_counter() - started
    assert launched < watch.seconds() <= waited
    assert watch.seconds() == pytest.approx(waited, rel=0.1)

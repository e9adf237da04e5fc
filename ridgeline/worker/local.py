"""The worker of one device in this process: it queues segments, copies results out, and contains failures.

On CUDA a launch is asynchronous by nature. Calls run in the engine's thread, and a result is read after the event that
follows its step. On a CPU one thread plays the device, so plans overlap with scheduling and detokenization there too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from ridgeline.core.plan import Feature, StepLogprobs, StepPlan, StepResult
from ridgeline.kernels.launch import on_device
from ridgeline.kernels.sampling.scoring import DeviceLogprobs
from ridgeline.worker.runner import Forwarded, Runner, Sampled
from ridgeline.worker.stopwatch import Stopwatch
from ridgeline.worker.upload import Download

T = TypeVar("T")
# The beginnings of device errors for which torch has no type.
LOST = ("CUDA error", "HIP error", "Triton Error [CUDA]", "Triton Error [HIP]")


@dataclass
class Ticket:
    """A submitted plan on its way.

    launched: resolves once the thread has run the plan; None where there is no thread.
    """

    plan: StepPlan
    watch: Stopwatch
    forwarded: Forwarded | None = None
    outcome: Expected | None = None
    error: str | None = None
    out_of_memory: bool = False
    device_lost: bool = False
    dropped: bool = False
    launched: Future | None = None


class Expected:
    """The outcome of a step, on its way to the host."""

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled
        self._logprobs = _download(sampled.logprobs) if sampled.logprobs else None
        self._prompts = {row: _download(scores) for row, scores in sampled.forwarded.prompt_logprobs.items()}
        self._done: torch.cuda.Event | None = None
        if sampled.outcome.packed.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def result(self, runner: Runner, watch: Stopwatch) -> StepResult:
        """Wait for the outcome and return it. Raises whatever error the device reports."""
        if self._done is not None:
            self._done.synchronize()
        sampled = self._sampled
        plan, packed = sampled.forwarded.plan, runner.segments.mailbox.open(sampled.letter)
        rows, finish_at = len(plan.rows), 4 * (len(packed) // 5)  # as in `Outcome`
        tokens_R1 = packed[:finish_at].view(np.int32)[:rows, None]
        return StepResult(
            plan_id=plan.id,
            tokens_RK=tokens_R1,
            emitted_R=(tokens_R1[:, 0] >= 0).astype(np.int32),
            finish_R=packed[finish_at:].view(np.int8)[:rows],
            logprobs=_arrived(self._logprobs) if self._logprobs else None,
            prompt_logprobs={row: _arrived(scores) for row, scores in self._prompts.items()},
            elapsed=watch.seconds(),
        )


class LocalWorker:
    """A `core.plan.Worker`. It answers a plan that failed with the plan's error, and drops later plans until one
    resets."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._pending: deque[Ticket] = deque()
        self._waiting_for_masks: dict[int, Ticket] = {}
        self._failed_plan: int | None = None
        self._thread = ThreadPoolExecutor(1, "ridgeline-cpu") if runner.device.type == "cpu" else None

    @property
    def runner(self) -> Runner:
        """The runner of the segments; it is gone after `shutdown`."""
        return self._runner

    def submit(self, plan: StepPlan) -> None:
        ticket = Ticket(plan, Stopwatch(self._runner.device))
        self._pending.append(ticket)
        masked = bool(plan.rows.features & Feature.MASK)
        if masked:
            self._waiting_for_masks[plan.id] = ticket
        ticket.launched = self._run(lambda: self._start(ticket, then_sample=not masked))

    def provide_masks(self, plan_id: int, masks: Mapping[int, np.ndarray]) -> None:
        ticket = self._waiting_for_masks.pop(plan_id)
        ticket.launched = self._run(lambda: self._guard(ticket, lambda: self._sample(ticket, masks)))

    def collect(self) -> StepResult:
        ticket = self._pending.popleft()
        if ticket.launched is not None:
            ticket.launched.result()
        result: StepResult | None = None
        if ticket.outcome is not None and not ticket.dropped:
            outcome = ticket.outcome
            result = self._guard(ticket, lambda: outcome.result(self._runner, ticket.watch))
        if result is not None:
            return result
        return StepResult(
            plan_id=ticket.plan.id,
            error=ticket.error,
            out_of_memory=ticket.out_of_memory,
            device_lost=ticket.device_lost,
            dropped=ticket.dropped,
        )

    def shutdown(self) -> None:
        """Finish the submitted plans, then let go of weights and cache. The worker cannot be used afterwards."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._pending.clear()
        vars(self).pop("_runner", None)

    def _start(self, ticket: Ticket, *, then_sample: bool) -> None:
        if ticket.plan.reset:
            self._failed_plan = None
        self._guard(ticket, lambda: self._both(ticket) if then_sample else self._forward(ticket))

    def _both(self, ticket: Ticket) -> None:
        with ticket.watch:  # around both segments, since on CUDA every mark costs some microseconds
            sampled = self._runner.sample(self._runner.forward(ticket.plan), {})
        ticket.outcome = Expected(sampled)

    def _forward(self, ticket: Ticket) -> None:
        with ticket.watch:
            ticket.forwarded = self._runner.forward(ticket.plan)

    def _sample(self, ticket: Ticket, masks: Mapping[int, np.ndarray]) -> None:
        assert ticket.forwarded is not None
        with ticket.watch:
            sampled = self._runner.sample(ticket.forwarded, masks)
        ticket.outcome = Expected(sampled)
        ticket.forwarded = None

    def _guard(self, ticket: Ticket, action: Callable[[], T]) -> T | None:
        """Run `action` unless this or an earlier plan failed. A failure is noted, not raised."""
        if ticket.error is not None:
            return None
        if self._failed_plan is not None and ticket.plan.id > self._failed_plan:
            ticket.dropped = True
            return None
        try:
            return action()
        except Exception as error:  # whatever the error is, it must not end the engine
            self._failed_plan = ticket.plan.id
            ticket.error = f"{type(error).__name__}: {error}"
            ticket.out_of_memory = isinstance(error, torch.OutOfMemoryError)
            ticket.device_lost = not ticket.out_of_memory and _lost(error, self._runner.device)
        if ticket.out_of_memory and torch.cuda.is_available():
            torch.cuda.empty_cache()  # the free memory may be in pieces
        return None

    def _run(self, action: Callable[[], None]) -> Future | None:
        if self._thread is not None:
            return self._thread.submit(action)
        with on_device(self._runner.device):
            action()
        return None


def _lost(error: Exception, device: torch.device) -> bool:
    """Return True if the device has stopped working. After such an error every call to a GPU fails, so a small call is
    tried: the error's words alone do not tell a wrong argument of a launch from a context that is gone."""
    if device.type == "cpu":
        return isinstance(error, torch.AcceleratorError) or str(error).startswith(LOST)
    try:
        torch.zeros(1, device=device).add_(1).item()
    except torch.OutOfMemoryError:
        return False
    except Exception:
        return True
    return False


def _download(scores: DeviceLogprobs) -> Download:
    return Download((scores.rank_R, scores.top_ids_RL, scores.logprob_R, scores.top_logprobs_RL))  # the widest first


def _arrived(download: Download) -> StepLogprobs:
    rank_R, top_ids_RL, logprob_R, top_logprobs_RL = download.arrays()
    return StepLogprobs(logprob_R, rank_R, top_ids_RL, top_logprobs_RL)

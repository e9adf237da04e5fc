"""The worker of one device in this process: it queues segments, copies results out, and contains failures.

On CUDA a launch is asynchronous by nature. Calls run in the engine's thread, and a result is read after the event that
follows its step. On a CPU one thread plays the device, so plans overlap with scheduling and detokenization there too.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

import numpy as np
import torch

from ridgeline.core.errors import DeviceLost, InvalidConfig
from ridgeline.core.plan.adapters import AdapterFacts
from ridgeline.core.plan.expert_cache import ExpertCacheFigures
from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.core.plan.sleep import KINDS, Kind
from ridgeline.core.plan.step import Feature, MaskedDrafts, Moves, StepPlan, StepResult
from ridgeline.core.plan.transfer import Announced, Meeting
from ridgeline.core.plan.worker import WorkerFigures
from ridgeline.kernels.base.launch import on_device
from ridgeline.kernels.gemm.fp8.saturation import total_saturations
from ridgeline.parallel.failures import described
from ridgeline.parallel.stamps import Stamps
from ridgeline.parallel.step_trace import TracedStamps
from ridgeline.worker.adapters.store import AdapterStore
from ridgeline.worker.host_memory import HostMemory
from ridgeline.worker.inputs import Shape
from ridgeline.worker.launch import RoundLaunch
from ridgeline.worker.received import ReceivedWeights
from ridgeline.worker.runner import Runner
from ridgeline.worker.step import Arriving, PlannedStep
from ridgeline.worker.stopwatch import Stopwatch
from ridgeline.worker.threads import Threads, Work
from ridgeline.worker.upload import Download

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
TALLIES_PERIOD = 1.0  # seconds from one look at the experts' tallies to the next
# The beginnings of device errors for which torch has no type.
LOST = ("CUDA error", "HIP error", "Triton Error [CUDA]", "Triton Error [HIP]")


@dataclass
class Ticket:
    """A submitted plan on its way.

    waits: its tokens are drawn here, once masks have come.
    given: it begins then, since drafts come with the masks.
    launched: resolves once the thread has run the plan; None where there is no thread.
    tallies: copies of the experts' tallies in front of the plan and behind it, where it was its turn to bring them.
    """

    plan: StepPlan
    watch: Stopwatch
    waits: bool
    given: bool = False
    step: PlannedStep | None = None
    outcome: Arriving | None = None
    error: str | None = None
    out_of_memory: bool = False
    device_lost: bool = False
    dropped: bool = False
    launched: Future | None = None
    tallies: list[Download] = field(default_factory=list)


class LoadsBeside(Protocol):
    """The loading of weights beside the first steps."""

    def finish(self) -> None:
        """Wait until all weights are on the device. Raise what loading raised."""

    def stop(self) -> None:
        """Stop loading."""


class LocalWorker:
    """A `core.plan.worker.Worker` that sleeps and reports. It answers a plan that failed with the plan's error, and
    drops later plans until one resets.

    stamps: notes that this rank makes in every step, if ranks are traced.
    threads: chooses the number of CPU threads; None: it stays.
    loading: of the weights, which are not there yet; None: they are. Until `finish_loading` no graph is captured.
    """

    def __init__(
        self, runner: Runner, stamps: Stamps | None = None, threads: Threads | None = None,
        loading: LoadsBeside | None = None,
    ) -> None:  # fmt: skip
        self._runner, self._stamps, self._threads, self._loading = runner, stamps, threads, loading
        self._pending: deque[Ticket] = deque()
        self._waiting_for_masks: dict[int, Ticket] = {}
        self._failed_plan: int | None = None
        self._has_experts = len(runner.tallies) > 0
        self._load: ExpertLoad | None = None  # by the newest look
        self._tallies_period, self._tallies_due = TALLIES_PERIOD, 0.0
        self._saturated_before = total_saturations()  # by workers that were in this process
        self._listener: Callable[[ExpertLoad], None] | None = None
        self._thread = ThreadPoolExecutor(1, "ridgeline-cpu") if runner.device.type == "cpu" else None

    @property
    def runner(self) -> Runner:
        """The runner of the segments; it is gone after `shutdown`."""
        return self._runner

    def finish_loading(self) -> None:
        """Wait until all weights are on the device. Raise ModelLoadError if they cannot be loaded."""
        if self._loading is not None:
            self._loading.finish()
            self._loading = None

    def stop_loading(self) -> None:
        """Stop loading weights, if they are not there yet: the start is given up."""
        if self._loading is not None:
            self._loading.stop()

    def begin_trace(self) -> None:
        """Begin a trace of this rank by torch's profiler. No plan may be under way, and ranks must be traced."""
        assert isinstance(self._stamps, TracedStamps)
        self._stamps.begin()

    def end_trace(self) -> str:
        """Write the trace, and return the name of its file. No plan may be under way."""
        assert isinstance(self._stamps, TracedStamps)
        return str(self._stamps.end())

    def submit(self, plan: StepPlan) -> None:
        waits = bool(plan.rows.features & Feature.MASK) and self._runner.draws
        given = waits and bool(plan.rows.features & Feature.GIVEN)
        ticket = Ticket(plan, Stopwatch(self._runner.device, self._stamps), waits, given)
        self._pending.append(ticket)
        if waits:
            self._waiting_for_masks[plan.id] = ticket
        if not given:
            ticket.launched = self._run(self._start, ticket)
        if self._runner.launch.missed is not None or self._runner.inserted.missed:
            self._capture_behind()

    def provide_masks(
        self, plan_id: int, masks: Mapping[int, np.ndarray], drafts: Mapping[int, MaskedDrafts] | None = None
    ) -> None:
        if not self._runner.draws:
            return
        ticket = self._waiting_for_masks.pop(plan_id)
        if ticket.given:
            self._run(self._start, ticket, drafts or {})
        ticket.launched = self._run(self._guard, ticket, self._sample, ticket, masks, drafts or {})
        if self._runner.launch.missed is not None or self._runner.inserted.missed:
            self._capture_behind()

    def _capture_behind(self) -> None:
        """Capture what the step that was just launched ran op by op. Meanwhile the device is at work."""
        if not self._waiting_for_masks and self._failed_plan is None and self._loading is None:
            self._run(self._runner.capture_behind)

    def rest(self) -> bool:
        """See `core.plan.worker.Rests`."""
        if self._pending or not self._runner.pieces_left:
            return False
        if (done := self._run(self._runner.prepare_later_steps)) is not None:
            done.result()
        return self._runner.pieces_left > 0

    def settle(self, plan_id: int) -> None:
        """Let a stage of a pipeline take the tokens of all plans up to this one, which is done, into its slots."""
        self._run(self._runner.relay.settle, plan_id)

    def collect(self) -> StepResult:
        ticket = self._pending.popleft()
        if ticket.launched is not None:
            ticket.launched.result()
        result: StepResult | None = None
        if ticket.outcome is not None and not ticket.dropped:
            result = self._guard(ticket, ticket.outcome.result, ticket.watch)
        if result is not None and len(ticket.tallies) == 2:
            self._load = self._runner.tallies.load(*ticket.tallies)
            if self._listener is not None:
                self._listener(self._load)
            return replace(result, experts=self._load)
        if result is not None:
            return result
        return StepResult(
            plan_id=ticket.plan.id,
            error=ticket.error,
            out_of_memory=ticket.out_of_memory,
            device_lost=ticket.device_lost,
            dropped=ticket.dropped,
        )

    def add_adapter(self, number: int, folder: Path) -> AdapterFacts:
        """See `core.plan.adapters.HoldsAdapters`. Any thread may call it."""
        return self._adapters.add(number, folder)

    def remove_adapter(self, number: int) -> None:
        """See `core.plan.adapters.HoldsAdapters`."""
        self._adapters.remove(number)

    @property
    def _adapters(self) -> AdapterStore:
        if self._runner.adapters is None:
            raise InvalidConfig("this engine runs without adapters; start it with enable_lora.")
        return self._runner.adapters.store

    def meet_trainer(self, meeting: Meeting) -> None:
        """See `core.plan.transfer.TakesWeights`."""
        if (done := self._run(self._received.meet, meeting)) is not None:
            done.result()

    def take_weights(self, announced: Announced) -> None:
        """See `core.plan.transfer.TakesWeights`."""
        if (done := self._run(self._received.take, announced)) is not None:
            done.result()

    @property
    def _received(self) -> ReceivedWeights:
        assert self._runner.received is not None
        return self._runner.received

    def octets(self, group: int, block: int) -> list[memoryview]:
        """Return the bytes of a block in the host's memory, in one piece."""
        return [self._below.octets(group, block)]

    @property
    def shares(self) -> bool:
        """Return True if other processes may look into the host's memory."""
        return self._runner.host is not None and self._runner.host.descriptor is not None

    def shared_memory(self) -> tuple[int, list[int]]:
        """Return the descriptor of that memory, and the bytes of a block there, by group."""
        assert self._below.descriptor is not None
        return self._below.descriptor, self._below.block_bytes

    def settled(self) -> int:
        """Return the newest plan up to which all copies from and to the host's memory have ended."""
        return self._below.settled()

    def end_moves(self) -> None:
        """Wait until all copies from and to the host's memory have ended."""
        with suppress(RuntimeError):  # of a device that is lost
            self._below.settle()

    def move(self, plan: int, moves: Moves) -> None:
        """Move blocks behind plans up to this one, which have all been collected."""
        if (done := self._run(self._below.move, plan, moves)) is not None:
            done.result()

    def move_seconds(self) -> tuple[float, float]:
        """Return the seconds that copies to the host's memory took, and those from it."""
        to_host, from_it = self._below.seconds
        return to_host, from_it

    @property
    def _below(self) -> HostMemory:
        assert self._runner.host is not None
        return self._runner.host

    def expect_round(self, shape: Shape, captured: bool) -> None:
        """Let the next step exchange tokens with other ranks, none of which has more rows or tokens than `shape`.
        captured: it is replayed, if there is a graph of this size."""
        self._run(self._round_launch.expect_round, shape, captured)

    def lend_experts(self) -> Future | None:
        """Take part in a step of other ranks, in which this one has no tokens."""
        return self._run(self._round_launch.lend_experts)

    @property
    def _round_launch(self) -> RoundLaunch:
        assert isinstance(self._runner.launch, RoundLaunch)
        return self._runner.launch

    def look_next(self) -> None:
        """Look at the experts' tallies with the next plan."""

        def look() -> None:
            self._tallies_due = 0.0

        self._run(look)

    def move_experts(self, mixture: int, takes: Sequence[tuple[int, int]]) -> Future | None:
        """Let experts of a mixture change places behind the plans that were submitted. All ranks do it at once.

        mixture, takes: as in `Mover.move`.
        """
        return self._run(self._runner.mover.move, mixture, takes)

    def figures(self) -> WorkerFigures:
        """See `core.plan.worker.Reports`. A rank knows neither which rank it waits for nor why experts move; the leader
        does."""
        if not self._pending and self._runner.tallies:
            now = self._asked(self._read_tallies)
            self._load = now if self._load is None else self._load._replace(total_LE=now.total_LE)
        return WorkerFigures(
            experts=self._load,
            kv_saturated=self._runner.saturation.read(),
            saturated=self._asked(total_saturations) - self._saturated_before,  # no plan waits for that
            expert_cache=self._expert_cache(),
            moved_bytes=self._runner.mover.copied,
            encoder=self._runner.inserted.figures(),
        )

    def _expert_cache(self) -> ExpertCacheFigures | None:
        caches = self._runner.decoder.expert_caches
        return reduce(ExpertCacheFigures.plus, (cache.figures for cache in caches)) if caches else None

    def _asked(self, read: Callable[[], T]) -> T:
        """Return the result of `read`, which reads from the device. Raise DeviceLost if the device is lost."""
        try:
            return read()
        except Exception as error:
            if _lost(error, self._runner.device):
                why = str(error).partition("\n")[0]
                raise DeviceLost(f"the device does no work any more ({why}); start a new process.") from error
            raise

    def now(self) -> int:
        """Return the time of the clock that notes are made by, in nanoseconds. No plan may be under way."""
        assert self._stamps is not None
        with on_device(self._runner.device):
            return self._stamps.now()

    def forget_expert_load(self) -> None:
        """Count from here on. No plan may be under way."""
        self._runner.tallies.reset()
        self._load, self._tallies_due = None, 0.0

    @contextmanager
    def watching_experts(self, listener: Callable[[ExpertLoad], None]) -> Iterator[None]:
        """Look at the experts' tallies with every plan of the body, and call `listener` with each look."""
        self._tallies_period, self._tallies_due, self._listener = 0.0, 0.0, listener
        try:
            yield
        finally:
            self._tallies_period, self._listener = TALLIES_PERIOD, None

    def _read_tallies(self) -> ExpertLoad:
        copies: list[Download] = []
        read = self._run(lambda: copies.append(self._runner.tallies.copy()))
        if read is not None:
            read.result()
        else:
            torch.cuda.synchronize(self._runner.device)  # it has nothing to do but this copy
        return self._runner.tallies.load(copies[0], copies[0])

    @property
    def wakeful(self) -> str | None:
        """The reason why this cannot sleep, or None."""
        return self._runner.rest.wakeful

    def sleep(self) -> None:
        """Give the device's memory back, as `DeviceSleep.sleep`. No plan may be under way."""
        if (done := self._run(self._runner.sleep)) is not None:
            done.result()

    def wake(self, kinds: Sequence[Kind] = KINDS) -> bool:
        """Bring memory of these kinds back, and return True if all is back then. Raise InvalidConfig if others have
        taken it."""
        if (done := self._run(self._runner.rest.wake, kinds)) is not None:
            done.result()
        return self._runner.rest.awake

    def shutdown(self) -> None:
        """Finish the submitted plans, then let go of weights and cache. The worker cannot be used afterwards."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        if hasattr(self, "_runner") and (figures := self._expert_cache()) is not None:
            logger.info("experts in the host's memory: %s", figures)
        self._pending.clear()
        runner = vars(self).pop("_runner", None)
        if runner is not None and runner.device.type == "cuda":
            del runner
            gc.collect()  # graphs and what they captured refer to one another
            with suppress(RuntimeError):  # a device that is lost has nothing to give back
                torch.cuda.empty_cache()  # the next process on this GPU finds the memory free

    def _start(self, ticket: Ticket, drafts: Mapping[int, MaskedDrafts] | None = None) -> None:
        if ticket.plan.reset:
            self._failed_plan = None
        if self._threads is not None:
            self._threads.begin()
        if ticket.waits:
            self._guard(ticket, self._forward, ticket, drafts)
        else:
            self._guard(ticket, self._both, ticket)

    def _both(self, ticket: Ticket) -> None:
        if self._has_experts:
            self._look(ticket)
        with ticket.watch:  # around both segments, since on CUDA every mark costs some microseconds
            step = self._runner.forward(ticket.plan)
            if self._runner.draws:
                self._runner.sample(step)
        if self._has_experts:
            self._look(ticket)
        if self._threads is not None:
            self._threads.note(Work.of(step.plan), ticket.watch.seconds())
        ticket.outcome = self._runner.ending.expected(step)

    def _forward(self, ticket: Ticket, drafts: Mapping[int, MaskedDrafts] | None) -> None:
        if self._has_experts:
            self._look(ticket)
        with ticket.watch:
            step = ticket.step = self._runner.forward(ticket.plan, drafts)
            if self._runner.decoder.mesh.pp.size > 1:
                step.keep()  # others may come first
        if self._has_experts:
            self._look(ticket)
        if self._threads is not None:  # the first segment alone: masks come behind it
            self._threads.note(Work.of(step.plan), ticket.watch.seconds())

    def _look(self, ticket: Ticket) -> None:
        """Copy the tallies, if it is this plan's turn. This is called in front of the plan and behind it."""
        if not ticket.tallies:
            if (now := time.monotonic()) < self._tallies_due:
                return
            self._tallies_due = now + self._tallies_period
        ticket.tallies.append(self._runner.tallies.copy())

    def _sample(self, ticket: Ticket, masks: Mapping[int, np.ndarray], drafts: Mapping[int, MaskedDrafts]) -> None:
        assert ticket.step is not None
        with ticket.watch:
            self._runner.sample(ticket.step, masks, drafts)
        ticket.outcome = self._runner.ending.expected(ticket.step)
        ticket.step = None

    def _guard(self, ticket: Ticket, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T | None:
        """Do the work unless this or an earlier plan failed. A failure is noted, not raised."""
        if ticket.error is not None:
            return None
        if self._failed_plan is not None and ticket.plan.id > self._failed_plan:
            ticket.dropped = True
            return None
        try:
            return work(*arguments, **options)
        except Exception as error:  # whatever it is, it must not end the engine
            self._failed_plan = ticket.plan.id
            ticket.error = described(error)
            ticket.out_of_memory = isinstance(error, torch.OutOfMemoryError)
            ticket.device_lost = not ticket.out_of_memory and _lost(error, self._runner.device)
        if ticket.out_of_memory and torch.cuda.is_available():
            torch.cuda.empty_cache()  # the free memory may be in pieces
        return None

    def _run(self, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Future | None:
        """Do the work in the thread that plays the device, or here where there is a device."""
        if self._thread is not None:
            return self._thread.submit(work, *arguments, **options)
        with on_device(self._runner.device):
            work(*arguments, **options)
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

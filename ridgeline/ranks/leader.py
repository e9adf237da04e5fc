"""The leader: a worker that hands every plan to all ranks, and returns the first rank's results.

Ranks compute in step, so a rank that is gone, hangs, or alone fails a plan makes the others wait for ever. The group is
then lost as a whole: its processes are killed, and every plan is answered with `device_lost`, which ends the engine's
process and lets its supervisor start another.
"""

from __future__ import annotations

import logging
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from ridgeline.core import errors
from ridgeline.core.errors import DeviceLost, ModelLoadError, RidgelineError
from ridgeline.core.expert_load import ExpertLoad
from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.ranks.channel import Closed
from ridgeline.ranks.member import Member, Progress
from ridgeline.ranks.messages import (
    Ask,
    Begin,
    FromLeader,
    Mistake,
    PlanSender,
    Ready,
    Stop,
    Watch,
    decode_as,
    encode,
    sent_masks,
)

logger = logging.getLogger(__name__)

SILENCE = 20.0  # seconds without a sign of life after which a rank is taken to hang
START = 120.0  # seconds that the first one may take: a rank imports torch before it, maybe from a slow disk
FAREWELL = 10.0  # seconds that ranks have to end by themselves
AGREEMENT = 5.0  # seconds that other ranks have to fail a plan that one has failed
LOOK = 0.25  # seconds between looks at what is overdue


class Group:
    """A `core.plan.Worker` whose work is divided between processes.

    options: arguments of `LLMConfig`, for every rank. limit: seconds that a step may take.

    Raise what the ranks raise while they load: InvalidConfig or ModelLoadError.
    """

    def __init__(self, options: Mapping[str, Any], size: int, limit: float, progress: Progress | None) -> None:
        self._limit = limit
        self._lost: str | None = None
        self._plans = PlanSender()
        self._pending: deque[tuple[int, float]] = deque()  # a plan, and when it was submitted
        self._moved = 0.0  # when a plan was last collected, or got its masks
        self._load: ExpertLoad | None = None
        self._listener: Callable[[ExpertLoad], None] | None = None
        self._folder = TemporaryDirectory(prefix="ridgeline-ranks-", ignore_cleanup_errors=True)
        self._members: list[Member] = []
        meeting = str(Path(self._folder.name) / "meeting")
        try:
            for rank in range(size):
                self._members.append(Member(rank, size))
                self._members[-1].channel.send(encode(Begin(rank, size, meeting, limit, dict(options))))
            self._wait_until_ready(progress)
        except BaseException:
            self._end()
            raise

    @property
    def facts(self) -> Ready:
        """The first rank's facts, which it told when it was ready."""
        ready = self._members[0].ready
        assert ready is not None
        return ready

    # ---- what a worker does -----------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        self._pending.append((plan.id, time.monotonic()))
        self._tell(self._plans.message(plan))

    def provide_masks(self, plan_id: int, masks: Mapping[int, np.ndarray]) -> None:
        self._tell(sent_masks(plan_id, masks))
        self._moved = time.monotonic()

    def collect(self) -> StepResult:
        plan_id, submitted = self._pending.popleft()
        since = max(submitted, self._moved)  # it may have waited behind another plan, or for its masks
        first, *others = self._members
        self._wait_for(lambda: bool(first.results), since)
        if self._lost is None and (first.results[0].error is not None or first.results[0].dropped):
            self._wait_for(lambda: all(member.has_done(plan_id) for member in others), since)
        if self._lost is None:
            result = first.results.popleft()
            self._compare(result, others)
            self._moved = time.monotonic()
        if self._lost is not None:
            return StepResult(plan_id, error=self._lost, device_lost=True)
        if result.experts is not None:
            self._load = result.experts
            if self._listener is not None:
                self._listener(self._load)
        return result

    def expert_load(self) -> ExpertLoad | None:
        """Return what `LocalWorker.expert_load` does. All ranks route the same tokens, so the first one's counts are
        those of the group."""
        if not self._pending:
            self._load = decode_as(ExpertLoad | None, self._ask("expert_load")[0])
        return self._load

    def kv_saturated(self) -> int:
        """Return how many numbers were beyond what a checkpoint's scales let the KV cache hold, on all ranks."""
        return sum(decode_as(int, value) for value in self._ask("kv_saturated"))

    def saturations(self) -> int:
        """Return how many activations static scales cut off so far, on all ranks."""
        return sum(decode_as(int, value) for value in self._ask("saturations"))

    def expert_cache(self) -> None:
        """Return None, as a worker whose experts are all on its device."""

    def forget_expert_load(self) -> None:
        """Count from here on. No plan may be under way."""
        self._ask("forget_expert_load")
        self._load = None

    @contextmanager
    def watching_experts(self, listener: Callable[[ExpertLoad], None]) -> Iterator[None]:
        """Look at the experts' tallies with every plan of the body, and call `listener` with each look."""
        self._tell(Watch(True))
        self._listener = listener
        try:
            yield
        finally:
            self._listener = None
            self._tell(Watch(False))

    def shutdown(self) -> None:
        """Let the ranks finish and end. The worker cannot be used afterwards."""
        self._tell(Stop())
        self._end(FAREWELL if self._lost is None else 0.0)

    # ---- messages ---------------------------------------------------------------------------------------------

    def _tell(self, message: FromLeader) -> None:
        """Send a message to all ranks, unless the group is lost."""
        if self._lost is not None:
            return
        frame = encode(message)
        for member in self._members:
            try:
                member.channel.send(frame)
            except Closed:
                self._lose(f"rank {member.rank} {member.how_it_ended()}")
                return

    def _ask(self, method: str) -> list[bytes]:
        """Return every rank's answer. Raise DeviceLost."""
        self._tell(Ask(method))
        self._wait_for(lambda: all(member.answers for member in self._members), time.monotonic())
        if self._lost is not None:
            raise DeviceLost(f"the ranks do no work any more ({self._lost}); start a new process.")
        answers = [member.answers.popleft() for member in self._members]
        for answer in answers:
            if answer.error is not None:
                raise DeviceLost(answer.error)
        return [answer.value for answer in answers]

    def _wait_until_ready(self, progress: Progress | None) -> None:
        """Wait until every rank has loaded. Loading may take any time, as long as ranks give signs of life."""
        while not all(member.ready for member in self._members):
            self._listen(progress)
            for member in self._members:
                if member.mistake is not None:
                    raise _error_of(member.mistake, member.rank)
            if self._lost is not None:
                raise ModelLoadError(f"the model could not be loaded on {len(self._members)} ranks: {self._lost}.")

    def _wait_for(self, there: Callable[[], bool], since: float) -> None:
        """Wait until something is there, or the group is lost."""
        failing: float | None = None  # since when one rank has failed and the first has not
        while self._lost is None and not there():
            self._listen()
            if there():  # whenever it came: nobody may have looked for hours
                return
            now = time.monotonic()
            if now - since > self._limit:
                self._lose(f"a step was not done within {self._limit:g} s")
            failed = next((member for member in self._members if member.failure is not None), None)
            failing = (failing or now) if failed else None
            if failed is not None and failing is not None and now - failing > AGREEMENT:
                self._lose(f"rank {failed.rank} alone failed: {failed.failure}")

    def _listen(self, progress: Progress | None = None) -> None:
        """Take what ranks have sent, after waiting a moment for something. Notice ranks that are gone or silent."""
        poll = select.poll()
        by_number = {member.channel.fileno(): member for member in self._members}
        for number in by_number:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(1000 * LOOK):
            member = by_number[number]
            try:
                member.take_all(progress)
            except Closed:
                self._lose(f"rank {member.rank} {member.how_it_ended()}")
                return
            except msgspec.MsgspecError as error:
                self._lose(f"rank {member.rank} sent what is no message ({error})")
                return
        for member in self._members:
            if (silence := time.monotonic() - member.heard) > (SILENCE if member.speaks else START):
                self._lose(f"rank {member.rank} has given no sign of life for {silence:.0f} s")

    def _compare(self, result: StepResult, others: Sequence[Member]) -> None:
        """Lose the group if another rank's outcome of this plan, or of an earlier one, is not the first one's."""
        for member in others:
            while member.results and member.results[0].plan_id <= result.plan_id:
                other = member.results.popleft()
                same_plan = other.plan_id == result.plan_id
                expected = (result.error is not None, result.dropped) if same_plan else (False, False)
                if (other.error is not None, other.dropped) != expected:
                    self._lose(f"rank {member.rank} alone failed or did not fail: {other.error or result.error}")
                    return

    # ---- the end ----------------------------------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
            logger.error("the group of %d ranks is lost: %s", len(self._members), why)
            self._end()

    def _end(self, patience: float = 0.0) -> None:
        """End the processes: those that still run after so many seconds are killed."""
        deadline = time.monotonic() + patience
        for member in self._members:
            member.end(max(0.0, deadline - time.monotonic()))
        self._folder.cleanup()


def _error_of(mistake: Mistake, rank: int) -> RidgelineError:
    kind = getattr(errors, mistake.kind, None) if mistake.kind else None
    if isinstance(kind, type) and issubclass(kind, RidgelineError):
        return kind(mistake.sentence)
    return ModelLoadError(f"rank {rank} could not begin: {mistake.sentence}")

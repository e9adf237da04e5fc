"""The leader: a worker that hands every plan to all ranks, and returns one rank's results. If stages of a pipeline
divide the layers, it divides each plan into parts (`parts.py`).

Ranks run every plan together, so if one rank has died, hangs, or is the only one to fail a plan, the others wait for
ever. Then the whole group is lost: its processes are killed, and every plan is answered with `device_lost`, which ends
the engine's process and lets its supervisor start another.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from ridgeline.core.errors import DeviceLost, ModelLoadError
from ridgeline.core.plan.adapters import AdapterFacts
from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.core.plan.sharding import Placement
from ridgeline.core.plan.step import MaskedDrafts, StepPlan, StepResult
from ridgeline.core.plan.transfer import Announced, Meeting
from ridgeline.core.plan.worker import WorkerFigures
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.rebalancing import Rebalancing
from ridgeline.ranks.member import Member, Progress
from ridgeline.ranks.members import Members, error_of
from ridgeline.ranks.merging import merged, of_parts, of_stages
from ridgeline.ranks.messages import (
    AddAdapter,
    MeetTrainer,
    PlanSender,
    RemoveAdapter,
    Settle,
    Stop,
    TakeWeights,
    Watch,
    decode_as,
    sent_masks,
)
from ridgeline.ranks.parts import Dealer, Part, given_to
from ridgeline.ranks.rebalancer import Rebalancer
from ridgeline.ranks.recruits import Recruits
from ridgeline.ranks.waits import Clocks, Waits

SILENCE = LLMConfig.hang_timeout  # seconds, where the options say nothing
WAITS = 2  # a rank's wait for the trainer ends by itself; one for a rank that hangs ends later
FAREWELL = 10.0  # seconds that ranks have to end by themselves
CLOCK_ROUNDS = 9  # questions of the ranks' time, of which the quickest counts


class Submitted(NamedTuple):
    """A plan on its way."""

    plan: StepPlan
    parts: list[Part]


class Looks:
    """The loads of experts that came with the results of one plan's parts, by stage."""

    def __init__(self, stages: int) -> None:
        self.by_stage: list[list[ExpertLoad]] = [[] for _ in range(stages)]

    def note(self, stage: int, result: StepResult) -> None:
        """Take the load of a stage's experts, if the result brought one."""
        if result.experts is not None:
            self.by_stage[stage].append(result.experts)


class Group(Members):
    """A `core.plan.worker.Worker` whose work is divided between processes.

    options: arguments of `LLMConfig`, for every rank. limit: seconds that a step may take. stages: of a pipeline; the
        ranks of each have consecutive numbers. recruits: processes that were started already.

    Raise what the ranks raise while they load: InvalidConfig or ModelLoadError.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        size: int,
        limit: float,
        progress: Progress | None,
        *,
        stages: int = 1,
        recruits: Recruits | None = None,
    ) -> None:
        super().__init__(size, limit, float(options.get("hang_timeout", SILENCE)))
        self._plans = PlanSender()
        self._each = size // stages  # ranks of a stage
        self._pending: deque[Submitted] = deque()
        self._load: ExpertLoad | None = None
        self._loads: list[ExpertLoad | None] = [None] * stages  # the newest of each stage
        self._listener: Callable[[ExpertLoad], None] | None = None
        self._rebalancer: Rebalancer | None = None
        self._adapting = Lock()
        self._limit_of_orders = limit
        trace_dir = options.get("rank_trace_dir")
        self._waits = Waits(size, Path(trace_dir)) if trace_dir is not None else None
        try:
            self._start(options, recruits)
            self._wait_until_ready(progress)
            if self._waits is not None:
                self._waits.clocks = self._compare_clocks()
        except BaseException:
            self._end()
            raise

    # ---- what a worker does -----------------------------------------------------------------------------------

    @cached_property
    def _dealer(self) -> Dealer:
        return Dealer(len(self._loads), block_size=self.facts.block_size)

    def submit(self, plan: StepPlan) -> None:
        parts = self._dealer.parts(plan)
        self._pending.append(Submitted(plan, parts))
        self._before_step({0: plan.id})
        for number, part in enumerate(parts):
            self._tell(self._plans.message(part.plan, number))

    def provide_masks(
        self, plan_id: int, masks: Mapping[int, np.ndarray], drafts: Mapping[int, MaskedDrafts] | None = None
    ) -> None:
        submitted = next(each for each in self._pending if each.plan.id == plan_id)
        for part in submitted.parts:
            own = None if drafts is None else given_to(part, drafts)
            self._tell(sent_masks(part.plan.id, given_to(part, masks), own))

    def collect(self) -> StepResult:
        plan, parts = self._pending.popleft()
        results, looks = [], Looks(len(self._loads))
        for part in parts:
            result = self._outcome_of(part.plan.id, looks)
            if result is None:
                return StepResult(plan.id, error=self._lost, device_lost=True)
            results.append(result)
        if len(self._loads) > 1 and not self._pending:
            self._tell(Settle(parts[-1].plan.id))
        result = self._with_load(merged(plan, parts, results), looks)
        self._note_load(0, result)
        return result

    def is_busy(self, ranks: Sequence[int]) -> bool:
        """Return True if these ranks have plans that were not collected."""
        return bool(self._pending)

    @property
    def part_bits(self) -> int:
        """The lower bits of the numbers by which ranks know parts of plans, where the upper ones are the plan's."""
        return self._dealer.bits

    def _outcome_of(self, plan_id: int, looks: Looks) -> StepResult | None:
        """Wait for the outcome of a part of a plan. None: the group is lost."""
        first = self._members[self._speaker]
        others = [member for member in self._members if member is not first]
        self._wait_for(lambda: bool(first.results))
        failed = self._lost is None and (first.results[0].error is not None or first.results[0].dropped)
        if failed or (self._listener is not None and len(self._loads) > 1):
            self._wait_for(lambda: all(member.has_done(plan_id) for member in others))
        if self._lost is not None:
            return None
        result = first.results.popleft()
        looks.note(self._speaker // self._each, result)
        self._note(first.rank, result)
        self._compare(result, others, looks)
        return None if self._lost is not None else result

    def _with_load(self, result: StepResult, looks: Looks) -> StepResult:
        """Return the result with the load of all stages' experts, where some stage looked."""
        for stage, loads in enumerate(looks.by_stage):
            if loads:
                self._loads[stage] = of_parts(loads)
        if not any(looks.by_stage):
            return result
        self._load = of_stages(self._loads)
        if self._listener is not None and self._load is not None:
            self._listener(self._load)
        return replace(result, experts=self._load)

    def rebalance(self, settings: Rebalancing, placement: Placement) -> None:
        """Move experts between ranks from now on, as the load wants it. placement: where they lie."""
        self._rebalancer = Rebalancer(settings, placement)

    def _before_step(self, plans: Mapping[int, int]) -> None:
        """Tell ranks what is due between two steps. plans: of the next one, of each rank that has requests."""
        if self._rebalancer is not None:
            for message in self._rebalancer.before_step(plans):
                self._tell(message)

    def _note_load(self, rank: int, result: StepResult) -> None:
        if self._rebalancer is not None and result.experts is not None:
            self._rebalancer.note(rank, result.plan_id, result.experts)

    def figures(self) -> WorkerFigures:
        """See `core.plan.worker.Reports`: the sums of all ranks."""
        each = [decode_as(WorkerFigures, answer) for answer in self.ask("figures")]
        moved = None if self._rebalancer is None else self._rebalancer.figures
        copied = sum(rank.moved_bytes for rank in each)
        return WorkerFigures(
            experts=self._loads_of([rank.experts for rank in each]),
            kv_saturated=sum(rank.kv_saturated for rank in each),
            saturated=sum(rank.saturated for rank in each),
            waits=() if self._waits is None else self._waits.ranks(),
            moved_bytes=copied,
            rebalanced=None if moved is None else moved._replace(copied=copied),
            encoder=each[0].encoder,  # every rank has the whole tower, and runs it on all pictures
        )

    def _loads_of(self, ranks: Sequence[ExpertLoad | None]) -> ExpertLoad | None:
        """Return the load of all stages. All ranks of a stage route the same tokens, so the first one's counts are
        those of the stage."""
        if not self._pending:
            self._loads = list(ranks[:: self._each])
            self._load = of_stages(self._loads)
        return self._load

    def add_adapter(self, number: int, folder: Path) -> AdapterFacts:
        """See `core.plan.adapters.HoldsAdapters`: all ranks have the adapter, or none. Any thread may call it."""
        with self._adapting:
            self._tell(AddAdapter(number, str(folder)))
            self._wait_beside(lambda: all(member.adapters for member in self._members))
            if self._lost is not None:
                raise DeviceLost(f"the ranks do no work any more ({self._lost}); start a new process.")
            answers = [member.adapters.popleft() for member in self._members]
        shares = [answer.facts for answer in answers if answer.facts is not None]
        if len({facts.key for facts in shares}) == 1 and len(shares) == len(answers):
            return shares[0]._replace(num_bytes=sum(facts.num_bytes for facts in shares))
        self.remove_adapter(number)
        mistakes = [answer.mistake for answer in answers if answer.mistake is not None]
        if mistakes:
            raise error_of(mistakes[0], f"{folder} could not be read")
        raise ModelLoadError(f"{folder} changed while ranks read it; load the adapter again.")

    def remove_adapter(self, number: int) -> None:
        """See `core.plan.adapters.HoldsAdapters`."""
        self._tell(RemoveAdapter(number))

    def meet_trainer(self, meeting: Meeting) -> None:
        """See `core.plan.transfer.TakesWeights`."""
        self._limit_of_orders = WAITS * meeting.limit
        self._order(MeetTrainer(meeting), self._limit_of_orders)

    def take_weights(self, announced: Announced) -> None:
        """See `core.plan.transfer.TakesWeights`."""
        packs = sum(1 for _ in announced.packs())  # each of which may be waited for
        self._order(TakeWeights(announced), self._limit_of_orders * max(1, packs))

    @property
    def _speaker(self) -> int:
        """The rank whose results are those of all: the first one of the last stage."""
        return self._each * (len(self._loads) - 1)

    def _speaks(self, rank: int) -> bool:
        return rank == self._speaker

    def forget_expert_load(self) -> None:
        """Count from here on. No plan may be under way."""
        self.ask("forget_expert_load")
        self._load, self._loads = None, [None] * len(self._loads)
        if self._rebalancer is not None:
            self._rebalancer.forget()

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

    def begin_trace(self) -> None:
        """Have every rank begin a trace by torch's profiler. No plan may be under way, and `rank_trace_dir` is set."""
        self.ask("begin_trace")

    def end_trace(self) -> list[Path]:
        """Have every rank write its trace, and return the files. No plan may be under way."""
        return [Path(decode_as(str, answer)) for answer in self.ask("end_trace")]

    def shutdown(self) -> None:
        """Let the ranks finish and end. The worker cannot be used afterwards."""
        if self._rebalancer is not None:
            self._rebalancer.shutdown()
        self._tell(Stop())
        self._end(FAREWELL if self._lost is None else 0.0)

    def _compare(self, result: StepResult, others: Sequence[Member], looks: Looks) -> None:
        """Lose the group if another rank's outcome of this plan, or of an earlier one, is not the first one's."""
        for member in others:
            while member.results and member.results[0].plan_id <= result.plan_id:
                other = member.results.popleft()
                self._note(member.rank, other)
                if member.rank % self._each == 0:
                    looks.note(member.rank // self._each, other)
                same_plan = other.plan_id == result.plan_id
                expected = (result.error is not None, result.dropped) if same_plan else (False, False)
                if (other.error is not None, other.dropped) != expected:
                    self._lose(f"rank {member.rank} alone failed or did not fail: {other.error or result.error}")
                    return

    def _note(self, rank: int, result: StepResult) -> None:
        if self._waits is not None:
            self._waits.note(rank, result.plan_id, result.stamps)

    def _compare_clocks(self) -> Clocks:
        rounds = []
        for _ in range(CLOCK_ROUNDS):
            before = time.monotonic_ns()
            answers = [decode_as(int, value) for value in self.ask("now")]
            rounds.append((before, answers, time.monotonic_ns()))
        return Clocks.of(rounds)

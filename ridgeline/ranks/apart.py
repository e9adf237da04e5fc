"""Ranks that have requests and a cache of their own, and divide a mixture's experts between them (data-parallel
attention).

Each rank is the worker of one engine: its `Seat` here. In the mixture layers of a step every rank must take part, so
plans go out in rounds, one plan a rank. A rank without a plan in a round still runs its experts for the other ranks.
All ranks replay a graph of the same size, the size of the round.

A round is collected in this process until an engine asks for a result of it. So engines that plan one after the other
share rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.core.plan.expert_load import ExpertLoad
from ridgeline.core.plan.step import MaskedDrafts, StepPlan, StepResult
from ridgeline.ranks.leader import Group
from ridgeline.ranks.member import Progress
from ridgeline.ranks.messages import PlanSender, Round, sent_masks
from ridgeline.ranks.recruits import Recruits


@dataclass(frozen=True)
class Seat:
    """The worker of one of the engines. The group is shut down by itself, not by a seat."""

    group: Apart
    rank: int

    def submit(self, plan: StepPlan) -> None:
        self.group.put(self.rank, plan)

    def provide_masks(
        self, plan_id: int, masks: Mapping[int, np.ndarray], drafts: Mapping[int, MaskedDrafts] | None = None
    ) -> None:
        self.group.mask(self.rank, plan_id, masks, drafts)

    def collect(self) -> StepResult:
        return self.group.collect_of(self.rank)

    def shutdown(self) -> None:
        pass


class Apart(Group):
    """The group of such ranks. A plan that fails on one of them leaves the others waiting for it in the next mixture,
    so the group is then lost."""

    def __init__(
        self,
        options: Mapping[str, Any],
        size: int,
        limit: float,
        progress: Progress | None,
        *,
        recruits: Recruits | None = None,
    ) -> None:
        self._senders = [PlanSender() for _ in range(size)]
        self._waiting: deque[list[StepPlan | None]] = deque()  # rounds that were not sent
        self._sent = [deque[int]() for _ in range(size)]  # plans of each rank
        self.seats = [Seat(self, rank) for rank in range(size)]
        super().__init__(options, size, limit, progress, recruits=recruits)

    def put(self, rank: int, plan: StepPlan) -> None:
        """Give a rank a plan, in the first round behind its last one."""
        behind = next((at for at, each in enumerate(self._waiting) if each[rank] is None), len(self._waiting))
        if behind == len(self._waiting):
            self._waiting.append([None] * len(self.seats))
        self._waiting[behind][rank] = plan
        while self._waiting and all(self._waiting[0]):
            self._send(self._waiting.popleft())

    def mask(
        self, rank: int, plan_id: int, masks: Mapping[int, np.ndarray], drafts: Mapping[int, MaskedDrafts] | None
    ) -> None:
        """Give a rank the masks of its plan, and drafts."""
        self._send_all()
        self.tell(rank, sent_masks(plan_id, masks, drafts))

    def collect_of(self, rank: int) -> StepResult:
        """Wait for the oldest plan of a rank, and return its result. Who collects has planned, and so have the others:
        what they have not filled of a round they will not."""
        self._send_all()
        plan_id = self._sent[rank].popleft()
        member = self._members[rank]
        self._wait_for(lambda: bool(member.results))
        if self._lost is None:
            result = member.results.popleft()
            if result.error is not None or result.dropped:
                self._lose(f"rank {rank} failed, and others wait for its experts: {result.error}")
        if self._lost is not None:
            return StepResult(plan_id, error=self._lost, device_lost=True)
        self._note_load(rank, result)
        if result.experts is not None and self._listener is not None:
            self._listener(result.experts)
        return result

    def is_busy(self, ranks: Sequence[int]) -> bool:
        return any(self._sent[rank] or any(each[rank] for each in self._waiting) for rank in ranks)

    def _loads_of(self, ranks: Sequence[ExpertLoad | None]) -> ExpertLoad | None:
        """Return the sum of the counts of all ranks' routers."""
        if not self._waiting and not any(self._sent):
            loads = [load for load in ranks if load is not None]
            self._load = summed(loads) if loads else None
        return self._load

    def _speaks(self, rank: int) -> bool:
        return True

    def _send_all(self) -> None:
        while self._waiting:
            self._send(self._waiting.popleft())

    def _send(self, plans: list[StepPlan | None]) -> None:
        self._before_step({rank: plan.id for rank, plan in enumerate(plans) if plan is not None})
        rows, tokens, each, captured = size_of([plan for plan in plans if plan is not None])
        for rank, plan in enumerate(plans):
            sent = None if plan is None else self._senders[rank].message(plan)
            self.tell(rank, Round(rows, tokens, each, captured, sent))
            if plan is not None:
                self._sent[rank].append(plan.id)


def size_of(plans: list[StepPlan]) -> tuple[int, int, int, bool]:
    """Return the rows, tokens, tokens of each row, and whether graphs can run them, of a round of such plans: what
    `Round` says of them."""
    each = 1 if all(plan.rows.tokens_each == 1 for plan in plans) else 0
    captured = all(not span.inserted for plan in plans for span in plan.spans)
    return max(len(plan.rows) for plan in plans), max(plan.num_tokens for plan in plans), each, captured


def summed(loads: list[ExpertLoad]) -> ExpertLoad:
    """Return the load of experts that several ranks route tokens to."""
    step_LE = np.sum([load.step_LE for load in loads], axis=0)
    newest = max(loads, key=lambda load: load.step_tokens)
    total_LE = np.sum([load.total_LE for load in loads], axis=0)
    tokens = sum(load.step_tokens for load in loads)
    return newest._replace(total_LE=total_LE, step_LE=step_LE, step_tokens=tokens)

"""The ideal worker as the stages of a pipeline, which run a plan's parts one after the other.

The first stage hears of tokens as late as it may: when a part says that it needs them. The last one draws them. Each
has its own slots and memory, and checks what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ridgeline.core.plan.step import Feature, MaskedDrafts, StepPlan, StepResult
from ridgeline.core.specs.cache_layout import CacheLayout
from ridgeline.ranks.merging import merged
from ridgeline.ranks.parts import Dealer, Part, given_to
from tests.engine.ideal_worker import IdealWorker, Step


class Stage(IdealWorker):
    """A stage that takes parts which need not say what every slot should hold."""

    def _check(self, plan: StepPlan, unsure: frozenset[int] = frozenset()) -> None:
        rows = plan.rows
        if plan.expected is not None and not set(rows.slots_R.tolist()) <= set(plan.expected):
            plan = replace(plan, expected=None)  # a later piece of a chunk
        if not rows.tokens_each and rows.num_tokens_R.max() == 1:  # which is slower, and right
            plan = replace(plan, rows=replace(rows, tokens_each=1))
        super()._check(plan, unsure)


class FirstStage(Stage):
    """A stage that draws no tokens."""

    def __init__(self, layout: CacheLayout) -> None:
        super().__init__(layout)
        self._unheard: list[tuple[StepPlan, StepResult, dict[int, int]]] = []  # with lengths by row

    def execute(self, part: StepPlan, told: StepResult) -> None:
        """Run a part whose outcome the last stage will tell."""
        while self._unheard and self._unheard[0][0].id <= part.after:
            self._hear(*self._unheard.pop(0))
        if part.reset:
            self.slots.clear()
        self.host.move(part.moves, self.memory, self.unit, self._claim)
        self._fold(part)
        self._copy(part)
        self._check(part)
        step = Step(part, {})
        self._forward(step)
        for row, [(_, kv_len)] in step.chances.items():
            slot = self.slots[int(part.rows.slots_R[row])]
            slot.kv_len = kv_len
            if part.rows.num_logits_R[row]:
                slot.last_token = -1
        ran = [row for row in step.chances if part.rows.num_logits_R[row]]
        self._unheard.append((part, told, {row: step.chances[row][0][1] for row in ran}))

    def _hear(self, part: StepPlan, told: StepResult, lengths: Mapping[int, int]) -> None:
        for row, kv_len in lengths.items():
            slot = self.slots.get(int(part.rows.slots_R[row]))
            if slot is not None:  # as a device does it: for the request that has the slot now
                slot.kv_len, slot.last_token = kv_len, int(told.tokens_RK[row, 0])
                slot.stopped = bool(told.finish_R[row])


class IdealPipeline(Stage):
    """The leader and all stages; as a worker it is the last one of these. cut: how many chunks were cut so far.
    several: how many plans were more than one part."""

    def __init__(self, layout: CacheLayout, stages: int, *, lazy: bool = True) -> None:
        super().__init__(layout, lazy=lazy)
        self.first = FirstStage(layout)
        self.dealer = Dealer(stages, least_piece=1, long_piece=3, block_size=layout.block_size)
        self.cut, self.several = 0, 0
        self._plans: list[tuple[StepPlan, list[Part]]] = []

    def submit(self, plan: StepPlan) -> None:
        parts = self.dealer.parts(plan)
        assert sum(len(part.rows_R[part.ends_R]) for part in parts) == len(plan.rows)
        self.cut += sum(int((~part.ends_R).sum()) for part in parts)
        self.several += len(parts) > 1
        self._plans.append((plan, parts))
        for part in parts:
            waits = bool(part.plan.rows.features & Feature.MASK)
            self._steps.append(Step(part.plan, None if waits else {}))
        if not self.lazy:
            self._catch_up()

    def provide_masks(
        self, plan_id: int, masks: Mapping[int, np.ndarray], drafts: Mapping[int, MaskedDrafts] | None = None
    ) -> None:
        plan, parts = self._plans[0]
        assert plan.id == plan_id
        for part in parts:
            next(step for step in self._steps if step.plan is part.plan).masks = given_to(part, masks)

    def collect(self) -> StepResult:
        plan, parts = self._plans.pop(0)
        return merged(plan, parts, [super(IdealPipeline, self).collect() for _ in parts])

    def _execute(self, step: Step) -> StepResult:
        broken = set(self.turns_nan)
        result = super()._execute(step)
        if result.error is None and not result.dropped:  # as all stages find alike
            self.first.turns_nan = broken
            self.first.execute(step.plan, result)
        return result

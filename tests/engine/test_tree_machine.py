"""The scheduler over trees of drafts: a row runs more tokens than it may emit, and verifies its whole tree or none."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from ridgeline.core.plan.request import Preemption
from ridgeline.core.plan.step import RowKind, StepResult
from ridgeline.engine.plan_builder import InFlight
from ridgeline.engine.sequence import Sequence
from tests.engine.ideal_worker import IdealWorker, Violation
from tests.engine.layouts import REVOCABLE
from tests.engine.profiles import machine_settings
from tests.engine.test_scheduler_machine import SETTINGS, Fickle, SchedulerMachine

pytestmark = pytest.mark.dealt


class WholeOrNone(Fickle):
    """Rows verify now their whole tree and now no draft."""

    def wanted(self, seq: Sequence) -> int:
        return self._most if super().wanted(seq) else 0

    def note(self, record: InFlight, result: StepResult, seconds: float) -> bool:
        for row, kind in enumerate(record.plan.rows.kinds_R):
            tokens, logits = record.plan.rows.num_tokens_R[row], record.plan.rows.num_logits_R[row]
            if kind == RowKind.VERIFY and tokens <= logits:
                raise Violation(f"row {row} runs {tokens} tokens of a tree and may emit {logits}")
        return super().note(record, result, seconds)


class TreeMachine(SchedulerMachine):
    @initialize(groups=st.sampled_from(REVOCABLE), shape=st.sampled_from([(3, 1), (4, 2), (6, 2)]), **SETTINGS)
    def start(self, groups, shape, **options) -> None:
        """shape: tokens of a row, and the depth of its tree."""
        each, deep = shape
        super().start(groups, each=each, deep=deep, **options)
        self.scheduler.running.drafting = WholeOrNone(each - 1)  # type: ignore[assignment]

    @precondition(lambda self: self.expected and self.scheduler.running.leaders())
    @rule(data=st.data())
    def somebody_gives_way(self, data) -> None:
        running = sorted(self.scheduler.running.leaders(), key=lambda seq: seq.id)
        self.scheduler._preempt(data.draw(st.sampled_from(running)), Preemption.BLOCKS)


def test_a_row_that_may_emit_another_number_is_noticed() -> None:
    """The machine below sees depths, and not only numbers of nodes."""
    machine = TreeMachine()
    options = {"block_size": 2, "extra_pages": 4, "max_num_seqs": 2, "extra_tokens": 2, "depth": 1}
    machine.start(REVOCABLE[0], (4, 2), policy="fcfs", caching=True, lazy=False, below=None, **options)
    assert isinstance(machine.worker, IdealWorker)
    assert machine.worker._depth == machine.scheduler.running.emits - 1 == 2
    assert machine.scheduler.running.each == 4


TestTrees = TreeMachine.TestCase
TestTrees.settings = machine_settings(examples=30, steps=30)

"""The scheduler over states that every token replaces: marks, forks, ends, and requests that give way at any time."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from ridgeline.core.plan.request import Preemption
from ridgeline.engine.scheduler import Scheduler
from tests.engine.layouts import GROUPS
from tests.engine.profiles import machine_settings
from tests.engine.test_scheduler_machine import SETTINGS, Fickle, SchedulerMachine

STATEFUL = tuple(groups for groups in GROUPS if "state" in dict(groups))


class StateMachine(SchedulerMachine):
    @initialize(
        groups=st.sampled_from(STATEFUL),
        interval=st.sampled_from([None, 1, 3, 6]),
        share=st.sampled_from([0.5, 0.5, 0.1, 1.0]),
        spacious=st.sampled_from([0, 0, 40]),
        each=st.sampled_from([1, 1, 2, 3]),
        ahead=st.sampled_from([0, 0, 2]),
        **SETTINGS,
    )
    def start(self, groups, interval, share, spacious, **options) -> None:
        options["extra_pages"] += spacious
        super().start(groups, **options)
        self.config = replace(self.config, state_checkpoint_interval=interval, state_cache_share=share)
        listener = self.scheduler.on_finish
        self.scheduler = Scheduler(self.config, self.layout, clock=self.clock)
        self.scheduler.on_finish = listener
        if self.each > 1:
            self.scheduler.running.drafting = Fickle(self.each - 1)  # type: ignore[assignment]

    @precondition(lambda self: self.expected and self.scheduler.running.leaders())
    @rule(data=st.data())
    def somebody_gives_way(self, data) -> None:
        running = sorted(self.scheduler.running.leaders(), key=lambda seq: seq.id)
        self.scheduler._preempt(data.draw(st.sampled_from(running)), Preemption.BLOCKS)

    @precondition(lambda self: self.expected)
    @rule()
    def everything_is_forgotten(self) -> None:
        """While requests run, and plans are in flight."""
        self.scheduler.cache.forget_all()


TestStates = StateMachine.TestCase
TestStates.settings = machine_settings(examples=50, steps=30)

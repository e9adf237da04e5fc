"""The scheduler over the stages of a pipeline, under everything at once: plans in parts mean what they meant whole."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.engine.ideal_pipeline import IdealPipeline
from tests.engine.ideal_worker import IdealWorker
from tests.engine.layouts import GROUPS
from tests.engine.profiles import machine_settings
from tests.engine.test_scheduler_machine import SETTINGS, SchedulerMachine


class PipelineMachine(SchedulerMachine):
    @initialize(
        stages=st.sampled_from([2, 2, 3, 4]),
        groups=st.sampled_from(GROUPS),
        **SETTINGS,
    )
    def start(self, stages, **options) -> None:
        self.stages = stages
        super().start(**options, each=1, cuts=True)

    def make_worker(self, lazy: bool) -> IdealWorker:
        return IdealPipeline(self.layout, self.stages, lazy=lazy)


TestPipeline = PipelineMachine.TestCase
TestPipeline.settings = machine_settings(examples=50, steps=30)

"""Prompts that end with vectors, under everything that can happen to a scheduler: no vector is other than alone, and
prompts that run whole do so in one plan and take nothing from the cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from ridgeline.core.plan.request import Request, SamplingParams, TokenEvent
from ridgeline.core.plan.step import Finish, StepPlan, StepResult
from ridgeline.engine.pace import Pace
from tests.engine.ideal_worker import IdealWorker, Step, choose, visible
from tests.engine.layouts import GROUPS
from tests.engine.profiles import machine_settings
from tests.engine.test_pace import failed
from tests.engine.test_scheduler_machine import PREFIXES, SETTINGS, Expected, SchedulerMachine

pytestmark = pytest.mark.dealt


class PoolingWorker(IdealWorker):
    """A prompt's vector is the token that would follow it."""

    def _sample(self, step: Step) -> StepResult:
        result = super()._sample(step)
        done = np.flatnonzero(result.emitted_R).tolist()
        finish_R = result.finish_R.copy()
        finish_R[done] = Finish.STOP
        return replace(
            result,
            tokens_RK=np.full_like(result.tokens_RK, -1),
            emitted_R=np.zeros_like(result.emitted_R),
            finish_R=finish_R,
            pooled={row: result.tokens_RK[row, :1].astype(np.float32) for row in done},
        )


class PoolingMachine(SchedulerMachine):
    @initialize(groups=st.sampled_from([*GROUPS, (("passing", 2),)]), **SETTINGS)
    def start(self, **settings) -> None:
        super().start(each=1, **settings)

    def make_worker(self, lazy: bool) -> IdealWorker:
        return PoolingWorker(self.layout, lazy=lazy)

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=4) | st.sampled_from(PREFIXES),
        whole=st.booleans(),
        salt=st.sampled_from(["", "", "a"]),
        priority=st.integers(0, 2),
        poison=st.sampled_from([False] * 7 + [True]),
    )
    def add(self, prompt, whole, salt, priority, poison) -> None:  # type: ignore[override]
        number = len(self.expected)
        request = Request(
            id=f"r{number}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(temperature=0, max_tokens=1),
            seed=number,
            max_total_tokens=len(prompt),
            cache_salt=salt,
            priority=priority,
            task="embed",
            whole=whole and len(prompt) <= self.config.max_num_batched_tokens,  # as `Engine.check` asks
        )
        if poison:
            self.worker.poison.add(request.seed)
        vector = [choose(visible(list(prompt), self.layout), number, None)]
        self.expected[request.id] = Expected(request, vector, may_fail=poison)
        self.scheduler.add(request)

    @rule()
    def go_on(self) -> None:
        """Add nothing: these requests write no tokens to go on from."""

    def _check_prefixes(self, plan: StepPlan) -> None:
        assert plan.expected is not None
        for slot, count in zip(plan.rows.slots_R.tolist(), plan.rows.num_tokens_R.tolist(), strict=True):
            form, number = plan.expected[slot], plan.expected[slot].seed
            if self.expected[f"r{number}"].request.whole:
                assert (form.kv_len, count) == (0, len(form.prompt)), "a prompt in pieces, or with something cached"

    def _note(self, event: TokenEvent) -> None:
        expected = self.expected[event.request_id]
        assert expected.ended is None, "an event came after the end"
        assert event.token_id < 0
        expected.ended = event.finish_reason
        if event.finish_reason == "error":
            seed = expected.request.seed
            innocent = not (expected.may_fail or seed in self.worker.blamed or self.worker.told_nan[seed] > 1)
            assert not innocent, f"an innocent request ended: {event.error}"
            return
        assert event.finish_reason == "stop"
        assert event.vector is not None
        assert event.vector.tolist() == expected.tokens, "another vector than alone"


TestPooling = PoolingMachine.TestCase
TestPooling.settings = machine_settings(examples=100, steps=25)


def test_no_step_is_too_small_for_a_prompt_that_runs_whole() -> None:
    pace = Pace(64, 8)
    pace.keep_room(1, 20)
    assert pace.shrink(failed(30))
    assert (pace.tokens, pace.rows) == (20, 8)
    assert not pace.shrink(failed(20)), "it does not fit alone"

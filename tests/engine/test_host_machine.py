"""The scheduler with a cache that is too small and a tier in the host's memory: a few prompts come again and again, in
the company of others that push them out, while requests leave, are preempted, and plans fail."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from ridgeline.core.plan.request import Preemption
from tests.engine.layouts import GROUPS
from tests.engine.profiles import machine_settings
from tests.engine.test_scheduler_machine import SETTINGS, SchedulerMachine

pytestmark = pytest.mark.dealt

PROMPTS = [tuple(1 + (n * n * k + n) % 7 % 2 for n in range(length)) for k in (1, 2, 3, 5) for length in (9, 12)]
PLAIN = {"fault": None, "faulty_at": 0, "poison": False, "scale": 1.0, "negative": None, "masked": None}


class HostMachine(SchedulerMachine):
    @initialize(
        groups=st.sampled_from(GROUPS),
        below=st.tuples(
            st.sampled_from([4, 12, 60, 60]), st.sampled_from([3e5, 1e6, 1e9]), st.sampled_from([1, 1 << 20, 1 << 20])
        ),
        each=st.sampled_from([1, 1, 2]),
        tight=st.sampled_from([0, 0, 1, 3]),
        **{name: SETTINGS[name] for name in ("block_size", "max_num_seqs", "extra_tokens", "depth", "policy", "lazy")},
    )
    def start(self, groups, tight, **options) -> None:
        super().start(groups, extra_pages=tight, caching=True, **options)

    @rule(
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.sampled_from([1, 2, 4]),
        salt=st.sampled_from(["", "", "", "a"]),
        scored=st.sampled_from([None, None, None, 6]),
    )
    def ask_again(self, prompt, max_tokens, salt, scored) -> None:
        self.add(prompt, max_tokens, 2, salt=salt, priority=0, ignore_eos=True, scored=scored, **PLAIN)

    @precondition(lambda self: self.expected and self.scheduler.running.leaders())
    @rule(data=st.data())
    def somebody_gives_way(self, data) -> None:
        running = sorted(self.scheduler.running.leaders(), key=lambda seq: seq.id)
        self.scheduler._preempt(data.draw(st.sampled_from(running)), Preemption.BLOCKS)

    @precondition(lambda self: self.expected)
    @rule(everything=st.sampled_from([False, False, True]))
    def prefixes_are_forgotten(self, everything) -> None:
        """While requests run, and plans are in flight; or as an engine does that goes to sleep."""
        if not everything:
            self.scheduler.cache.forget_prefixes()
            return
        while self.scheduler.in_flight:
            self.deliver(1)
        if not self.scheduler._recovery.failed:
            self.scheduler.vacate()


TestHost = HostMachine.TestCase
TestHost.settings = machine_settings(examples=60, steps=30)

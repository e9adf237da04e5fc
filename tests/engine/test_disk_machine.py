"""The scheduler with a tier in the host's memory and a disk below it: blocks go down and come back while requests leave
and are preempted, plans fail, the disk is slow, full or damaged, and the engine starts again."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.engine.ideal_disk import HostOctets, IdealDisk
from tests.engine.layouts import GROUPS
from tests.engine.profiles import machine_settings
from tests.engine.test_host_machine import PROMPTS, HostMachine
from tests.engine.test_scheduler_machine import SETTINGS

pytestmark = pytest.mark.dealt


class DiskMachine(HostMachine):
    @initialize(
        groups=st.sampled_from(GROUPS),
        below=st.tuples(st.sampled_from([12, 60]), st.sampled_from([1e6, 1e9]), st.sampled_from([1, 1 << 20, 1 << 20])),
        each=st.sampled_from([1, 1, 2]),
        tight=st.sampled_from([0, 1, 3]),
        prompt=st.booleans(),
        **{name: SETTINGS[name] for name in ("block_size", "max_num_seqs", "extra_tokens", "depth", "policy", "lazy")},
    )
    def start(self, prompt, **options) -> None:
        self.disk = IdealDisk()
        self.disk.prompt = prompt
        super().start(**options)

    def boot(self) -> None:
        super().boot()
        self.disk.memory = self.octets = HostOctets(lambda: self.worker.host)
        self.scheduler.keep_on_disk(self.disk, self.octets)

    def _check_prefixes(self, plan) -> None:
        self.octets.note(plan)
        super()._check_prefixes(plan)

    @rule(times=st.sampled_from([1, 3, 100]))
    def disk_works(self, times) -> None:
        self.disk.work(times)

    @rule(slow=st.booleans())
    def copies_take_long(self, slow) -> None:
        self.octets.slow = slow
        if not slow:
            self.octets.ended = self.octets.newest

    @rule(full=st.booleans())
    def disk_is_full(self, full) -> None:
        self.disk.full = full

    @precondition(lambda self: hasattr(self, "disk") and self.disk.stored)
    @rule(data=st.data(), many=st.booleans())
    def bits_flip(self, data, many) -> None:
        """The store finds that a block is damaged, and says that it is not there."""
        for key in list(self.disk.stored) if many else [data.draw(st.sampled_from([*self.disk.stored]))]:
            del self.disk.stored[key]

    @precondition(lambda self: hasattr(self, "disk") and self.disk.known)
    @rule(data=st.data(), many=st.booleans())
    def another_engine_writes(self, data, many) -> None:
        """Engines of one model share a directory: blocks come back that it had given up."""
        known = self.disk.known
        for key in list(known) if many else [data.draw(st.sampled_from([*known]))]:
            self.disk.stored.setdefault(key, known[key])

    @precondition(lambda self: hasattr(self, "disk"))
    @rule(
        orderly=st.sampled_from([True, True, False]),
        runs_on=st.sampled_from([0, 20, 20]),
        again=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=3),
    )
    def engine_starts_again(self, orderly, runs_on, again) -> None:
        """All requests are lost, and so is what waits to be written, unless the engine ends in order. Some prompts
        come at once to the new one."""
        for _ in range(runs_on):
            self.run(1)
            self.disk.work(4)
        for name, expected in self.expected.items():
            if expected.ended is None and self.scheduler.abort(name):
                expected.ended = "abort"
        while self.scheduler.in_flight:
            self.deliver(1)
        for event in self.scheduler._results.unsent:
            self._note(event)
        if orderly:
            self._end_writes()
        self.disk.orders.clear()
        self.boot()
        for prompt in again:
            self.ask_again(prompt, 2, "", None)

    def _end_writes(self) -> None:
        """End as an engine does that has nothing to run (`Engine.rest`)."""
        tier = self.scheduler.cache.tier
        assert self.scheduler.recovered()
        self.octets.ended = self.octets.newest
        tier.retire(self.scheduler.newest_plan)
        while tier.disk._writing or tier.disk._dirty or tier.disk._fetches:
            self.disk.work()
            self.scheduler.cache.tier.disk.arrivals()
            tier.disk.pump()

    def teardown(self) -> None:
        if hasattr(self, "expected"):
            self.disk.work()
            self.disk.prompt, self.octets.slow = True, False
            self.octets.ended = self.octets.newest
        super().teardown()

    def settle(self) -> None:
        self._end_writes()
        for (_, name), block in self.disk.stored.items():
            assert len(block) == len(self.layout.groups[name.group].layers) * self._cells_of(name.group)

    def _cells_of(self, group: int) -> int:
        return len(self.worker.unit(group, self.layout.block_id(group, 1, 0), 0))


TestDisk = DiskMachine.TestCase
TestDisk.settings = machine_settings(examples=50, steps=30)

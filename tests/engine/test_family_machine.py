"""Preemption among requests that share their beginnings: families of prompts run together in a cache that is too small,
victims are chosen by predicted cost, and what they leave goes to the host's memory and the disk, or is run again, while
members of the family come, fork off running ones, leave and are preempted for others.

The shadow model is that of the machines below; besides, every block is held as often as tables say, and by one salt."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from ridgeline.core.specs.cache_layout import NULL_BLOCK
from ridgeline.engine.pressure import Pressure
from ridgeline.engine.price import Price
from ridgeline.engine.sequence import Sequence
from tests.engine.layouts import GROUPS
from tests.engine.profiles import machine_settings
from tests.engine.test_disk_machine import DiskMachine
from tests.engine.test_host_machine import PLAIN
from tests.engine.test_scheduler_machine import SETTINGS

TRUNK = (1, 1, 2, 1, 2, 2, 1, 1, 1, 2, 2, 1)
PRICES = [Price(), Price(token=1e3, pair=10.0), Price(token=1e-3), Price(row=5.0, token=0.5, pair=0.5)]


class FamilyMachine(DiskMachine):
    @initialize(
        groups=st.sampled_from(GROUPS),
        below=st.tuples(st.sampled_from([6, 60]), st.sampled_from([3e5, 1e6, 1e9]), st.sampled_from([1, 1 << 20])),
        each=st.sampled_from([1, 1, 2]),
        tight=st.sampled_from([1, 6, 12, 20]),
        prompt=st.booleans(),
        price=st.sampled_from(PRICES),
        mode=st.sampled_from(["auto", "auto", "recompute", "swap"]),
        max_num_seqs=st.sampled_from([3, 4, 6]),
        **{name: SETTINGS[name] for name in ("block_size", "extra_tokens", "depth", "policy", "lazy")},
    )
    def start(self, price, mode, **options) -> None:
        self.price, self.mode, self.short = price, mode, 0
        super().start(**options)

    def boot(self) -> None:
        """Requests start whatever they will need, and costs are those of the drawn prices."""
        assert self.config.host_tier is not None
        self.config = replace(self.config, host_tier=replace(self.config.host_tier, preempted=self.mode))
        super().boot()
        running = self.scheduler.running
        running.pressure = Pressure(running.cache, running.forecast, self.price)
        running.pressure.admits = lambda seqs, num_running, outranked: True  # type: ignore[method-assign]
        running.pressure.is_high = self._is_high  # type: ignore[method-assign]
        assert running.cache.tier is not None
        running.cache.tier.price = self.price

    def _is_high(self, num_running: int) -> bool:
        """Return True as often as `memory_is_short` has said, and else as the pressure itself would."""
        if self.short:
            self.short -= 1
            return True
        return Pressure.is_high(self.scheduler.running.pressure, num_running)

    @rule(
        cut=st.integers(1, len(TRUNK)),
        leaves=st.lists(st.lists(st.integers(1, 2), max_size=2), min_size=2, max_size=4),
        max_tokens=st.sampled_from([3, 8, 8]),
        salt=st.sampled_from(["", "", "a"]),
        priority=st.integers(0, 2),
        scored=st.sampled_from([None, None, None, 4]),
        times=st.integers(0, 4),
    )
    def members_come(self, cut, leaves, max_tokens, salt, priority, scored, times) -> None:
        for n, leaf in enumerate(leaves):
            prompt = (*TRUNK[:cut], *leaf)
            rank = (priority + n) % 3
            self.add(prompt, max_tokens, 2, salt=salt, priority=rank, ignore_eos=True, scored=scored, **PLAIN)
        self.run(times)

    @precondition(lambda self: self.expected and len(self.scheduler.running.leaders()) > 1)
    @rule(times=st.lists(st.integers(1, 2), min_size=1, max_size=3))
    def memory_is_short(self, times) -> None:
        """The next plans choose victims by their cost."""
        for self.short in times:
            self.run(1)
        self.short = 0

    @precondition(lambda self: self.expected and self._sharing())
    @rule(data=st.data())
    def one_that_shares_leaves(self, data) -> None:
        name = data.draw(st.sampled_from(sorted(seq.request.id for seq in self._sharing())))
        assert self.scheduler.abort(name)
        self.expected[name].ended = "abort"

    def _sharing(self) -> list[Sequence]:
        """Return the running requests that hold a block which another one holds as well."""
        leaders = self.scheduler.running.leaders()
        held = Counter((g, block) for seq in leaders for g, blocks in enumerate(seq.blocks) for block in {*blocks})
        return [
            seq
            for seq in leaders
            if any(block and held[g, block] > 1 for g, blocks in enumerate(seq.blocks) for block in blocks)
            and self.expected[seq.request.id].ended is None
            and seq.request.id not in self._ended_unheard()
        ]

    @invariant()
    def blocks_are_held_as_often_as_tables_say(self) -> None:
        if not hasattr(self, "expected") or self.scheduler._recovery.failed:
            return
        cache, held, salts = self.scheduler.cache, Counter[tuple[int, int]](), dict[tuple[int, int], str]()
        for leader in self.scheduler._by_id.values():  # those whose last tokens are on the way hold theirs too
            for seq in leader.members:
                entries = [(g, block) for g, blocks in enumerate(seq.blocks) for block in blocks]
                entries += [(g, block) for g, block in enumerate(seq.source)]
                for entry in entries:
                    if entry[1] != NULL_BLOCK:
                        held[entry] += 1
                        assert salts.setdefault(entry, seq.request.cache_salt) == seq.request.cache_salt
        if any(group.spec.exact for group in self.layout.groups):
            return  # states on their way are held besides (`Partings`)
        assert cache.tier is not None
        held.update(cache.tier._arriving.keys())  # blocks whose loads are queued
        for (g, block), count in held.items():
            assert cache.pool.refs(g, block) == count
        if len(self.layout.groups) == 1:
            assert cache.pool.num_pages - cache.pool.free_pages == len(held), "a block is lost"


TestFamilies = FamilyMachine.TestCase
TestFamilies.settings = machine_settings(examples=40, steps=30)

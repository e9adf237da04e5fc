"""The disk tier against a model of it: a dictionary of what was written, and the set of what may be gone.

What is read is what was written under that tenant and name, or nothing. What was neither evicted, removed, expired nor
damaged is there, also after a process died. The files never have more bytes than they may.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ridgeline.tiers.disk import DiskTier
from ridgeline.tiers.eviction import POLICIES
from ridgeline.tiers.options import DiskOptions
from ridgeline.tiers.sealed import RECORD_BYTES, BlockName
from ridgeline.tiers.segment import ALIGNED

CAPACITY = 1 << 20
QUOTA = CAPACITY // 2
SIZES = (3_000, 4_096, 50_000)
TENANTS = ("", "a", "b")
NAMES = [BlockName(bytes([number]) * 16, number % 2, number % 3) for number in range(40)]
tenants, names = st.sampled_from(TENANTS), st.sampled_from(NAMES)


def content(tenant: str, name: BlockName) -> bytes:
    size = SIZES[name.chain[0] % len(SIZES)]
    return (repr((tenant, name)).encode() * (size // 16))[:size]


def kill(tier: DiskTier) -> None:
    """Leave a tier as a process does that is killed: its lock ends, and nothing else is done."""
    tier._closing.set()
    tier._writers.shutdown()
    tier._readers.shutdown()
    tier.files.close()
    os.close(tier._owner._file)
    os.close(tier._directory.descriptor)


class DiskMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="disk-"))
        self.now = 1e9
        self.policy = "lru"
        self.there: dict[tuple[str, BlockName], float] = {}  # what was written → when it expires
        self.certain: set[tuple[str, BlockName]] = set()  # what was not damaged since
        self.given_up = 0
        self.tier = self.opened()

    def opened(self) -> DiskTier:
        options = DiskOptions(
            period=0, segment_bytes=128 << 10, eviction=self.policy, tenant_bytes=QUOTA, retry=0, readers=1, writers=1
        )
        return DiskTier(self.folder / "kv", b"model", CAPACITY, options, clock=lambda: self.now)

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.folder)

    def lost_some(self) -> bool:
        """Return True, and be certain of nothing, if something was evicted."""
        count = self.tier.figures().evicted
        lost, self.given_up = count != self.given_up, count
        if lost:
            self.certain.clear()
        return lost

    @rule(tenant=tenants, name=names, ttl=st.sampled_from([0, 0, 50]))
    def write(self, tenant: str, name: BlockName, ttl: int) -> None:
        key = tenant, name
        data = content(*key)
        known = self.tier.contains(name, tenant)
        parts = [data[:1000], bytearray(data[1000:2000]), memoryview(data)[2000:]]
        done = self.tier.submit_write(name, tenant, parts, self.now + ttl if ttl else 0.0).result()
        assert done
        self.lost_some()
        if not known:
            self.there[key] = self.now + ttl if ttl else float("inf")
            self.certain.add(key)

    @rule(tenant=tenants, name=names)
    def read(self, tenant: str, name: BlockName) -> None:
        self.check(self.tier, tenant, name)

    def check(self, tier: DiskTier, tenant: str, name: BlockName) -> None:
        key, data = (tenant, name), content(tenant, name)
        first, second = bytearray(b"?" * 1500), bytearray(len(data) - 1500)
        found = tier.submit_read(name, tenant, [first, second]).result()
        if found:
            assert first + second == data
            assert self.there[key] > self.now
        else:
            assert key not in self.certain or self.there[key] <= self.now
        assert not tier.submit_read(name, tenant, [bytearray(len(data) - 1)]).result()

    @rule(tenant=tenants, name=names)
    def remove(self, tenant: str, name: BlockName) -> None:
        self.tier.remove(name, tenant)
        assert not self.tier.contains(name, tenant)
        self.forget(lambda key: key == (tenant, name))

    @rule(tenant=st.sampled_from([*TENANTS, None]))
    def purge(self, tenant: str | None) -> None:
        self.tier.purge(tenant)
        self.forget(lambda key: tenant in (None, key[0]))

    def forget(self, gone) -> None:
        self.there = {key: end for key, end in self.there.items() if not gone(key)}
        self.certain &= self.there.keys()

    @rule(seconds=st.sampled_from([1, 60]))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.tier.tick()
        self.lost_some()
        assert all(entry.expires == 0 or entry.expires > self.now for entry in self.tier._catalog.entries.values())

    @rule(killed=st.booleans(), policy=st.sampled_from(POLICIES))
    def restart(self, killed: bool, policy: str) -> None:
        kill(self.tier) if killed else self.tier.close()
        self.policy, self.given_up = policy, 0
        self.tier = self.opened()

    @rule(tenant=tenants, name=names)
    def full(self, tenant: str, name: BlockName) -> None:
        written = self.tier.files.write

        def fail(segment, slot, row, parts) -> None:
            written(segment, slot, bytes(RECORD_BYTES), [bytes(ALIGNED)])
            raise OSError(errno.ENOSPC, "No space left on device")

        known = self.tier.contains(name, tenant)
        self.tier.files.write = fail  # type: ignore[method-assign]
        assert self.tier.submit_write(name, tenant, [content(tenant, name)]).result() == known
        self.tier.files.write = written  # type: ignore[method-assign]
        self.lost_some()

    @rule(tenant=tenants, name=names)
    def another_reads(self, tenant: str, name: BlockName) -> None:
        other = self.opened()
        self.check(other, tenant, name)
        assert other.figures().own_bytes == 0
        other.close()

    def files(self) -> list[Path]:
        return sorted((self.folder / "kv").glob("*.seg"))

    @precondition(lambda self: any(file.stat().st_size for file in self.files()))
    @rule(data=st.data())
    def damage(self, data) -> None:
        file = data.draw(st.sampled_from([file for file in self.files() if file.stat().st_size]))
        content, way = bytearray(file.read_bytes()), data.draw(st.sampled_from(["flip", "truncate", "swap"]))
        if way == "flip":
            for _ in range(data.draw(st.integers(1, 64))):
                content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        elif way == "truncate":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        else:  # the records of two slots change places
            a, b = (ALIGNED + RECORD_BYTES * data.draw(st.integers(0, 30)) for _ in range(2))
            content += bytes(max(0, max(a, b) + RECORD_BYTES - len(content)))
            first, second = content[a : a + RECORD_BYTES], content[b : b + RECORD_BYTES]
            content[a : a + RECORD_BYTES], content[b : b + RECORD_BYTES] = second, first
        file.write_bytes(content)
        self.certain.clear()

    @invariant()
    def bounded(self) -> None:
        assert sum(file.stat().st_size for file in self.files()) <= CAPACITY
        figures = self.tier.figures()
        assert figures.bytes <= figures.own_bytes <= CAPACITY
        assert all(size <= QUOTA for size in self.tier._catalog.tenants.values())
        assert figures.queued_bytes == 0
        for segment in self.tier._catalog.own():
            slots = {entry.place.slot for entry in self.tier._catalog.held(segment)}
            free = [place.slot for place in self.tier._catalog._free[segment.shape.slot_bytes] if place[0] is segment]
            assert sorted([*free, *slots]) == list(range(segment.shape.slots))


TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=40, stateful_step_count=40)

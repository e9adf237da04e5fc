"""A simulated disk below the host's memory: the engine's own rules decide what is written and read."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline.simulation.clock import VirtualClock
from ridgeline.simulation.disk import SimulatedDisk
from ridgeline.simulation.fleet import Fleet, FleetSettings, ReplicaFailure
from ridgeline.simulation.setup import Settings
from ridgeline.simulation.traffic import Ask, Listed, Piece
from ridgeline.tiers.sealed import BlockName
from tests.simulation.fleets import asked, run, setup, small
from tests.simulation.test_fleet import Recorded, sizes

BELOW = {"kv_offloading_size": 0.25, "kv_disk_size": 4.0}


@settings(max_examples=25, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=20), st.integers(0, 150), st.sampled_from([0.001, 0.7, 1e3]))
def test_every_request_ends_once_with_all_its_tokens(
    given_sizes: list[tuple[float, int, int]], shared: int, rate: float
) -> None:
    asks = asked([*given_sizes, *given_sizes], shared)
    fleet = Fleet(small(**BELOW, kv_disk_rate=rate), FleetSettings(replicas=2), Listed(iter(asks)))
    fleet.counts = recorded = Recorded(fleet.counts)
    fleet.run()
    assert recorded.ends == Counter(ask.number for ask in asks)
    assert recorded.output == {ask.number: ask.answer.tokens for ask in asks}


def turns(count: int, pause: float) -> list[Ask]:
    """One prompt, asked for again and again."""
    prompt = (Piece(10, 4000),)
    return [Ask(number=n, at=pause * n, prompt=prompt, answer=Piece(20 + n, 4)) for n in range(count)]


@pytest.mark.parametrize(("rate", "found"), [(1e3, True), (1e-4, False)])
def test_a_replica_that_was_away_finds_its_cache_where_reading_beats_running(rate: float, found: bool) -> None:
    failure = [ReplicaFailure(replica=0, at=5.0, away=1.0)]
    for size in (4.0, 0.0):
        below = {"kv_offloading_size": 4.0, "kv_disk_size": size, "kv_disk_rate": rate}
        large = setup("llama-8b", max_model_len=8192, kv_tokens=16384, lag=0.0, **below)
        _, figures = run(large, turns(2, 10.0), FleetSettings(failures=failure))
        assert figures.completed == 2
        assert (figures.disk_hit_rate > 0.4) == (found and size > 0)
        assert (figures.hit_rate > 0.4) == (found and size > 0)


@pytest.mark.parametrize("shared", [True, False])
def test_replicas_of_one_store_find_what_others_wrote(shared: bool) -> None:
    """Turns go round, so each comes to a replica that never saw it."""
    below = {"kv_offloading_size": 4.0, "kv_disk_size": 4.0, "kv_disk_rate": 1e3, "kv_disk_shared": shared}
    large = setup("llama-8b", max_model_len=8192, kv_tokens=16384, lag=0.0, **below)
    _, figures = run(large, turns(4, 10.0), FleetSettings(replicas=4, routing="round-robin"))
    assert figures.completed == 4
    assert (figures.disk_hit_rate > 0.7) == (figures.hit_rate > 0.7) == shared


def test_a_store_takes_its_time_and_forgets_what_was_used_least_lately() -> None:
    clock = VirtualClock()
    disk = SimulatedDisk(clock, capacity_bytes=30, rate=10.0)
    names = [BlockName(bytes([n]) * 16) for n in range(4)]
    block = bytearray(10)
    done = [disk.submit_write(name, "", [block]) for name in names[:3]]
    clock.advance(2.5)
    assert [each.done() for each in done] == [True, True, False], "one second each, one after the other"
    assert [disk.contains(name) for name in names] == [True, True, False, False]
    read = disk.submit_read(names[0], "", [block])
    clock.advance(3.4)
    assert not read.done()
    clock.advance(3.5)
    assert read.done()
    assert read.result()
    disk.submit_write(names[3], "", [block])
    clock.advance(9.0)
    assert [disk.contains(name) for name in names] == [True, False, True, True]
    assert not disk.contains(names[0], "another tenant")
    assert not disk.submit_read(names[1], "", [block]).result()


def test_a_disk_without_the_hosts_memory_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="by way of the host's memory"):
        Settings(kv_disk_size=1.0)

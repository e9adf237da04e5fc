"""The host's memory below a simulated cache: what was evicted comes back, over a bus that takes its time."""

from __future__ import annotations

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.step import MoveBlocks, Moves
from ridgeline.simulation.bus import HostBus
from ridgeline.simulation.figures import FleetFigures
from ridgeline.simulation.setup import Settings
from ridgeline.simulation.traffic import Ask, Piece
from tests.simulation.fleets import run, small

SAVES, LOADS = (MoveBlocks(0, (1, 2), (3, 4)),), (MoveBlocks(0, (5,), (6,)), MoveBlocks(1, (7,), (8,)))


def test_rows_wait_for_the_loads_of_earlier_plans_and_for_their_own_if_these_are_awaited() -> None:
    bus = HostBus(rate=100.0, memory=1000.0, block_bytes=(10, 30))
    assert bus.begin(None, 1.0) == 1.0
    assert bus.begin(Moves(saves=SAVES), 1.0) == 1.0 + 2 * 20 / 1000  # they are gathered first, and travel beside
    assert bus.begin(None, 1.1) == 1.1
    there = 1.04 + 20 / 100 + 40 / 100 + 2 * 40 / 1000  # behind the saves, then over the bus and into their places
    assert bus.begin(Moves(loads=LOADS), 1.2) == 1.2
    assert bus.begin(None, 1.25) == pytest.approx(there)
    later = bus.begin(Moves(loads=LOADS, awaited=True), 2.0)
    assert later == pytest.approx(2.0 + 40 / 100 + 2 * 40 / 1000)
    assert bus.begin(None, 2.1) == later


def conversations(turns: int) -> list[Ask]:
    """Six prompts of 300 tokens, in turns: three times what the cache holds."""
    found = []
    for number in range(6 * turns):
        prompt = (Piece(2 + number % 6, 300), Piece(100 + number, 5))
        seen = 300 if number >= 6 else 0
        found.append(Ask(number=number, at=0.2 * number, prompt=prompt, answer=Piece(1000 + number, 8), seen=seen))
    return found


def simulated(gib: float, kv_tokens: int = 600) -> FleetFigures:
    return run(small(model="llama-8b", kv_tokens=kv_tokens, kv_offloading_size=gib), conversations(4))[1]


def test_what_was_evicted_is_found_in_the_hosts_memory() -> None:
    without, with_tier, large = simulated(0.0), simulated(1.0), simulated(0.0, kv_tokens=8192)
    assert without.host_hit_rate == without.host_saved_bytes == without.host_loaded_bytes == 0
    assert without.hit_rate < 0.2 < with_tier.hit_rate
    assert with_tier.hit_rate == pytest.approx(large.hit_rate, abs=0.02), "as if the device had held all of it"
    assert 0 < with_tier.host_hit_rate <= with_tier.hit_rate
    assert with_tier.ttft.mean < without.ttft.mean
    assert with_tier == simulated(1.0)


def test_the_bytes_that_came_back_are_those_of_the_hits() -> None:
    layout, found = small(model="llama-8b").layout, simulated(1.0)
    hits = found.host_hit_rate * sum(ask.length for ask in conversations(4)) / 300
    assert hits == pytest.approx(18), "every prompt but the first six"
    assert found.host_loaded_bytes == 18 * -(-300 // layout.block_size) * layout.page_bytes


def test_blocks_stay_below_where_running_their_tokens_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.simulation.setup.bus_rate", lambda hardware: 1e6)
    found = simulated(1.0)
    assert found.host_saved_bytes > 0
    assert found.host_hit_rate == found.host_loaded_bytes == 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kv_offloading_size": -1.0}, "kv_offloading_size must be from 0"),
        ({"kv_offloading_size": 1.0, "prefix_caching": False}, "found by their prefixes"),
    ],
)
def test_mistakes_are_named(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        Settings(**settings)  # type: ignore[arg-type]

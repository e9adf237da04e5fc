"""The router's idea of a server's cache, from KV events."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.routing import BLOCK, Router
from ridgeline.core.settings.kv_events import KVEvents
from ridgeline.core.settings.routing import RouteConfig
from ridgeline.serving.router.cached import CachedTokens
from ridgeline.transport.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    KVEventPublisher,
)
from tests.serving.routing.running import FakeWorker, routing, wait_for


def stored(*hashes: int, size: int = 16, group: int = 0) -> BlockStored:
    tokens = [1] * size * len(hashes)
    return BlockStored(list(hashes), None, tokens, size, None, "GPU", None, group_idx=group)


def removed(*hashes: int, group: int = 0) -> BlockRemoved:
    return BlockRemoved(list(hashes), "GPU", group)


def told(*batches: tuple[int, list[Event]], time: float = 1.0) -> CachedTokens:
    found = CachedTokens()
    for number, events in batches:
        found.take(number, EventBatch(time, events, 0))
    return found


def test_the_size_is_known_once_a_full_block_was_evicted() -> None:
    full = told((0, [AllBlocksCleared(), stored(1, 2, 3), stored(1, 2, group=1), stored(9, size=5)]))
    assert full.size is None
    full.take(1, EventBatch(2.0, [removed(9)], 0))  # a longer one takes its place
    assert full.size is None
    full.take(2, EventBatch(3.0, [removed(1), stored(4, 5)], 0))
    assert full.size == 4 * 16


def test_a_missing_batch_makes_the_size_unknown_until_all_is_cleared() -> None:
    events: list[Event] = [AllBlocksCleared(), stored(1, 2, 3), removed(1)]
    found = told((0, events), (2, [stored(7)]))
    assert found.size is None
    found.take(3, EventBatch(4.0, events, 0))
    assert found.size == 48


def test_a_batch_that_comes_twice_counts_once_and_another_engine_begins_anew() -> None:
    found = told((0, [AllBlocksCleared()]), (1, [stored(1, 2), removed(1)]), (1, [stored(1, 2), removed(1)]))
    assert (found.size, found.forgets) == (32, 1)
    found.take(1, EventBatch(9.0, [stored(3)], 0))
    assert (found.size, found.forgets) == (None, 2)


def test_what_is_beyond_a_replicas_cache_is_no_reason_to_go_there() -> None:
    router, loads = Router(2), {0: 0.0, 1: 0.0}
    long, later = list(range(4 * BLOCK)), list(range(1000, 1000 + 2 * BLOCK))
    home = router.choose(long, "", loads)
    router.choose(later, "", {home: 0.0})
    assert router.cached(home, long, "") == 4 * BLOCK
    router.bound(home, 3 * BLOCK)
    assert (router.cached(home, later, ""), router.cached(home, long, "")) == (2 * BLOCK, BLOCK)
    router.bound(home, None)
    router.choose(long, "", {home: 0.0})
    assert router.cached(home, long, "") == 4 * BLOCK


def test_a_router_follows_the_events_of_its_servers(tmp_path: Path) -> None:
    """It starts after them, and hears by a replay what came before."""
    live, again = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publisher, worker = KVEventPublisher(KVEvents(endpoint=live, replay_endpoint=again)), FakeWorker()
    try:
        publisher.publish([AllBlocksCleared(), stored(1, 2, 3), removed(1)])
        with routing(worker, policy="prefix", kv_events=(f"{live},{again}",)) as router:
            [known] = router.app.workers.each
            wait_for(lambda: known.room == 48)
            publisher.publish([stored(1, 4)])
            wait_for(lambda: known.room == 64)
            publisher.publish([AllBlocksCleared()])
            wait_for(lambda: (known.room, known.forgotten) == (None, 2))
    finally:
        worker.close()
        publisher.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("tcp://a:1", "tcp://a:2"), "kv_events has 2 addresses for 1 workers"),
        (("http://a:1",), "'http://a:1' is no endpoint of KV events"),
        (("tcp://a:1,b",), "'b' is no endpoint of KV events"),
    ],
)
def test_a_wrong_address_is_named(given: tuple[str, ...], words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        RouteConfig(worker_urls=("http://a:1",), kv_events=given)
    assert words in str(caught.value)

"""KV events as a subscriber of vLLM's sees them."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from ridgeline import LLM, SamplingParams
from ridgeline.assembly.kv_events import short
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.core.settings.kv_events import KVEvents, is_bound, read_kv_events
from ridgeline.transport import kv_events
from ridgeline.transport.kv_events import AllBlocksCleared, BlockStored, KVEventPublisher
from tests.engine.followed import findable
from tests.transport.vllm_events import PATIENCE, Subscriber, replayed

Publish = Callable[..., KVEventPublisher]


def stored(*hashes: int, tokens: int = 1) -> BlockStored:
    return BlockStored(list(hashes), None, [7] * tokens * len(hashes), tokens, None, "GPU", None, group_idx=0)


@pytest.fixture
def publish(tmp_path: Path) -> Iterator[Publish]:
    made: list[KVEventPublisher] = []

    def start(**settings: object) -> KVEventPublisher:
        addresses = {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
        made.append(KVEventPublisher(KVEvents(**{**addresses, **settings})))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for each in made:
        each.close()


def connected(publisher: KVEventPublisher, subscriber: Subscriber) -> int:
    """Publish until the subscriber hears it. Returns the number of the last batch."""
    end = time.monotonic() + PATIENCE
    while not subscriber.read(0.05):
        assert time.monotonic() < end
        publisher.publish([AllBlocksCleared()])
    while subscriber.read(0.2):
        pass
    return max(subscriber.batches)


def test_the_bytes_are_those_that_vllm_writes() -> None:
    """Those of version 0.26 for one block: a list with the events as maps, and fields at their defaults left out."""
    batch = kv_events.EventBatch(1.5, [stored(3), AllBlocksCleared()], 0)
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    told = {
        "type": "BlockStored", "block_hashes": [3], "parent_block_hash": None, "token_ids": [7], "block_size": 1,
        "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0,
    }  # fmt: skip
    assert plain == [1.5, [told, {"type": "AllBlocksCleared"}], 0]


def test_a_batch_has_a_topic_and_a_number_and_can_be_asked_for_again(publish: Publish, tmp_path: Path) -> None:
    publisher = publish(topic="kv", buffer_steps=4)
    subscriber, other = (Subscriber(f"ipc://{tmp_path}/events", topic) for topic in ("kv", "other"))
    last = connected(publisher, subscriber)
    for number in range(6):
        publisher.publish([stored(number)])
    subscriber.read_until(last + 6)
    assert [n for n in subscriber.batches if n > last] == list(range(last + 1, last + 7))
    assert subscriber.found == {(0, number) for number in range(6)}
    again = replayed(f"ipc://{tmp_path}/replay", 0)
    assert list(again) == list(range(last + 3, last + 7))  # the newest four
    assert again == {number: subscriber.batches[number] for number in again}
    assert list(replayed(f"ipc://{tmp_path}/replay", last + 5)) == [last + 5, last + 6]
    assert replayed(f"ipc://{tmp_path}/replay", last + 99) == {}
    assert not other.batches
    assert not other.read()
    subscriber.close()
    other.close()


def test_a_slow_subscriber_loses_batches_and_sees_that_by_their_numbers(publish: Publish, tmp_path: Path) -> None:
    publisher = publish(hwm=10)
    subscriber = Subscriber(f"ipc://{tmp_path}/events")
    last = connected(publisher, subscriber)
    for number in range(20_000):  # the kernel's buffers hold some too
        publisher.publish([stored(number, tokens=400)])
    end = time.monotonic() + PATIENCE
    while publisher._queue:
        assert time.monotonic() < end
        time.sleep(0.01)
    while subscriber.read(0.5):
        pass
    missed = [number for number in range(last + 1, last + 20_001) if number not in subscriber.batches]
    assert len(missed) > 1000
    assert publisher._kept_bytes <= kv_events.REPLAY_BYTES
    subscriber.close()


def test_the_publishers_own_queue_is_bounded_in_batches_and_tokens(
    publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine goes on at once, and numbers tell what was lost."""
    monkeypatch.setattr(KVEventPublisher, "_run", lambda self: None)  # a thread that never comes
    publisher = publish(max_queue_size=5)
    for _ in range(9):
        publisher.publish([stored(1)])
    assert ([number for number, _, _ in publisher._queue], publisher.lost) == ([0, 1, 2, 3, 4], 4)
    monkeypatch.setattr(kv_events, "QUEUE_TOKENS", 1000)
    other = KVEventPublisher(KVEvents(endpoint="tcp://127.0.0.1:" + str(free_port())))
    for _ in range(9):
        other.publish([stored(1, tokens=300)])
    assert (len(other._queue), other.lost) == (3, 6)
    for each in (publisher, other):
        each._close_sockets()
        each._stopped = True


def test_replays_of_clients_that_read_nothing_delay_no_batch(publish: Publish, tmp_path: Path) -> None:
    publisher = publish()
    subscriber = Subscriber(f"ipc://{tmp_path}/events")
    connected(publisher, subscriber)
    for number in range(3000):
        publisher.publish([stored(number, tokens=1000)])
    idle = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(3)]
    for each in idle:
        each.set_hwm(1)
        each.connect(f"ipc://{tmp_path}/replay")
        each.send_multipart((b"", bytes(8)))
        each.send_multipart((b"no", b"question", b"of", b"ours"))
    assert len(replayed(f"ipc://{tmp_path}/replay", publisher._number - 5)) == 5
    publisher.publish([stored(9999)])
    subscriber.read_until(publisher._number - 1)
    for each in idle:
        each.close(0)
    subscriber.close()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def test_an_engines_subscriber_knows_all_that_can_be_found(tmp_path: Path) -> None:
    """A cache so small that blocks are evicted. A prompt's tokens and parents are its own."""
    config = {
        "enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }  # fmt: skip
    with LLM(device="cpu", kv_cache_memory="1M", max_model_len=256, kv_events_config=config) as llm:
        params = SamplingParams(max_tokens=3, temperature=0)
        for number in range(12):
            llm.generate([f"def f{number}(a, b):\n    return a + b * {number}\n" * 5], params, use_tqdm=False)
        publisher = llm.engine._blocks._publisher  # type: ignore[attr-defined]
        subscriber = Subscriber(f"ipc://{tmp_path}/events")
        subscriber.batches = replayed(f"ipc://{tmp_path}/replay", 0)
        index = llm.engine.scheduler.cache.index  # type: ignore[attr-defined]
        assert subscriber.found == {(group, short(each)) for group, each in findable(index)} != set()
        removed = [
            e for batch in subscriber.batches.values() for e in batch.events if type(e).__name__ == "BlockRemoved"
        ]
        assert removed
        connected(publisher, subscriber)
        llm.reset_prefix_cache()
        subscriber.read_until(publisher._number - 1)
        assert subscriber.found == set()
        subscriber.close()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enable_kv_cache_events": "yes"}, "must be true or false, got 'yes'"),
        ({"enable": True}, "kv_events_config has no 'enable'"),
        ({"publisher": "nats"}, "publisher of kv_events_config must be zmq or null, got 'nats'"),
        ({"endpoint": "http://a:1"}, "'http://a:1' is no endpoint of KV events"),
        ({"endpoint": "tcp://127.0.0.1:99999"}, "has the port 99999"),
        ({"endpoint": 5}, "endpoint of kv_events_config must be a text, got 5"),
        ({"topic": "\ud800"}, "topic of kv_events_config must be a text of Unicode"),
        ({"hwm": 0}, "hwm of kv_events_config must be a number from 1, got 0"),
        ({"buffer_steps": True}, "buffer_steps of kv_events_config must be a number from 0, got True"),
        ({"endpoint": "tcp://a:1", "replay_endpoint": "tcp://a:1"}, "are both tcp://a:1"),
        ([], "kv_events_config must be an object"),
    ],
)
def test_a_wrong_setting_is_named(given: object, words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_kv_events(given)
    assert words in str(caught.value)


def test_events_are_off_unless_they_are_asked_for_and_stay_on_this_machine() -> None:
    assert read_kv_events(None) is read_kv_events({}) is read_kv_events({"endpoint": "tcp://*:5557"}) is None
    assert read_kv_events({"enable_kv_cache_events": True, "publisher": "null"}) is None
    on = read_kv_events({"enable_kv_cache_events": True})
    assert on is not None
    assert on.endpoint == "tcp://127.0.0.1:5557"
    assert KVEvents(data_parallel_rank=2).of_rank("tcp://[::1]:5557") == "tcp://[::1]:5559"
    with pytest.raises(InvalidConfig, match="kv_events_config tells of the prefix cache"):
        LLMConfig(kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)


def test_an_address_that_others_can_reach_is_said_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with caplog.at_level(logging.WARNING):
        KVEventPublisher(KVEvents(endpoint=f"tcp://127.0.0.1:{port}")).close()
        assert not caplog.records
        KVEventPublisher(KVEvents(endpoint=f"tcp://*:{port}")).close()
    assert f"leave this machine's own processes: tcp://*:{port}" in caplog.text


def test_a_path_of_a_file_or_of_another_process_is_refused_and_left_alone(publish: Publish, tmp_path: Path) -> None:
    """ZeroMQ deletes what is at the path that it binds to."""
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        with pytest.raises(InvalidConfig, match=f"{name} of kv_events_config is there, and is no socket"):
            publish(endpoint=f"ipc://{tmp_path}/{name}")
    assert (tmp_path / "file").read_text() == "precious"
    first, subscriber = publish(), Subscriber(f"ipc://{tmp_path}/events")
    connected(first, subscriber)
    for _ in range(4):  # names inside of the process are not taken twice either
        with pytest.raises(InvalidConfig, match="events of kv_events_config is another process's"):
            publish()
    connected(first, subscriber)
    subscriber.close()
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(tmp_path / "ended"))
    assert publish(endpoint=f"ipc://{tmp_path}/ended", replay_endpoint=None)._thread.is_alive()


def test_an_address_of_this_machine_is_bound_however_it_is_written() -> None:
    bound = ("tcp://LocalHost:1", "tcp://[0:0::0]:1", "tcp://127.1.2.3:1", "tcp://*:1", "ipc://a")
    assert [is_bound(each) for each in bound] == [True] * 5
    assert not is_bound("tcp://10.0.0.1:1")


def test_a_taken_address_is_a_mistake_of_the_user() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"tcp://127.0.0.1:{port} of kv_events_config cannot be had"):
            KVEventPublisher(KVEvents(endpoint=f"tcp://127.0.0.1:{port}"))
